"""Prefills that go from one worker to another over NIXL: where they stop, whose they are, and what is kept of them.

vLLM alone hands over the state behind the last token but one, which no later prompt can resume from, and believes the
parameters of a transfer. Here a prefill ends where a state is kept, carries a name of its own contents, and is taken
once, by the prompt that it is of; what is doubtful is computed. Of deadlines see `upstream_fixes.decline_late_reads`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from engine_patches import kv_connectors
from engine_patches.ledger import Function, Patch
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.earlier_prompts import Latest
from engine_patches.scheduler.planner import HINTED, TAIL, CheckpointTarget
from engine_patches.scheduler.states import States
from engine_patches.settings import logger

# In the parameters of a prefill: whoever loads it goes by the number of tokens that it says, and not by the prompt's.
STOPS = "seamark_stops"

# In the parameters of a load: the name of what was computed, of which tokens and by which weights. Workers that do not
# cut their weights alike have loaded other pieces of them, and compare what samples of their files say.
CONTENT, SAMPLED, CUT = "seamark_content", "seamark_sampled", "seamark_cut"

# vLLM's own: when the prefill's blocks are free again, by the clock of the worker that has them; and what it needs to
# tell a worker that its blocks were read, or are not going to be.
DEADLINE = "remote_blocks_expiry_time"
_ADDRESS = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")

MAX_TAKEN = 65_536  # transfers remembered, so that none is taken twice; some 200 bytes each

# Why transfers are refused without a word to the worker that has them.
NOT_WHOLE, TAKEN = "its parameters are not whole", "it was taken before"


class Transfers:
    """The transfers of one scheduler, in both directions."""

    def __init__(self, checkpoints: Checkpoints, states: States) -> None:
        self.checkpoints = checkpoints
        self._states = states
        self._taken: Latest[None] = Latest(MAX_TAKEN)  # by engine and request
        self._warned: set[str] = set()

    def stop_at_the_last_state(self, request: Any) -> None:
        """Cut a prompt that is only prefilled behind its last target: both workers can keep that state."""
        checkpoints, unit = self.checkpoints, self.checkpoints.grid.unit
        state = checkpoints.state_of(request)
        if not self._states.in_pass or checkpoints.verified > 1 or request.num_output_tokens:
            return
        position = max((target.position for target in checkpoints.targets(request)), default=0)
        if not 0 < position < request.num_prompt_tokens or getattr(request, "prompt_is_token_ids", None) is not None:
            return
        if any(feature.mm_position.offset + feature.mm_position.length > position for feature in request.mm_features):
            return
        if any(self._states.keys.is_cached(request, end) for end in range(position, request.num_prompt_tokens, unit)):
            return  # a request computes at least one token, and would have to go back behind that state
        state.prompt_tokens = state.prompt_tokens or request.num_prompt_tokens
        if request.prompt_token_ids is not None:
            del request.prompt_token_ids[position:]
        else:
            request.prompt_embeds = request.prompt_embeds[:position]
        del request._all_token_ids[position:]
        del request.block_hashes[position // unit :]
        request.num_prompt_tokens = position

    def look_at(self, request: Any, params: Mapping[str, Any]) -> str:
        """Why a request's prefill is not loaded; "" if it is: as many tokens as its state then says."""
        state = self.checkpoints.state_of(request)
        if state.loaded:  # the scheduler asks again if it had no room
            return ""
        refusal = self._refusal(request, params)
        if not refusal:
            state.loaded = params["remote_num_tokens"]
        elif refusal not in self._warned:
            self._warned.add(refusal)
            logger.warning("seamark: a prefill of another worker is not loaded but computed: %s (said once)", refusal)
        return refusal

    def is_anothers(self, request: Any, params: Mapping[str, Any]) -> bool:
        """Whether a request that has not been looked at was to load what another one has taken."""
        return _name_of(params) in self._taken and not self.checkpoints.state_of(request).loaded

    def _refusal(self, request: Any, params: Mapping[str, Any]) -> str:
        if any(params.get(name) is None for name in _ADDRESS):
            return NOT_WHOLE
        if (transfer := _name_of(params)) in self._taken:
            return TAKEN
        self._taken[transfer] = None
        tokens = params.get("remote_num_tokens")
        if not isinstance(params.get(CONTENT), str) or not isinstance(params.get(DEADLINE), int | float):
            return "it carries no name of its contents or no deadline: the worker that computed it has no Seamark"
        if not isinstance(tokens, int) or not 0 < tokens < request.num_prompt_tokens:
            return "it is of a prompt of another length"
        weights = self.checkpoints.weights
        name, own = (CONTENT, weights.name) if params.get(CUT) == weights.cut != "" else (SAMPLED, weights.sampled)
        if not own or not params.get(name):
            why = weights.unknown or "they are cut for another number of ranks, and not in files on both sides"
            return f"nobody knows if its weights are those of this worker: {why}"
        if params[name] != self.content_of(request, tokens, own):
            return "it is of another prompt or other weights, or that worker hashes otherwise (PYTHONHASHSEED)"
        return ""

    def names_of(self, request: Any) -> dict[str, str]:
        """What a request computed, for the parameters of its transfer."""
        weights, tokens = self.checkpoints.weights, request.num_prompt_tokens
        content, sampled = (self.content_of(request, tokens, name) for name in (weights.name, weights.sampled))
        return {CONTENT: content, SAMPLED: sampled, CUT: weights.cut}

    def content_of(self, request: Any, num_tokens: int, weights: str) -> str:
        """A name of what weights make of a request's first `num_tokens` tokens; "" if those have none."""
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

        if not weights:
            return ""
        start = num_tokens // self.checkpoints.grid.unit * self.checkpoints.grid.unit
        parent: bytes = self.checkpoints.grid.hash_of(request, start) if start else b""
        # vLLM names whole units only. Behind the last one, the same by its own words: salt, adapter, images, ...
        extra, _ = generate_block_hash_extra_keys(request, start, num_tokens, 0)
        rest = (num_tokens, list(request.all_token_ids[start:num_tokens]), extra, weights)
        return hashlib.sha256(parent + repr(rest).encode(errors="surrogatepass")).hexdigest()[:32]


