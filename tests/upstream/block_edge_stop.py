"""A last prefill chunk that starts inside a block runs past the block's edge if the backend exports Mamba states.

Usage: python block_edge_stop.py MODEL (its config only). Exits 1 while the defect is there, 0 without it.
"""

from __future__ import annotations

import sys

from tiny_hybrid import BLOCK, MAMBA, UNIT, request_of, scheduler_of, verdict, without_engine


def run(scheduler, name: str, tokens: list[int], states: dict[int, int]) -> bool:
    """Answer one request. `states` maps a Mamba block to the position whose state it holds.

    Prints the chunks; returns whether the first began with the state of its position.
    """
    from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
    from vllm.v1.outputs import ModelRunnerOutput

    added = request_of(name, tokens)
    scheduler.add_request(added)
    chunks, resumed_from = [], 0
    while not added.is_finished():
        step = scheduler.schedule()
        states.update({copy[1]: states[copy[0]] for copy in step.kv_cache_block_copies or () if copy[0] in states})
        blocks = scheduler.kv_cache_manager.coordinator.single_type_managers[MAMBA].req_to_blocks[name]
        count = step.num_scheduled_tokens[name]
        end = added.num_computed_tokens  # with this step
        start = end - count
        if start and not chunks:
            resumed_from = states[blocks[(start - 1) // BLOCK].block_id]
        (offset,), (column,) = compute_mamba_prefill_checkpoints([end], [count], UNIT, BLOCK, 1, False, UNIT)
        if offset:
            states[blocks[column].block_id] = start + offset
        states[blocks[(end - 1) // BLOCK].block_id] = end
        chunks.append((start, end))
        sampled = [[1]] if end == len(tokens) else [[]]
        output = ModelRunnerOutput(req_ids=[name], req_id_to_index={name: 0}, sampled_token_ids=sampled)
        scheduler.update_from_output(step, output)
    begin = chunks[0][0]
    print(
        f"{name}: {len(tokens)} tokens in chunks {chunks}; expected to begin with the state after {begin} tokens,",
        end=" ",
    )
    print(f"saw the state after {resumed_from}")
    return resumed_from == begin


def keys_are_right(scheduler, states: dict[int, int]) -> bool:
    """Whether every registered Mamba block holds the state of its key."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    right = True
    for block in scheduler.kv_cache_manager.block_pool.blocks:
        if block.block_hash is not None and get_group_id(block.block_hash) == MAMBA:
            promised, held = block.block_hash_num_tokens, states[block.block_id]
            print(f"block {block.block_id}: expected the state after {promised} tokens, saw the state after {held}")
            right = right and promised == held
    return right


def main(model: str) -> int:
    without_engine()
    # Like a `MambaMixer2` on a GPU.
    exports = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
    scheduler, states = scheduler_of(model, exports), {}
    shared = list(range(100, 180))
    run(scheduler, "A", [*shared[:48], 1], states)  # leaves the state after 48 tokens
    run(scheduler, "B", [*shared, *[2] * 70], states)  # resumes there
    cured = keys_are_right(scheduler, states)
    cured = run(scheduler, "C", [*shared[:70], *[3] * 5], states) and cured  # finds B's block
    return verdict(cured)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
