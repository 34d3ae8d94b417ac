"""What a configuration means before an engine has said so: the match unit, drafts, connectors, refused hints."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches import kv_connectors, speculation
from engine_patches.commands.explain import about
from engine_patches.footprint import OWN as OWN_REQUEST
from engine_patches.kv_connectors import CONNECTORS, UNKNOWN, ConnectorLane, decide_by
from engine_patches.ledger import Shape, ShapeMismatch
from engine_patches.scheduler.drafts import CLOSED, NONE, OFF, ON, ON_TRIAL, DraftGate
from engine_patches.scheduler.hints import IGNORED_REASONS
from engine_patches.scheduler.hooks import default_to_fine_unit, kernel_chunk, state_alignment, unit_of
from engine_patches.scheduler.refusals import LONGEST, SPECULATIVE, Refusal, by_configuration, by_scheduler


class Promised(tuple):
    """Shapes of a layer whose states can be written inside a pass."""


@pytest.fixture(autouse=True)
def drafts_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEAMARK_DRAFTS", "0")
    monkeypatch.delenv("SEAMARK_CHUNK_ENDS", raising=False)
    monkeypatch.setattr("engine_patches.forward.layers.PromisedShapes", Promised)


def drafts(method: str = "mtp", modules: int = 1, **more: Any) -> SimpleNamespace:
    """What is read of vLLM's configuration of drafts."""
    return SimpleNamespace(
        method=method,
        use_multi_module_mtp=lambda: modules > 1,
        use_eagle_block_drop=lambda: method in ("mtp", "eagle3"),
        **more,
    )


def config(drafts: Any = None, connector: str | None = None, **changes: Any) -> SimpleNamespace:
    """What is read of vLLM's configuration of a hybrid."""
    found = {
        **{"hybrid": True, "pure": False, "type": "nemotron_h", "index": 0, "chunk": 256, "unit": None, "block": 384},
        **{"caching": True, "mode": "align", "stages": 1, "context_ranks": 1, "launched": "mp", "ranks": 2},
        **{"graphs": "FULL_AND_PIECEWISE", "split": False, "overlap": False, "v2": False, "lookahead": None},
        "logprobs": 20,
    } | changes
    a = SimpleNamespace(**found)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_hybrid=a.hybrid,
            is_attention_free=a.pure,
            max_logprobs=a.logprobs,
            hf_text_config=SimpleNamespace(model_type=a.type, index_kpool=a.index),
            get_mamba_chunk_size=lambda: a.chunk,
        ),
        cache_config=SimpleNamespace(
            prefix_match_unit=a.unit, block_size=a.block, enable_prefix_caching=a.caching, mamba_cache_mode=a.mode
        ),
        speculative_config=drafts,
        num_speculative_tokens=2 if drafts else 0,
        **({} if a.lookahead is None else {"num_hash_lookahead_tokens": a.lookahead}),  # only newer vLLMs have it
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=a.stages,
            decode_context_parallel_size=a.context_ranks,
            distributed_executor_backend=a.launched,
            world_size=a.ranks,
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(name=a.graphs), splitting_ops_contain_attention=lambda: a.split
        ),
        kv_transfer_config=SimpleNamespace(kv_connector=connector) if connector else None,
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(async_scheduling=a.overlap),
        use_v2_model_runner=a.v2,
    )


# By such names vLLM's managers of cache groups are known.
MambaManager, FullAttentionManager, SlidingWindowManager, UnheardOfManager = (
    type(f"{kind}Manager", (SimpleNamespace,), {}) for kind in ("Mamba", "FullAttention", "SlidingWindow", "UnheardOf")
)


