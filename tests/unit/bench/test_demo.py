"""What the demo says in the end, from what it measured."""

from __future__ import annotations

from proxy.bench import stories
from proxy.bench.demo import ALONE, SEAMARK, in_short, legend, render
from proxy.bench.stories import Line, Planted, Story


def story(shared: int, hit: int, error: float = 0.0) -> Story:
    ours = Line(SEAMARK, hit_second=hit, ttfts_cold=[0.5], ttfts_warm=[0.1], largest_error=error)
    alone = Line(ALONE, hit_second=0, ttfts_cold=[0.4], ttfts_warm=[0.45])
    return Story(stories.SYSTEM_PROMPT, shared, hit, [ours, alone], True, "")


def planted(*, caught: bool) -> list[Planted]:
    return [Planted("none", False, 0.0, None), Planted("a state one token early", caught, 1.0, 3)]


def test_hits_seconds_and_exactness_or_what_did_not_hold_in_three_sentences():
    hits, seconds, exactness = in_short([story(100, 90), story(900, 900)], planted(caught=True))
    assert "found 99% of it in the cache with Seamark, and 0% with vLLM alone" in hits
    assert "100 ms instead of 450 ms with a prompt of 900 tokens; the first request's took 500 ms" in seconds
    assert "were all those of" in exactness and "says so noticed every defect" in exactness
    assert "were NOT all those of" in in_short([story(100, 90, error=0.5)], planted(caught=True))[2]
    assert "did NOT notice every defect" in in_short([story(100, 90)], planted(caught=False))[2]


def test_the_table_has_no_word_that_the_legend_leaves_unexplained():
    said = render([story(100, 90)], planted(caught=True))
    assert "100 tokens shared, a perfect cache hits 90" in said and "oracle" not in said
    for column in ("hit at 2", "hit after", "passes", "first token", "exact"):
        assert column in legend()


def test_engines_are_compared_by_pairs_of_the_same_request():
    ours = Line(SEAMARK, ttfts_cold=[0.2, 0.9, 0.3], ttfts_warm=[0.1])
    alone = Line(ALONE, ttfts_cold=[0.1, 0.9, 0.3], ttfts_warm=[0.2])
    said = render([Story(stories.SYSTEM_PROMPT, 100, 96, [ours, alone], True, "")], [])
    assert "cold 1.00x faster, warm 2.00x faster" in said
