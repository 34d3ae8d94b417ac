"""With NIXL a decoding engine takes the blocks of another prompt for its own, and keeps them in its prefix cache.

Usage: python other_prompts_blocks.py MODEL (its config only). Exits 1 while the defect is there, 0 without it.
"""

from __future__ import annotations

import sys
from typing import Any

from tiny_hybrid import ATTENTION, BLOCK, request_of, scheduler_of, verdict, without_engine

PROMPT = 150  # tokens


class Core:
    """One scheduler, and for each block the prompt whose tokens it holds."""

    def __init__(self, model: str, role: str) -> None:
        from vllm.config import KVTransferConfig

        nixl = KVTransferConfig(kv_connector="NixlConnector", kv_role=role, kv_load_failure_policy="recompute")
        self.scheduler = scheduler_of(model, {}, kv_transfer_config=nixl)
        self.rows: dict[int, str] = {}  # attention block -> prompt

    def run(self, name: str, prompt: str, tokens: list[int], transfer: dict[str, Any], other: Core | None) -> Any:
        """Answer a request with one token. Returns its `kv_transfer_params`, and prints what it was computed from."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        request = request_of(name, list(tokens), kv_transfer_params=transfer)
        self.scheduler.add_request(request)
        received: set[str] = set()
        told = None
        while not request.is_finished():
            step = self.scheduler.schedule()
            done = KVConnectorOutput(finished_recving=received or None)
            received = set()
            for loading, read in step.kv_connector_metadata.reqs_to_recv.items():
                if other is not None and read.awaiting_kvs:
                    pairs = zip(
                        read.local_block_ids[ATTENTION][::-1], read.remote.block_ids[ATTENTION][::-1], strict=False
                    )
                    self.rows.update({mine: other.rows[theirs] for mine, theirs in pairs})
                    received.add(loading)
            names = list(step.num_scheduled_tokens)
            table = self.scheduler.kv_cache_manager.coordinator.single_type_managers[ATTENTION].req_to_blocks[name]
            if names:
                end = request.num_computed_tokens  # with this step
                first = (end - step.num_scheduled_tokens[name]) // BLOCK
                whole = end - step.num_scheduled_tokens[name] == first * BLOCK
                self.rows.update({each.block_id: prompt for each in table[first + (not whole) : -(-end // BLOCK)]})
                if end == request.num_prompt_tokens:
                    blocks = [self.rows[each.block_id] for each in table[: -(-end // BLOCK)]]
                    print(f"{name}: expected to answer from rows of {[prompt] * len(blocks)}, saw {blocks}")
                    self.right = set(blocks) == {prompt}
            sampled = [[1] if request.num_computed_tokens >= request.num_prompt_tokens else [] for _ in names]
            output = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={each: index for index, each in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=done,
            )
            for answers in self.scheduler.update_from_output(step, output).values():
                for answer in answers.outputs:
                    told = answer.kv_transfer_params or told
        return told


def main(model: str) -> int:
    without_engine()
    p, d = Core(model, "kv_producer"), Core(model, "kv_consumer")
    prompts = {name: [100 + number] * PROMPT for number, name in enumerate("AB")}
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    lies_at = {name: p.run(f"P, {name}", name, tokens, dict(ask), None) for name, tokens in prompts.items()}
    d.run("D, B with A's blocks", "B", prompts["B"], dict(lies_at["A"]), p)
    cured = d.right
    d.run("D, B with its own blocks", "B", prompts["B"], dict(lies_at["B"]), p)
    cured = cured and d.right
    return verdict(cured)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