def why(
    vllm_config: Any, unit=16, fine=True, window=False, in_pass=True, beside=FullAttentionManager, compression=1
) -> Refusal | None:
    """Why a vLLM scheduler with cache blocks of 64 tokens refuses hints. `fine`: it finds prefixes between them.

    `beside`: what manages a further cache; `compression`: tokens that an index has one key for.
    """
    spec = SimpleNamespace(prefix_cacheable=True, shapes=Promised() if in_pass else (), tokens_per_state=compression)
    kinds = (MambaManager, SlidingWindowManager if window else FullAttentionManager, beside)
    managers = [
        kind(kv_cache_group_id=at, kv_cache_spec=spec, supports_fine_grained_hash_lookup=not (window and at == 1))
        for at, kind in enumerate(kinds)
    ]
    cache = SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=managers, num_reprefillable_tokens=0),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * 2),
    )
    scheduler = SimpleNamespace(vllm_config=vllm_config, hash_block_size=unit, block_size=64, kv_cache_manager=cache)
    scheduler.mamba_partial_cache_hit = fine and not window and unit < 64
    return by_scheduler(scheduler, managers[:1])


MTP, MEDUSA = drafts(), drafts("medusa")

(FILLS_THE_CACHE,) = (name for name, lane in CONNECTORS.items() if lane is ConnectorLane.NO_HINTS)

NIXL = "NixlConnector"


@pytest.mark.parametrize(
    ("vllm_config", "how", "reason", "told"),
    [
        (config(), {}, "", ""),
        (config(), {"window": True}, "no_states", "sliding window"),
        (config(), {"fine": False}, "no_states", "between"),
        (config(connector=NIXL), {"unit": 64}, "connector", "--prefix-match-unit"),
        (config(), {"unit": 64}, "", ""),
        (config(), {"beside": UnheardOfManager}, "no_states", "UnheardOfManager"),
        (config(), {"compression": 128}, "no_states", "no multiple of the 128"),
        (config(index=24), {}, "no_states", "no multiple of the 24"),  # of a group with several kinds of layers
        (config(caching=False), {}, "no_states", "--enable-prefix-caching"),
        (config(mode="all"), {}, "no_states", "--mamba-cache-mode all"),
        (config(launched="external_launcher"), {}, "no_states", "external_launcher"),
        (config(launched="external_launcher", ranks=1), {}, "", ""),
        (config(graphs="FULL"), {}, "no_states", "FULL_AND_PIECEWISE"),
        (config(connector=FILLS_THE_CACHE), {}, "connector", FILLS_THE_CACHE),
        (config(connector=NIXL, context_ranks=2), {}, "connector", "decode context parallelism"),
        (config(context_ranks=2), {}, "", ""),
        # Of two the one that stays when the other has gone; what flags cure is told at once, for one restart.
        (config(caching=False), {"window": True}, "no_states", "sliding window"),
    ],
)
def test_the_last_cause_is_told_in_one_sentence(vllm_config, how, reason, told):
    refused = why(vllm_config, **how)
    if not reason:
        assert refused is None
        return
    assert refused is not None and refused.reason == reason in IGNORED_REASONS
    assert told in refused.cause and len(refused.cause) <= LONGEST
    assert not refused.cause.endswith(".") and ". " not in refused.cause


@pytest.mark.parametrize(
    ("vllm_config", "how", "told"),
    [
        (config(MTP), {}, "SEAMARK_DRAFTS=0; auto"),
        (config(MTP), {"unit": 64}, "--prefix-match-unit"),
        (config(MTP), {"in_pass": False}, "inside a pass"),
        (config(MEDUSA, caching=False), {}, "medusa"),
        (config(drafts(modules=2)), {}, "several modules"),
        (config(drafts(num_speculative_tokens_per_batch_size=[1, 2])), {}, "num_speculative_tokens_per_batch_size"),
        (config(drafts("dspark", enable_adaptive_verification=True)), {}, "enable_adaptive_verification"),
        (config(MTP, stages=2), {}, "pipeline parallelism"),
        (config(MTP, connector=NIXL), {}, "drafts with a KV connector"),
        (config(MTP, overlap=True), {"in_pass": False}, "--no-async-scheduling"),
    ],
)
def test_a_refusal_beside_drafts_says_what_to_change(vllm_config, how, told):
    refused = why(vllm_config, **how)
    assert refused is not None and refused.reason == "speculative" and told in refused.cause


