"""The stand-ins for kernels that verify drafts, against plain loops over the tokens that turned out right.

Rows of a token and up to three drafts are fed step by step. Some drafts are wrong: whatever a stand-in makes of them
has to be gone in the next step.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

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


def starts_of(drafts: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(many + 1 for many in drafts)])


def outputs_kept(output: Tensor, drafts: list[int], good: list[int]) -> Iterator[tuple[int, Tensor]]:
    """Each stream's rows of tokens that turned out right."""
    for number, (start, many) in enumerate(zip(starts_of(drafts).tolist(), good, strict=False)):
        yield number, output[start : start + many + 1]


def test_the_convolution_goes_on_from_the_last_token_that_was_right():
    channels, width = 5, 4
    right = right_tokens(channels)
    weight, bias = torch.randn(channels, width), torch.randn(channels)
    state = torch.full((8, channels, width - 1 + DRAFTS), math.nan)
    blocks = torch.tensor([[3, 0, 0, 0], [6, 0, 0, 0]])
    state[blocks[:, 0], :, : width - 1] = 0.0

    def by_hand(stream: int, token: int, channel: int) -> float:
        total = float(bias[channel])
        for back in range(min(width, token + 1)):
            total += float(weight[channel, width - 1 - back] * right[stream, token - back, channel])
        return total / (1 + math.exp(-total))

    for begins, drafts, good, counts in steps():
        output = draft_kernels.convolve(
            rows_of(right, begins, drafts, good),
            state,
            weight,
            bias,
            "silu",
            conv_state_indices=blocks,
            num_accepted_tokens=torch.tensor(counts),
            query_start_loc=starts_of(drafts),
        )
        for stream, kept in outputs_kept(output, drafts, good):
            wanted = [
                [by_hand(stream, begins[stream] + row, channel) for channel in range(channels)]
                for row in range(len(kept))
            ]
            torch.testing.assert_close(kept, torch.tensor(wanted), **CLOSE)


def test_mamba2s_state_goes_on_from_the_last_token_that_was_right():
    heads, size, states, groups = 4, 2, 3, 2
    right, steps_of_time = right_tokens(heads, size), right_tokens(heads)
    into, out_of = right_tokens(groups, states), right_tokens(groups, states).flip(1)
    decay, skip, bias = -torch.rand(heads), torch.randn(heads), torch.randn(heads)
    cache = torch.full((12, heads, size, states), math.nan)
    blocks = torch.tensor([[2, 3, 4, 5], [9, 7, 11, 1]])
    cache[blocks[:, 0]] = 0.0
    running = [[[[0.0] * states for _ in range(size)] for _ in range(heads)] for _ in range(STREAMS)]

    def by_hand(stream: int, token: int) -> list[list[float]]:
        output = []
        for head in range(heads):
            group = head * groups // heads
            step = math.log1p(math.exp(float(steps_of_time[stream, token, head] + bias[head])))
            values = []
            for row in range(size):
                value = float(right[stream, token, head, row])
                total = float(skip[head]) * value
                for column in range(states):
                    kept = running[stream][head][row][column] * math.exp(float(decay[head]) * step)
                    kept += step * value * float(into[stream, token, group, column])
                    running[stream][head][row][column] = kept
                    total += kept * float(out_of[stream, token, group, column])
                values.append(total)
            output.append(values)
        return output

    for begins, drafts, good, counts in steps():
        x, dt, B, C = (rows_of(each, begins, drafts, good) for each in (right, steps_of_time, into, out_of))
        output = torch.empty_like(x)
        draft_kernels.update(
            cache,
            x,
            dt[:, :, None].expand(-1, -1, size),
            decay[:, None, None].expand(-1, size, states),
            B,
            C,
            skip[:, None].expand(-1, size),
            bias[:, None].expand(-1, size),
            out=output,
            state_batch_indices=blocks,
            num_accepted_tokens=torch.tensor(counts),
            cu_seqlens=starts_of(drafts),
        )
        for stream, kept in outputs_kept(output, drafts, good):
            wanted = [by_hand(stream, begins[stream] + row) for row in range(len(kept))]
            torch.testing.assert_close(kept, torch.tensor(wanted), **CLOSE)
            torch.testing.assert_close(cache[blocks[stream, good[stream]]], torch.tensor(running[stream]), **CLOSE)


