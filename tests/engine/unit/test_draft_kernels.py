"""The stand-ins for kernels that verify drafts, against plain loops over the tokens that turned out right.

Rows of a token and up to three drafts are fed step by step. Some drafts are wrong: whatever a stand-in makes of them
has to be gone in the next step.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from tests.harness import draft_kernels, float32_delta

DRAFTS = 3

STREAMS = 2  # requests in a batch

TOKENS = 40  # right ones of a stream, at least

CLOSE = {"rtol": 0, "atol": 1e-5}


def steps() -> Iterator[tuple[list[int], list[int], list[int], list[int]]]:
    """By stream: where a step begins, its drafts, how many of them are right, and the count of the step before."""
    draw = random.Random(3)
    begins, counts = [0] * STREAMS, [1] * STREAMS
    while min(begins) < TOKENS:
        drafts = [draw.randint(0, DRAFTS) for _ in begins]
        good = [draw.randint(0, many) for many in drafts]
        yield begins, drafts, good, counts
        begins = [begin + many + 1 for begin, many in zip(begins, good, strict=True)]
        counts = [many + 1 for many in good]


def right_tokens(*shape: int) -> Tensor:
    """(streams, tokens, *shape)"""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(STREAMS, TOKENS + 8 * (DRAFTS + 1) * 4, *shape, generator=generator)


def rows_of(right: Tensor, begins: list[int], drafts: list[int], good: list[int]) -> Tensor:
    """What a step is fed of each stream: its next token, the right drafts, then wrong ones."""
    rows = []
    for stream, begin, many, right_ones in zip(right, begins, drafts, good, strict=True):
        fed = stream[begin : begin + many + 1].clone()
        fed[right_ones + 1 :] = torch.randn_like(fed[right_ones + 1 :])
        rows.append(fed)
    return torch.cat(rows)


Verify = Callable[..., Tensor]  # (inputs by row, starts of the streams' rows, right tokens of the step before)

Expect = Callable[[int, int], Tensor]  # of a stream's token, asked for one after the other


def compare(inputs: list[Tensor], verify: Verify, expect: Expect, check: Callable[[int, int], None]) -> None:
    """Feed drafts step by step; `check`: what else has to be right of a stream after so many right drafts."""
    for begins, drafts, good, counts in steps():
        starts = torch.tensor([0, *itertools.accumulate(many + 1 for many in drafts)])
        output = verify([rows_of(each, begins, drafts, good) for each in inputs], starts, torch.tensor(counts))
        for stream, (start, many) in enumerate(zip(starts.tolist(), good, strict=False)):
            wanted = [expect(stream, begins[stream] + row) for row in range(many + 1)]
            torch.testing.assert_close(output[start : start + many + 1], torch.stack(wanted).float(), **CLOSE)
            check(stream, many)


def test_the_convolution_goes_on_from_the_last_token_that_was_right():
    channels, width = 5, 4
    right, weight, bias = right_tokens(channels), torch.randn(channels, width), torch.randn(channels)
    state, blocks = torch.full((8, channels, width - 1 + DRAFTS), math.nan), torch.tensor([[3, 0, 0, 0], [6, 0, 0, 0]])
    state[blocks[:, 0], :, : width - 1] = 0.0

    def verify(inputs: list[Tensor], starts: Tensor, counts: Tensor) -> Tensor:
        more = {"conv_state_indices": blocks, "num_accepted_tokens": counts, "query_start_loc": starts}
        return draft_kernels.convolve(*inputs, state, weight, bias, "silu", **more)

    def expect(stream: int, token: int) -> Tensor:
        window = right[stream, max(token - width + 1, 0) : token + 1].double()
        return functional.silu(bias + (weight[:, -len(window) :] * window.T).sum(1))

    compare([right], verify, expect, lambda stream, many: None)


BLOCKS_OF = torch.tensor([[2, 3, 4, 5], [9, 7, 11, 1]])  # a stream's states after each token of a step


def test_mamba2s_state_goes_on_from_the_last_token_that_was_right():
    heads, size, states, groups = 4, 2, 3, 2
    x, dt = right_tokens(heads, size), right_tokens(heads)
    into, out_of = right_tokens(groups, states), right_tokens(groups, states).flip(1)
    decay, skip, bias = -torch.rand(heads), torch.randn(heads), torch.randn(heads)
    cache, running = torch.full((12, heads, size, states), math.nan), torch.zeros(STREAMS, heads, size, states).double()
    cache[BLOCKS_OF[:, 0]] = 0.0

    def verify(inputs: list[Tensor], starts: Tensor, counts: Tensor) -> Tensor:
        x, dt, B, C = inputs
        output = torch.empty_like(x)
        by_row = dt[:, :, None].expand(-1, -1, size), decay[:, None, None].expand(-1, size, states)
        per_head = skip[:, None].expand(-1, size), bias[:, None].expand(-1, size)
        more = {"state_batch_indices": BLOCKS_OF, "num_accepted_tokens": counts, "cu_seqlens": starts}
        draft_kernels.update(cache, x, *by_row, B, C, *per_head, out=output, **more)
        return output

    def expect(stream: int, token: int) -> Tensor:
        output = torch.empty(heads, size)
        for head in range(heads):
            group, value = head * groups // heads, x[stream, token, head].double()
            step = functional.softplus(dt[stream, token, head] + bias[head])
            running[stream, head] *= torch.exp(decay[head] * step)
            running[stream, head] += step * torch.outer(value, into[stream, token, group].double())
            output[head] = running[stream, head] @ out_of[stream, token, group].double() + skip[head] * value
        return output

    def check(stream: int, many: int) -> None:
        torch.testing.assert_close(cache[BLOCKS_OF[stream, many]], running[stream].float(), **CLOSE)

    compare([x, dt, into, out_of], verify, expect, check)


def test_a_delta_nets_state_goes_on_from_the_last_token_that_was_right():
    key_heads, heads, key_size, value_size = 2, 4, 3, 2
    query, key = right_tokens(key_heads, key_size), right_tokens(key_heads, key_size).flip(1)
    value, a, b = right_tokens(heads, value_size), right_tokens(heads), right_tokens(heads).flip(1)
    decay, bias = torch.randn(heads), torch.randn(heads)
    cache, running = (
        torch.full((12, heads, key_size, value_size), math.nan),
        torch.zeros(2, heads, key_size, value_size).double(),
    )
    cache[BLOCKS_OF[:, 0]] = 0.0

    def verify(inputs: list[Tensor], starts: Tensor, counts: Tensor) -> Tensor:
        return float32_delta._verify(decay, bias, *inputs, cache, BLOCKS_OF, counts, starts, True)

    def unit(vector: Tensor) -> Tensor:
        return vector / torch.sqrt(vector.square().sum() + 1e-6)

    def expect(stream: int, token: int) -> Tensor:
        output = torch.empty(heads, value_size)
        for head in range(heads):
            group, state = head * key_heads // heads, running[stream, head]
            k, q = unit(key[stream, token, group].double()), unit(query[stream, token, group].double())
            state *= torch.exp(-torch.exp(decay[head]) * functional.softplus(a[stream, token, head] + bias[head]))
            new = (value[stream, token, head] - k @ state) * torch.sigmoid(b[stream, token, head])
            state += torch.outer(k, new)
            output[head] = q @ state / math.sqrt(key_size)
        return output

    def check(stream: int, many: int) -> None:
        torch.testing.assert_close(cache[BLOCKS_OF[stream, many]], running[stream].float(), **CLOSE)

    compare([query, key, value, a, b], verify, expect, check)