@pytest.mark.parametrize(
    ("vllm_config", "told"),
    [
        (config(caching=False), "prefix caching is off"),
        (config(hybrid=False, caching=False), None),  # attention alone: there are no states to keep
        (config(MTP, caching=False), "--enable-prefix-caching); speculative decoding is on"),
        (config(MTP, connector=FILLS_THE_CACHE), FILLS_THE_CACHE),
    ],
)
def test_before_the_engine_has_said_so_its_configuration_does(vllm_config, told):
    refusal = by_configuration(vllm_config)
    assert (refusal is None) == (told is None) and (refusal is None or told in refusal.cause)
    layers = by_configuration(config(MTP), in_pass=False)
    assert layers is not None and "inside a pass" in layers.cause, "before the switch"


@pytest.mark.parametrize(("value", "refused"), [("", False), ("1", False), ("0", True)])
def test_hints_beside_drafts_are_refused_only_if_nobody_wants_them(monkeypatch, value, refused):
    monkeypatch.setenv("SEAMARK_DRAFTS", value)
    for method in speculation.METHODS:
        given = config(drafts(method))
        assert speculation.unsupported(given) is None and (speculation.switched_off(given) is not None) is refused
    assert speculation.unsupported(config(MTP, overlap=True, v2=True)) is None
    assert speculation.switched_off(config()) is None and not speculation.drafting(config())
    for logprobs in (-1, 0, 2, 3):
        refusal = by_configuration(config(MTP, logprobs=logprobs))
        told = refusal is not None and "(--max-logprobs)" in refusal.cause
        assert told is (value == "" and logprobs in (0, 2)), "a trial would see nothing"


@pytest.mark.parametrize(
    ("vllm_config", "unit", "ahead"),
    [
        (config(MTP), 16, 16),  # of a head that drops a unit
        (config(drafts("ngram")), 16, 0),
        (config(MTP, lookahead=1), 16, 1),
        (config(MTP, lookahead=0), 32, 32),
        (config(MEDUSA), 16, 0),  # refused
    ],
)
def test_a_prefix_has_to_be_shared_as_far_ahead_as_the_engine_looks(vllm_config, unit, ahead, monkeypatch):
    assert speculation.ahead(vllm_config, unit) == 0, "beside drafts that are switched off"
    monkeypatch.setenv("SEAMARK_DRAFTS", "1")
    assert speculation.ahead(vllm_config, unit) == ahead


@pytest.mark.parametrize(("vllm_config", "unit"), [(config(), 16), (config(unit=48), 48), (config(index=24), 48)])
def test_the_unit_before_the_engine_has_reported_its_own(vllm_config, unit):
    assert unit_of(vllm_config) == unit


class Recurrent(SimpleNamespace):
    """A `MambaSpec`, as far as it is read."""


MAMBA1, MAMBA2, GDN = (
    Recurrent(mamba_type=SimpleNamespace(name=name), prefix_cacheable=True, tokens_per_state=-1)
    for name in ("MAMBA1", "MAMBA2", "GDN_ATTN")
)

ATTENTION, INDEX = (SimpleNamespace(prefix_cacheable=True, tokens_per_state=tokens) for tokens in (1, 24))


