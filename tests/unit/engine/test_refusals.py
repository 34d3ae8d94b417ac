"""Why hints are refused: the cause that goes last, in words for a user."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.kv_connectors import CONNECTORS, ConnectorLane
from engine_patches.scheduler.hints import IGNORED_REASONS
from engine_patches.scheduler.refusals import LONGEST, Refusal, by_configuration, by_scheduler

MTP = SimpleNamespace(method="mtp", use_multi_module_mtp=lambda: False)

OTHER_DRAFTS = SimpleNamespace(method="medusa", use_multi_module_mtp=lambda: False)

(FILLS_THE_CACHE,) = (name for name, lane in CONNECTORS.items() if lane is ConnectorLane.NO_HINTS)


class MambaManager(SimpleNamespace):
    """By such names vLLM's managers of cache groups are known."""


class FullAttentionManager(SimpleNamespace):
    pass


class SlidingWindowManager(SimpleNamespace):
    pass


class RSWAManager(FullAttentionManager):
    pass


class UnheardOfManager(FullAttentionManager):
    pass


class Promised(tuple):
    """Shapes of a layer whose states can be written inside a pass."""


@pytest.fixture(autouse=True)
def promises(monkeypatch):
    monkeypatch.setattr("engine_patches.forward.layers.PromisedShapes", Promised)
    monkeypatch.setenv("SEAMARK_DRAFTS", "0")


