"""States of convolutions: the inputs before a position, wherever it lies in a step, in blocks of each cache group."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_patches.footprint import RUNNING, SCAN_STATES
from engine_patches.forward import conv_states
from engine_patches.forward.step_writes import Step, Write

WIDTH, CHANNELS = 9, 5

TARGETS = 40  # the first block that takes a state


class Drawn:
    """A step of some rows with states wanted at drawn offsets, and what their windows have to be."""

    def __init__(self, seed: int, *, first: int = 0, decodes: int = 0) -> None:
        """`decodes`: rows of one token before all others. `first`: of the cache group's blocks."""
        draw = random.Random(seed)
        rows = [(draw.choice([3, 40]), 1) for _ in range(decodes)]
        rows += [(draw.choice([0, 1, 5, 40]), draw.randrange(2, 30)) for _ in range(3)]
        self.starts = [0]
        for _, tokens in rows:
            self.starts.append(self.starts[-1] + tokens)
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(self.starts[-1], CHANNELS, generator=generator)
        self.state = torch.randn(80, CHANNELS, WIDTH + 2, generator=generator)  # with room for drafts behind
        self.decodes, self.num_rows = decodes, len(rows)
        self.writes: dict[str, list[Write]] = {}
        self.right: dict[int, Any] = {}
        for row, (before, tokens) in enumerate(rows):
            past = torch.randn(before, CHANNELS, generator=generator)
            window = torch.cat([torch.zeros(WIDTH, CHANNELS), past])[-WIDTH:]
            self.state[first + row, :, :WIDTH] = window.T if before else torch.randn(CHANNELS, WIDTH)
            if tokens == 1:
                continue
            offsets = sorted(draw.sample(range(1, tokens + 1), min(2, tokens)))
            blocks = [TARGETS + 2 * row + number for number in range(len(offsets))]
            self.writes[f"r{row}"] = [
                Write(offset, {0: block, 1: block + 10}) for offset, block in zip(offsets, blocks, strict=True)
            ]
            for offset, block in zip(offsets, blocks, strict=True):
                seen = [torch.zeros(WIDTH, CHANNELS), past, self.inputs[self.starts[row] : self.starts[row] + offset]]
                self.right[block] = torch.cat(seen)[-WIDTH:].T
        self.common = SimpleNamespace(
            num_reqs=len(rows),
            query_start_loc=torch.tensor(self.starts),
            query_start_loc_cpu=torch.tensor(self.starts),
            seq_lens_cpu_upper_bound=torch.tensor([before + tokens for before, tokens in rows]),
        )
        self.blocks = torch.arange(first, first + len(rows))

    def step(self, layer: str = "layers.0", group: int = 0) -> Step:
        return Step(self.writes, {layer: group}, [f"r{row}" for row in range(self.num_rows)])

    def wrong(self, shift: int = 0) -> list[int]:
        return [
            block
            for block, window in self.right.items()
            if not torch.equal(self.state[block + shift, :, :WIDTH], window)
        ]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    monkeypatch.setattr(RUNNING, "step", None)


def planned(drawn: Drawn, group: int = 0, **options: Any) -> Any:
    metadata = SimpleNamespace(state_indices_tensor=drawn.blocks)
    RUNNING.step = drawn.step(group=group)
    build = conv_states.plan_ngram_states(lambda self, *_, **__: metadata)
    assert build(SimpleNamespace(layer_names=["layers.0"]), 0, drawn.common, **options) is metadata
    return metadata


def ngram_layer(metadata: Any, drawn: Drawn) -> None:
    ran = []
    run = conv_states.keep_ngram_states(lambda *given: ran.append(given))
    layer = SimpleNamespace(conv_state_len=WIDTH, prefix="layers.0")
    run(layer, drawn.inputs, "residual", None, metadata, drawn.state, "weights")
    assert ran == [(layer, drawn.inputs, "residual", None, metadata, drawn.state, "weights")]


@pytest.mark.parametrize("seed", range(40))
def test_a_window_holds_the_inputs_before_its_position_at_any_offset(seed):
    drawn = Drawn(seed, first=7, decodes=seed % 3)
    ngram_layer(planned(drawn), drawn)
    assert drawn.right and drawn.wrong() == []
    RUNNING.step.check()


def test_each_cache_group_has_blocks_of_its_own():
    drawn = Drawn(1)
    ngram_layer(planned(drawn, group=1), drawn)
    assert drawn.wrong(shift=10) == []


class ShortConvAttentionMetadataBuilder(SimpleNamespace):
    """By its name vLLM's is known."""


def short_convolution(drawn: Drawn, builder: type = ShortConvAttentionMetadataBuilder) -> Any:
    """The metadata of a step in which the first rows generate."""
    metadata = SimpleNamespace(
        num_prefills=drawn.num_rows - drawn.decodes,
        num_decodes=drawn.decodes,
        num_decode_tokens=drawn.decodes,
        state_indices_tensor_d=drawn.blocks[: drawn.decodes],
        state_indices_tensor_p=drawn.blocks[drawn.decodes :],
    )
    RUNNING.step = drawn.step()
    build = conv_states.plan_conv_states(lambda self, *_: metadata)
    return build(builder(layer_names=["layers.0"]), 0, drawn.common)


@pytest.mark.parametrize("seed", range(20))
def test_of_a_short_convolution_the_kernel_keeps_the_states_of_the_prompts_it_is_given(seed):
    drawn = Drawn(seed, first=7, decodes=seed % 3)
    states = getattr(short_convolution(drawn), SCAN_STATES)
    ran = []
    kernel = conv_states.keep_inputs(lambda *given, **options: ran.append((given, options)))
    inputs, weight = drawn.inputs[drawn.decodes :].T, torch.zeros(CHANNELS, WIDTH + 1)
    conv_states.run_convolution(lambda: kernel(inputs, weight, None, conv_states=drawn.state, activation=None), states)
    assert ran == [((inputs, weight, None, drawn.state), {"activation": None})]
    assert drawn.right and drawn.wrong() == [] and RUNNING.convolution is None


def test_a_layer_that_calls_no_kernel_is_an_error_and_leaves_nothing_behind():
    drawn = Drawn(1)
    states = getattr(short_convolution(drawn), SCAN_STATES)
    with pytest.raises(RuntimeError, match="no longer calls its kernel"):
        conv_states.run_convolution(lambda: None, states)
    assert RUNNING.convolution is None


def test_other_layers_with_the_same_builder_are_left_to_the_other_ways():
    assert not hasattr(short_convolution(Drawn(1), SimpleNamespace), SCAN_STATES)