@pytest.mark.parametrize(
    ("vllm_config", "specs", "switch", "unit"),
    [
        (config(), (ATTENTION, MAMBA2), "0", 16),
        (config(), (ATTENTION, GDN), "0", 64),
        (config(block=100), (ATTENTION, MAMBA2), "0", 100),
        (config(), (ATTENTION, MAMBA2, INDEX), "0", 48),
        (config(connector="DecodeBenchConnector"), (ATTENTION, MAMBA2), "0", 384),
        (config(MTP), (ATTENTION, GDN), "1", 16),
        # Everything else keeps vLLM's.
        (config(unit=192), (ATTENTION, MAMBA2), "0", 192),
        (config(caching=False), (ATTENTION, MAMBA2), "0", 384),
        (config(), (MAMBA2,), "0", 384),
    ],
)
def test_a_hybrid_gets_the_finest_unit_that_divides_its_blocks(vllm_config, specs, switch, unit, monkeypatch):
    def vllms(kv_cache_config: Any, vllm_config: Any) -> tuple[int, int]:
        unit = cache.prefix_match_unit or cache.block_size
        if cache.block_size % unit:
            raise ValueError(f"{unit} does not divide {cache.block_size}")
        return cache.block_size, unit

    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_interface", SimpleNamespace(MambaSpec=Recurrent))
    monkeypatch.setenv("SEAMARK_DRAFTS", switch)
    cache, groups = vllm_config.cache_config, [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    found = default_to_fine_unit(vllms)(SimpleNamespace(kv_cache_groups=groups), vllm_config)
    assert found == (cache.block_size, unit)
    assert cache.prefix_match_unit == (unit if unit < cache.block_size else None)
    if GDN in specs:
        assert state_alignment([GDN], vllm_config, unit) == 64


def test_states_lie_at_the_ends_of_a_kernels_chunks_of_a_delta_net_or_if_the_user_asks(monkeypatch):
    assert [kernel_chunk(spec, config()) for spec in (MAMBA1, MAMBA2, GDN)] == [1, 256, 64]
    assert kernel_chunk(MAMBA2, config(chunk=None)) == 1
    for value, alignments in (("", [16, 16, 64]), ("1", [16, 256, 64]), ("0", [16, 16, 16])):
        monkeypatch.setenv("SEAMARK_CHUNK_ENDS", value)
        assert [state_alignment([spec], config(), 16) for spec in (MAMBA1, MAMBA2, GDN)] == alignments


@pytest.mark.parametrize(
    ("value", "drafting", "refusal", "state"),
    [
        ("auto", MTP, None, ON_TRIAL),
        ("1", MTP, None, ON),
        ("0", MTP, Refusal(SPECULATIVE, "it is off"), OFF),
        ("auto", MTP, Refusal(SPECULATIVE, "a method"), OFF),
        ("auto", None, None, NONE),
    ],
)
def test_an_engine_begins_as_its_drafts_and_the_setting_say(monkeypatch, value, drafting, refusal, state):
    monkeypatch.setenv("SEAMARK_DRAFTS", value)
    gate = DraftGate.of(config(drafting), refusal)
    named = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"seamark_trial": 1, "seamark_drafts": "open:"}))
    assert gate.state == state and gate.admits(named) == (state in (NONE, ON))
    assert gate.admits(SimpleNamespace(**{OWN_REQUEST: True}))
    gate.state, gate.why = CLOSED, "x" * 1000
    assert not gate.admits(named) and gate.refusal.cause == "drafts: " + "x" * (LONGEST - 9) + "…"


def configured(name: str, **more: Any) -> dict[str, Any]:
    """Fields of vLLM's `KVTransferConfig`."""
    extra = {key: more.pop(key) for key in ("connectors", "bidirectional_kv_xfer") if key in more}
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra, **more}


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return configured("MultiConnector", connectors=list(children))


OWN = configured("SeamarkConnector", kv_connector_module_path="engine_patches.disk.connector")

PULL, PUSH, OFFLOADING = (configured(name) for name in ("NixlConnector", "NixlPushConnector", "OffloadingConnector"))