def test_a_delta_nets_state_goes_on_from_the_last_token_that_was_right():
    key_heads, value_heads, key_size, value_size = 2, 4, 3, 2
    query, key = right_tokens(key_heads, key_size), right_tokens(key_heads, key_size).flip(1)
    value = right_tokens(value_heads, value_size)
    a, b = right_tokens(value_heads), right_tokens(value_heads).flip(1)
    decay, bias = torch.randn(value_heads), torch.randn(value_heads)
    cache = torch.full((12, value_heads, key_size, value_size), math.nan)
    blocks = torch.tensor([[2, 3, 4, 5], [9, 7, 11, 1]])
    cache[blocks[:, 0]] = 0.0
    running = torch.zeros(STREAMS, value_heads, key_size, value_size, dtype=torch.float64)

    def unit(vector: Tensor) -> list[float]:
        norm = math.sqrt(sum(float(each) ** 2 for each in vector) + 1e-6)
        return [float(each) / norm for each in vector]

    def by_hand(stream: int, token: int) -> list[list[float]]:
        output = []
        for head in range(value_heads):
            group = head * key_heads // value_heads
            k, q = unit(key[stream, token, group]), unit(query[stream, token, group])
            step = math.log1p(math.exp(float(a[stream, token, head] + bias[head])))
            strength = 1 / (1 + math.exp(-float(b[stream, token, head])))
            state = running[stream, head]
            state *= math.exp(-math.exp(float(decay[head])) * step)
            values = []
            for column in range(value_size):
                known = sum(float(state[row, column]) * k[row] for row in range(key_size))
                new = (float(value[stream, token, head, column]) - known) * strength
                for row in range(key_size):
                    state[row, column] += k[row] * new
                seen = sum(float(state[row, column]) * q[row] for row in range(key_size))
                values.append(seen / math.sqrt(key_size))
            output.append(values)
        return output

    for begins, drafts, good, counts in steps():
        q, k, v, of_a, of_b = (rows_of(each, begins, drafts, good) for each in (query, key, value, a, b))
        starts = starts_of(drafts)
        counted = torch.tensor(counts)
        output = float32_delta._verify(decay, bias, q, k, v, of_a, of_b, cache, blocks, counted, starts, True)
        for stream, kept in outputs_kept(output, drafts, good):
            wanted = [by_hand(stream, begins[stream] + row) for row in range(len(kept))]
            torch.testing.assert_close(kept, torch.tensor(wanted), **CLOSE)
            torch.testing.assert_close(cache[blocks[stream, good[stream]]], running[stream].float(), **CLOSE)


