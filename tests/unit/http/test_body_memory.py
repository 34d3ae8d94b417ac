"""All bodies share one bound, and no API key can take all of it."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proxy.errors import KeyBusy, Overloaded
from proxy.http import body_memory
from proxy.http.body_memory import LEFT_BY_LARGE, SMALL_BYTES, TIMES_WHAT_IS_FREE, TRIM_AFTER_BYTES, BodyMemory


class Bodies(RuleBasedStateMachine):
    """Bodies of three keys, and of nobody's, that grow and go; what is refused would have broken one of the rules."""

    @initialize(most=st.sampled_from([90, 16 * SMALL_BYTES]))
    def begin(self, most):
        self.most, self.memory, self.holds = most, BodyMemory(most), []

    def of(self, owner):
        return sum(hold.size for each, hold in self.holds if each == owner)

    @rule(owner=st.sampled_from([None, "ann", "bob", "cleo"]))
    def comes(self, owner):
        self.holds.append((owner, self.memory.of(owner)))

    @rule(data=st.data())
    def grows(self, data):
        if self.holds:
            owner, hold = data.draw(st.sampled_from(self.holds))
            size = data.draw(st.integers(0, self.most) | st.sampled_from([1, SMALL_BYTES, SMALL_BYTES + 1]))
            held = sum(each.size for _, each in self.holds) + size
            is_large = hold.size + size > SMALL_BYTES
            if held > self.most * (1 - LEFT_BY_LARGE if is_large else 1):
                error = Overloaded
            elif owner and self.of(owner) + size > TIMES_WHAT_IS_FREE * (self.most - held):
                error = KeyBusy
            else:
                hold.take(size)
                return
            with pytest.raises(error, match="max_bodies_bytes"):
                hold.take(size)

    @rule(data=st.data(), part=st.booleans())
    def goes(self, data, part):
        if self.holds:
            at = data.draw(st.integers(0, len(self.holds) - 1))
            if part:
                self.holds[at][1].give_back(self.holds[at][1].size // 2)
            else:
                with self.holds.pop(at)[1]:  # however its context ends
                    pass

    @invariant()
    def what_is_held_is_what_the_bodies_hold_and_each_key_leaves_room_for_another(self):
        assert self.memory.held == sum(hold.size for _, hold in self.holds) <= self.most
        assert all(self.of(owner) <= self.most * 2 / 3 for owner in ("ann", "bob", "cleo"))


TestBodies = Bodies.TestCase


def test_the_heap_is_given_back_once_for_so_many_bytes_that_were_freed(monkeypatch):
    trims: list[int] = []
    monkeypatch.setattr(body_memory, "_trim", trims.append)
    memory = BodyMemory(10 * TRIM_AFTER_BYTES)
    seen = []
    for size in (TRIM_AFTER_BYTES - 1, 1, TRIM_AFTER_BYTES - 1, TRIM_AFTER_BYTES, 1):
        memory.of().take(size)
        memory.shrink(None, size)
        seen.append(len(trims))
    assert seen == [0, 1, 1, 2, 2] and set(trims) == {0}
    monkeypatch.setattr(body_memory, "_trim", None)  # another libc
    memory.of().take(2 * TRIM_AFTER_BYTES)
    memory.shrink(None, 2 * TRIM_AFTER_BYTES)
    assert memory.held == 0


# Large blocks with small ones between them, as bodies come in beside other requests; then the large ones go.