@pytest.mark.parametrize(
    ("transfer", "named"),
    [
        *((each, "") for each in ({}, OWN, PULL, configured("NixlPullConnector"), multi(OWN, PULL))),
        *((configured(name), name) for name in ("OffloadingConnector", "OfSomebody", "MultiConnector")),
        *((configured(name, kv_connector_module_path="my"), name) for name in ("SeamarkConnector", "NixlConnector")),
        (configured("MultiConnector", connectors=[PULL], kv_connector_module_path="my"), "MultiConnector"),
        (configured("NixlConnector", bidirectional_kv_xfer=True), "NixlConnector with bidirectional_kv_xfer"),
        (multi(PULL, multi(PULL, PUSH)), "NixlPushConnector"),
    ],
)
def test_a_connector_that_is_not_known_to_leave_their_blocks_alone_costs_passes_and_is_named(transfer, named):
    decision = decide_by(transfer)
    if not named:
        assert decision.lane is ConnectorLane.INSIDE and not decision.reason and not list(about(decision))
        return
    assert decision.lane is ConnectorLane.CHUNK_ENDS and decision.reason == f"{named} {UNKNOWN}"
    (line,) = about(decision)
    assert named in line and "a state costs a pass" in line


@pytest.mark.parametrize("name", CONNECTORS)
def test_the_worst_of_several_connectors_counts(name):
    for transfer in (configured(name), multi(PULL, configured(name), OWN)):
        decision = decide_by(transfer)
        assert decision.lane is CONNECTORS[name] and name in decision.names
        if decision.lane is ConnectorLane.NOT_SERVED:
            assert decision.reason.startswith(f"{name} knows caches of one kind")
            assert list(about(decision)) == [decision.reason]
            assert ("38 of 38" in decision.reason) is name.startswith("LMCache")
    both = "ExampleConnector", "DecodeBenchConnector"
    assert decide_by(multi(*map(configured, both))).names == both


@pytest.mark.parametrize(("device", "lane"), [("cpu", ConnectorLane.INSIDE), ("cuda", ConnectorLane.CHUNK_ENDS)])
def test_a_buffer_in_the_hosts_memory_is_one_only_beside_a_gpu(device, lane):
    buffered = configured("NixlConnector", kv_buffer_device="cpu")
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**buffered), device_config=SimpleNamespace(device_type=device)
    )
    assert kv_connectors.decide(config).lane is lane
    assert decide_by(buffered).lane is ConnectorLane.INSIDE, "by default on a CPU"
    assert decide_by({**buffered, "kv_buffer_device": "cuda"}, on_cpu=False).lane is ConnectorLane.INSIDE


def test_a_nixl_that_was_not_shown_costs_passes_and_the_difference_is_named(monkeypatch):
    fits, other = kv_connectors._SHOWN[0], Shape(kv_connectors._SHOWN[0].target, "self, request")
    for name, is_handed_over in (("_SHOWN", True), ("_HANDED_OVER", False)):
        with monkeypatch.context() as patched:
            patched.setattr(kv_connectors, name, (fits, other))
            decision = decide_by(PULL)
            assert decision.lane is ConnectorLane.CHUNK_ENDS and "expected (self, request)" in decision.reason
            assert kv_connectors.hands_over() is is_handed_over
    with pytest.raises(ShapeMismatch):
        other.check()
    assert decide_by({}).lane is ConnectorLane.INSIDE


@pytest.mark.parametrize(
    ("transfer", "weights", "prefills"),
    [
        (None, False, False),
        (OWN, True, False),
        (PULL, True, True),
        (multi(PUSH, OFFLOADING), False, False),
        (multi(OFFLOADING, multi(PUSH, PULL)), True, True),
    ],
)
def test_weights_are_asked_for_where_states_come_from_elsewhere(transfer, weights, prefills):
    config = SimpleNamespace(kv_transfer_config=None if transfer is None else SimpleNamespace(**transfer))
    assert kv_connectors.needs_weights(config) is weights
    assert kv_connectors.hands_prefills_over(config) is prefills
