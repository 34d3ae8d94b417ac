"""What a load takes is learnt from loads."""

from __future__ import annotations

from engine_patches.disk.load_cost import LoadCost

MB = 1_000_000


def test_a_fixed_part_and_a_rate_are_told_apart():
    cost = LoadCost()
    for num_bytes in (1 * MB, 2 * MB, 50 * MB, 100 * MB) * 4:
        cost.load_took(num_bytes, 0.1 + num_bytes / 1e9)
    assert 0.25 < cost.seconds(200 * MB) < 0.35
    assert 0.09 < cost.seconds(1 * MB) < 0.12


def test_loads_of_one_size_say_what_such_a_load_takes():
    cost = LoadCost()
    cost.load_took(MB, 1.0)
    assert cost.seconds(MB) == 1.0
    assert not cost.pays(MB, 0.9) and cost.pays(MB, 1.1)


def test_what_is_in_memory_already_always_pays():
    cost = LoadCost()
    cost.load_took(MB, 100.0)
    assert cost.pays(0, 1e-6)


def test_one_stalled_load_changes_nothing():
    cost = LoadCost()
    for seconds in (0.1, 0.1, 30.0, 0.1, 0.1):
        cost.load_took(MB, seconds)
    assert cost.seconds(MB) == 0.1


def test_a_disk_that_is_slow_now_is_known_to_be_slow():
    cost = LoadCost()
    for seconds in [0.01] * 40 + [2.0] * 32:
        cost.load_took(MB, seconds)
    assert cost.seconds(MB) == 2.0


def test_until_a_load_was_measured_nothing_is_loaded():
    assert not LoadCost().pays(MB, 1e6)


def test_a_disk_that_is_late_with_one_load_is_not_given_another(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    cost = LoadCost()
    cost.load_took(MB, 0.1)
    cost.load_began(1, 2 * MB)
    now += 0.2  # as long as it should take
    assert cost.pays(MB, 0.2)
    now += 0.6
    cost.load_began(2, MB)
    assert not cost.pays(MB, 0.6) and cost.pays(MB, 0.8)
    cost.load_ended(1)
    assert cost.pays(MB, 0.2)