def config(drafts: Any = None, connector: str | None = None, **changes: Any) -> SimpleNamespace:
    """What is read of vLLM's configuration of a hybrid."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_hybrid=changes.get("hybrid", True),
            is_attention_free=changes.get("pure", False),
            hf_text_config=SimpleNamespace(index_kpool=changes.get("index", 0)),
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=changes.get("caching", True), mamba_cache_mode=changes.get("mode", "align")
        ),
        speculative_config=drafts,
        num_speculative_tokens=2 if drafts else 0,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=changes.get("stages", 1),
            decode_context_parallel_size=changes.get("context_ranks", 1),
            distributed_executor_backend=changes.get("launched", "mp"),
            world_size=changes.get("ranks", 2),
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(name=changes.get("graphs", "FULL_AND_PIECEWISE")),
            splitting_ops_contain_attention=lambda: changes.get("split", False),
        ),
        kv_transfer_config=SimpleNamespace(kv_connector=connector) if connector else None,
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(async_scheduling=changes.get("overlap", False)),
        use_v2_model_runner=False,
    )


def scheduler(
    vllm_config: Any,
    *,
    unit: int = 16,
    fine: bool = True,
    window: bool = False,
    in_pass: bool = True,
    beside: type = FullAttentionManager,
    compression: int = 1,
) -> Any:
    """What is read of vLLM's scheduler, with cache blocks of 64 tokens. `fine`: it finds prefixes between them.

    `beside`: what manages a further cache; `compression`: tokens that an index has one key for.
    """
    spec = SimpleNamespace(prefix_cacheable=True, shapes=Promised() if in_pass else (), tokens_per_state=compression)
    recurrent = MambaManager(kv_cache_group_id=0, kv_cache_spec=spec, supports_fine_grained_hash_lookup=True)
    kind = SlidingWindowManager if window else FullAttentionManager
    attention = kind(kv_cache_group_id=1, kv_cache_spec=spec, supports_fine_grained_hash_lookup=not window)
    further = beside(kv_cache_group_id=2, kv_cache_spec=spec, supports_fine_grained_hash_lookup=True)
    return SimpleNamespace(
        vllm_config=vllm_config,
        mamba_partial_cache_hit=fine and not window and unit < 64,
        hash_block_size=unit,
        block_size=64,
        kv_cache_manager=SimpleNamespace(
            coordinator=SimpleNamespace(
                single_type_managers=[recurrent, attention, further], num_reprefillable_tokens=0
            ),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * 2),
        ),
    )


def of(made: Any) -> Refusal | None:
    return by_scheduler(made, made.kv_cache_manager.coordinator.single_type_managers[:1])


@pytest.mark.parametrize(
    ("made", "reason", "told"),
    [
        (scheduler(config(caching=False)), "no_states", "--enable-prefix-caching"),
        (scheduler(config(mode="all")), "no_states", "--mamba-cache-mode all"),
        (scheduler(config(), window=True), "no_states", "sliding window"),
        (scheduler(config(), window=True, unit=64), "no_states", "sliding window"),
        (scheduler(config(), fine=False), "no_states", "between"),
        (scheduler(config(connector="NixlConnector"), unit=64), "connector", "--prefix-match-unit"),
        (scheduler(config(MTP), unit=64), "speculative", "--prefix-match-unit"),
        (scheduler(config(MTP), unit=64), "speculative", "SEAMARK_DRAFTS=0"),  # both at once: one restart
        (scheduler(config(MTP, caching=False)), "no_states", "--enable-prefix-caching); speculative decoding is on"),
        (scheduler(config(caching=False), window=True), "no_states", "sliding window"),
        (scheduler(config(OTHER_DRAFTS, caching=False)), "speculative", "medusa"),
        (scheduler(config(connector=FILLS_THE_CACHE)), "connector", FILLS_THE_CACHE),
        (scheduler(config(OTHER_DRAFTS)), "speculative", "medusa"),
        (scheduler(config(MTP), in_pass=False), "speculative", "inside a pass"),
        (scheduler(config(MTP)), "speculative", "SEAMARK_DRAFTS=0"),
        # Of two the one that stays when the other has gone.
        (scheduler(config(MTP), window=True), "speculative", "sliding window"),
        (scheduler(config(OTHER_DRAFTS), window=True), "speculative", "sliding window"),
        (scheduler(config(MTP, connector=FILLS_THE_CACHE)), "connector", FILLS_THE_CACHE),
        (scheduler(config(MTP, overlap=True)), "speculative", "--no-async-scheduling"),
        (scheduler(config(MTP, overlap=True), in_pass=False), "speculative", "--no-async-scheduling"),
        (scheduler(config(connector=FILLS_THE_CACHE), window=True), "no_states", "sliding window"),
        (scheduler(config(), beside=RSWAManager), "no_states", "RSWAManager"),
        (scheduler(config(caching=False), beside=UnheardOfManager), "no_states", "UnheardOfManager"),
        (scheduler(config(), compression=128), "no_states", "no multiple of the 128"),
        (scheduler(config(index=24)), "no_states", "no multiple of the 24"),  # of a group with several kinds of layers
        (scheduler(config(connector="NixlConnector", context_ranks=2)), "connector", "decode context parallelism"),
        (scheduler(config(MTP, connector="NixlConnector", context_ranks=2)), "connector", "context parallelism"),
        (scheduler(config(MTP, stages=2)), "speculative", "pipeline parallelism"),
        (scheduler(config(launched="external_launcher")), "no_states", "external_launcher"),
        (scheduler(config(graphs="FULL")), "no_states", "FULL_AND_PIECEWISE"),
    ],
)
def test_the_last_cause_is_told_in_one_sentence(made, reason, told):
    refusal = of(made)
    assert refusal is not None and refusal.reason == reason in IGNORED_REASONS
    assert told in refusal.cause and len(refusal.cause) <= LONGEST
    assert not refusal.cause.endswith(".") and ". " not in refusal.cause


@pytest.mark.parametrize(
    ("vllm_config", "told"),
    [
        (config(caching=False), "prefix caching is off"),
        (config(hybrid=False, pure=True, caching=False), "prefix caching is off"),
        (config(hybrid=False, caching=False), None),  # attention alone: there are no states to keep
        (config(MTP), "SEAMARK_DRAFTS=0"),
        (config(connector="NixlConnector", context_ranks=2), "decode context parallelism"),
        (config(), None),
    ],
)
def test_before_the_engine_has_said_so_its_configuration_does(vllm_config, told):
    refusal = by_configuration(vllm_config)
    assert (refusal is None) == (told is None)
    assert refusal is None or told in refusal.cause


def test_layers_that_drafts_need_are_asked_for_before_the_switch():
    refusal = by_configuration(config(MTP), in_pass=False)
    assert refusal is not None and "inside a pass" in refusal.cause
