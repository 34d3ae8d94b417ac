"""The names under which Seamark leaves something on vLLM's objects, in globals and in the environment.

What hangs on an object goes with it. Beside these names some of vLLM's own fields are set to other values:

    Scheduler          mamba_has_prefill_checkpoint_blocks, mamba_shared_prefix_checkpoint
    its coordinator    enable_partial_hash_hits, cache_blocks
    its managers       pop_blocks_for_free
    MambaManager       has_prefill_checkpoint_blocks, shared_prefix_checkpoint
    CacheConfig        prefix_match_unit, block_size
    MambaSpec          shapes: equal, with the promise of a layer (`forward.layers`)
    recurrent layers   the method that is their core (`families`)
    their builders     build, update_block_table (`forward.layers`)
    BlockPool          free_blocks; four methods, if KV events are ours (`scheduler.kv_events`); order of free blocks
    Request            shared_prefix_boundary; lora_request; block_hashes of an adapter's prompt, made anew; the end of
                       a prompt that is prefilled for another worker; kv_transfer_params of one that is taken
    KVTransferConfig   kv_connector_extra_config, of our own connectors
    SchedulerOutput    kv_cache_block_copies
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# On a Scheduler and its cache managers, as attribute `seamark`: `scheduler.checkpoints.Checkpoints`. On NIXL's half in
# a scheduler: `scheduler.transfers.Transfers`. On a Request: `scheduler.planner.RequestState`.

# On a Request.
ADAPTER = "seamark_adapter"  # `scheduler.adapters.Adapter` that computes it, None if that is not certain
TAG = "seamark_adapter_tag"  # of the contents of its adapter, in its hashes
LOCAL_HIT = "seamark_local_hit"  # tokens found in the cache: vLLM tells connectors of whole blocks only
LOADED = "seamark_loaded"  # tokens loaded from a disk
DECLINED = "seamark_declined"  # it was counted as one that computes what a disk holds
OWN = "seamark_own"  # the engine asks it itself; True: states are kept for it on trial, too
SENDER = "seamark_sender"  # the gateway that sent it, and the tokens of its prompt that this one expects to be computed

# On a SchedulerOutput.
WRITES = "seamark_writes"  # the states that the step has to write: by request, `forward.step_writes.Write`
PLANNED_AT = "seamark_planned_at"  # when the step was planned, by the monotonic clock
FOLLOWED_AT = "seamark_followed_at"  # when the one behind it was

# On others.
LATE = "seamark_late"  # on a ModelRunnerOutput: it was there before it was asked for
REPORTS = "seamark_reports"  # on a Scheduler: `reporting.report.Reporter`; none if nobody collects
WATCHES = "seamark_watches"  # on a BlockPool: `scheduler.cache_keys.Watch` of those that are told which keys it removes
ADAPTERS = "seamark_adapters"  # on an EngineCore: `scheduler.adapters.Adapters`
WEIGHTS = "seamark_weights"  # on a model: the name of its weights; on a VllmConfig: `forward.loaded_weights.Weights`
GROUPS = "_seamark_groups"  # on a model runner: the cache group of each layer, and of which configuration that is

# On a recurrent layer's metadata.
SCAN_STATES = "seamark_scan_states"  # what to keep of the step's scan, or of the inputs of its convolution
SEGMENTS = "seamark_segments"  # how its tokens are run
PLAN = "seamark_plan"  # what other cache groups need to make their segments

# In the environment of the processes that the one which starts the engines starts, for their reports.
FOLDER = "SEAMARK_INTERNAL_REPORTS"  # of this user's own, in which two sockets are:
SENT_TO = "sent"  # where engines send reports, by ZeroMQ
READ_INSIDE = "read"  # where other processes of the same server read them
READ_AT = "SEAMARK_INTERNAL_REPORTS_READ_AT"  # HOST:PORT where gateways do


@dataclass
class Running:
    """What the forward pass of this process is at; None outside of it."""

    step: Any = None  # `forward.step_writes.Step`; None, too, if the scheduler leaves the states to vLLM
    scan: Any = None  # `forward.conv_states.KeptStates` of the layer that runs now, and its cache
    convolution: Any = None  # `forward.conv_states.KeptStates` of the layer that runs now; None once they are kept
    kernel: Any = None  # `forward.scan_states.KernelRun`s of the kernel that is called next, and who keeps its states


RUNNING = Running()