class Requests:
    """Requests that decode with drafts in blocks of 8 tokens.

    A state is the number of tokens in it, or -1 if one of them is wrong. A window of the convolution holds the numbers
    of the tokens before, -1 for a wrong one.
    """

    BLOCK = 8  # tokens

    WINDOW = 3  # tokens before

    def __init__(self, begins: list[int], window_last: bool) -> None:
        """`begins`: tokens of each prompt. `window_last`: whether a window is a state's last dimension."""
        columns = 40
        self.begins, self.along = list(begins), -1 if window_last else 0
        self.accepted = [1] * len(begins)
        self.columns = [(begin - 1) // self.BLOCK for begin in begins]
        blocks = torch.randperm(len(begins) * columns, generator=torch.Generator().manual_seed(1)) + 1
        self.table = blocks.reshape(len(begins), columns).int()
        many = int(blocks.max()) + 1
        self.running = torch.full((many, 2), -7)
        length = self.WINDOW + DRAFTS
        self.windows = torch.full((many, 1, length) if window_last else (many, length, 1), -7)
        self.context = SimpleNamespace(
            is_initialized=True,
            block_size=self.BLOCK,
            num_accepted_tokens_out=torch.zeros(len(begins), dtype=torch.int32),
            tables=[self.table],
            states=[(0, self.windows, True), (0, self.running, False)],
        )
        for row, begin in enumerate(begins):
            self.running[self.block(row, self.columns[row])] = begin
            self.window(row, self.columns[row])[: self.WINDOW] = torch.arange(begin - self.WINDOW, begin)

    def block(self, row: int, column: int) -> int:
        return int(self.table[row, column])

    def window(self, row: int, column: int) -> Tensor:
        return self.windows[self.block(row, column)].reshape(-1)

    def step(self, drafts: list[int], good: list[int]) -> None:
        """As vLLM's runner: copy, run the layers, sample, copy."""
        rows = range(len(drafts))
        sources, biases = [-1 for _ in rows], [0 for _ in rows]
        for row in rows:
            column = (self.begins[row] + drafts[row]) // self.BLOCK
            if column != self.columns[row]:
                sources[row], biases[row] = self.columns[row], self.accepted[row] - 1
                self.columns[row], self.accepted[row] = column, 1
        self._call("run_fused_precopy", self.columns, sources, biases, None)
        for row in rows:
            self._layer(row, drafts[row], good[row])
        counts, scheduled = ([many + 1 for many in each] for each in (good, drafts))
        self._call("run_fused_postprocess", counts, self.columns, scheduled, self.begins, drafts)
        self.accepted = self.context.num_accepted_tokens_out.tolist()
        for row in rows:
            self._check_edges(row, good[row])
            self.begins[row] += good[row] + 1

    def _call(self, name: str, *lists: list[int] | None) -> None:
        tensors = [None if each is None else torch.tensor(each, dtype=torch.int32) for each in lists]
        getattr(draft_kernels.Copies, name)(self.context, len(self.begins), *tensors)

    def _layer(self, row: int, drafts: int, good: int) -> None:
        begin, column, offset = self.begins[row], self.columns[row], self.accepted[row] - 1
        assert int(self.running[self.block(row, column + offset), 0]) == begin
        before = self.window(row, column)[offset : offset + self.WINDOW].tolist()
        assert before == list(range(begin - self.WINDOW, begin))
        fed = [begin + number if number <= good else -1 for number in range(drafts + 1)]
        for number, token in enumerate(fed):
            self.running[self.block(row, column + number)] = token + 1 if token >= 0 else -1
        self.window(row, column)[: self.WINDOW + drafts] = torch.tensor([*before[1:], *fed])

    def _check_edges(self, row: int, good: int) -> None:
        """The state of an edge that was reached lies in the edge's column, and goes on as if nothing was drafted."""
        for edge in range(self.begins[row] + 1, self.begins[row] + good + 2):
            if edge % self.BLOCK == 0:
                column = edge // self.BLOCK - 1
                assert self.running[self.block(row, column)].tolist() == [edge, edge]
                assert self.window(row, column)[: self.WINDOW].tolist() == list(range(edge - self.WINDOW, edge))


@pytest.mark.parametrize("window_last", [True, False])
def test_the_copies_leave_the_state_of_each_blocks_edge_in_its_own_block(window_last):
    layout = "vllm.model_executor.layers.mamba.mamba_utils.is_conv_state_dim_first"
    draw = random.Random(11)
    with mock.patch(layout, return_value=window_last):
        requests = Requests([5, 8, 13, 16, 23], window_last)
        for _ in range(60):
            drafts = [draw.randint(0, DRAFTS) for _ in requests.begins]
            requests.step(drafts, [draw.randint(0, many) for many in drafts])
    assert min(requests.begins) > 10 * Requests.BLOCK