def _name_of(params: Mapping[str, Any]) -> tuple[str, str]:
    return str(params.get("remote_engine_id")), str(params.get("remote_request_id"))


def introduce(scheduler: Any, checkpoints: Checkpoints, states: States) -> None:
    """Give NIXL's half in a vLLM `Scheduler`, alone or inside a MultiConnector, a `Transfers`."""
    connector = scheduler.connector
    for each in (connector, *getattr(connector, "_connectors", ())):
        half = getattr(each, "connector_scheduler", None)
        if half is not None:
            half.seamark = Transfers(checkpoints, states)


handed_over = partial(
    Patch,
    upstream="vllm#52234: another prompt's prefill is loaded, and its blocks are cached for the wrong tokens",
    until="vLLM binds a prefill to its prompt",
    applies=kv_connectors.hands_over,
)


@Patch(
    "prefill-end",
    kv_connectors.PREFILL_END,
    why="a prefill for another worker ends where a state is kept; its hint counts from the end of the whole prompt",
    until="vLLM hands over a state that both workers can keep",
    applies=kv_connectors.hands_over,
)
def read_hint_of_the_whole_prompt(self: Any, request: Any, *, original: Function) -> None:
    transfers: Transfers | None = getattr(self, "seamark", None)
    if transfers is not None:  # a hint may count from the prompt's end
        transfers.checkpoints.state_of(request).prompt_tokens = request.num_prompt_tokens
    original(self, request)


@handed_over(
    "load-end",
    kv_connectors.LOAD_END,
    why="a prefill is loaded by the prompt that it is of, once, and as far as it was computed",
)
def load_what_was_computed(self: Any, request: Any, num_computed_tokens: int, *, original: Function) -> Any:
    transfers: Transfers | None = getattr(self, "seamark", None)
    params = request.kv_transfer_params
    if transfers is None or not params:
        return original(self, request, num_computed_tokens)
    if not params.get("do_remote_prefill"):
        transfers.checkpoints.state_of(request).loaded = 0  # asked again: the load has failed, or was preempted
        if params.get("do_remote_decode") and params.get(STOPS) and params.get("_p_side_truncated"):
            transfers.stop_at_the_last_state(request)
        return original(self, request, num_computed_tokens)
    refusal = transfers.look_at(request, params)
    if not refusal:
        left = transfers.checkpoints.state_of(request).loaded - num_computed_tokens
        return (left, True) if left > 0 else (0, False)
    params["do_remote_prefill"] = False
    self._stop_heartbeat(request.request_id)
    if refusal not in (NOT_WHOLE, TAKEN):  # as vLLM does for a request that is aborted before it is scheduled
        self._reqs_need_recv[request.request_id] = (request, [], (), False)
    return 0, False


@handed_over(
    "sent-content",
    kv_connectors.SENT,
    why="who loads a prefill has to know of which tokens it is, and until when it is there",
)
def name_what_is_sent(self: Any, request: Any, block_ids: Any, *, original: Function) -> Any:
    transfers: Transfers | None = getattr(self, "seamark", None)
    own = request.kv_transfer_params
    if transfers is not None and own and transfers.is_anothers(request, own):
        own["do_remote_prefill"] = False  # vLLM would tell that worker that nobody reads it any more
    delayed, params = original(self, request, block_ids)
    deadline = self._reqs_need_send.get(request.request_id)
    if transfers is None or not params or not params.get("do_remote_prefill") or deadline is None:
        return delayed, params
    if params["remote_num_tokens"] != request.num_prompt_tokens:
        return delayed, params  # without a name nobody loads it
    return delayed, params | transfers.names_of(request) | {DEADLINE: deadline}


def keep_loaded_state(scheduler: Any, request: Any, start: int, output: Any) -> bool:
    """Keep the state that a request was loaded with, if it begins with it in this step; whether it is kept.

    The request goes on in the block that was loaded, so vLLM copies the state before anything of a step is computed.
    """
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    checkpoints: Checkpoints = scheduler.seamark
    keys, state = scheduler.seamark.states.keys, checkpoints.state_of(request)
    if not start or start != state.loaded or start != checkpoints.grid.floor(start):
        return False
    if keys.is_cached(request, start):
        return True
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    recurrent = [managers[group] for group in keys.recurrent]
    sources = [m.req_to_blocks[request.request_id][(start - 1) // m.block_size] for m in recurrent]
    copies = list(output.kv_cache_block_copies or ())
    written = {copy.dst_block_id for copy in copies}  # by this step's copies: it holds a state that was found here
    if any(block.is_null or block.block_id in written for block in sources):
        return False
    target = CheckpointTarget(start, HINTED if start in state.wish.hinted_positions else TAIL)
    blocks = checkpoints.reserve(request, target)
    if blocks is None:
        checkpoints.counters.hint_ignored("no_room")
        return False
    pairs = zip(sources, blocks, strict=True)
    output.kv_cache_block_copies = [*copies, *(KVCacheBlockCopy(a.block_id, b.block_id) for a, b in pairs)]
    return True
