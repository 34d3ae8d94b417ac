"""What `seamark worker --peer-address` and `--checkpoint-dir` become, and what is refused in one sentence."""

from __future__ import annotations

import json

import pytest

from engine_patches.commands import worker
from engine_patches.commands.worker import read_command_line, refusal, transfer_config
from engine_patches.disk import flags
from engine_patches.disk.flags import NO_NIXL, PeerAddress, no_peers, peer_flags, transfer_flags
from engine_patches.kv_connectors import Lane, decide_by
from engine_patches.ledger import Shape

ADDRESS = ["--peer-address", "10.0.0.5:5710"]


def test_without_a_flag_there_is_no_connector():
    assert not transfer_config(read_command_line(["m"]).flags)


def test_an_address_for_peers_becomes_our_connector_with_a_tier_of_peers_that_keeps_each_state():
    transfer = transfer_config(read_command_line(["m", *ADDRESS, "--peer-bytes", "1000"]).flags)
    assert transfer["kv_connector"] == "SeamarkConnector" and transfer["kv_role"] == "kv_both"
    extra = transfer["kv_connector_extra_config"]
    (tier,) = extra["secondary_tiers"]
    assert (tier["type"], tier["host"], tier["port"]) == ("PeerStates", "10.0.0.5", 5710)
    assert (extra["keep"], extra["host_bytes"]) == ("all", 1000)


def test_beside_peers_states_are_written_inside_a_pass():
    (_, transfer) = peer_flags(PeerAddress("10.0.0.5", 5710))
    assert decide_by(json.loads(transfer)).lane is Lane.INSIDE


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("5710", "5710 is not HOST:PORT"),
        (":5710", ":5710 is not HOST:PORT"),
        ("host:", "host: is not HOST:PORT"),
        ("host:0", "host:0 is not HOST:PORT"),
        ("host:65536", "host:65536 is not HOST:PORT"),
        ("host:-1", "host:-1 is not HOST:PORT"),
        ("0.0.0.0:5710", "0.0.0.0 is no address that peers can call this worker at"),
    ],
)
def test_an_address_that_nobody_can_call_is_refused(capsys, address, why):
    with pytest.raises(SystemExit):
        read_command_line(["m", f"--peer-address={address}"])
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--checkpoint-dir", "d"], "--peer-address and --checkpoint-dir are two ways to keep states"),
        (["--kv-transfer-config", '{"kv_connector": "X"}'], "--peer-address is a KV connector of its own"),
    ],
)
def test_two_connectors_are_refused(capsys, more, why):
    with pytest.raises(SystemExit):
        read_command_line(["m", *ADDRESS, *more])
    assert why in capsys.readouterr().err


def test_without_nixl_a_worker_with_peers_says_so_and_one_without_does_not_care(monkeypatch):
    monkeypatch.setattr(flags, "_PEERS", ())
    monkeypatch.setattr(flags.importlib.util, "find_spec", lambda name: None)
    assert refusal("m", peer_flags(PeerAddress("h", 1))) == NO_NIXL
    assert refusal("m", transfer_flags("d")) is None and refusal("m", []) is None


def test_a_vllm_whose_peers_may_be_believed_too_easily_is_refused_and_the_difference_named(monkeypatch):
    monkeypatch.setattr(flags, "_PEERS", (Shape(flags._PEERS[0].target, "self, other"),))
    assert "expected (self, other)" in str(no_peers())


def test_a_worker_that_is_refused_starts_nothing(monkeypatch, capsys):
    monkeypatch.setattr(worker, "is_cpu_build", lambda: False)
    monkeypatch.setattr(worker, "vllm_environment", lambda *_: {})
    monkeypatch.setattr(worker, "no_peers", lambda: NO_NIXL)
    monkeypatch.setattr(worker, "serve", lambda _: pytest.fail("started"))
    assert worker.main(["m", *ADDRESS]) == 1
    assert capsys.readouterr().err == f"seamark worker: {NO_NIXL}\n"
