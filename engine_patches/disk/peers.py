"""States of another worker: vLLM's `p2p` tier, in which a peer is asked, believed, and waited for, within bounds.

A worker answers its peers from its rows in host memory, and a request that names a peer (`remote_kv_source`) is asked
of that one. A peer writes straight into rows of this process. So it must compute exactly what this worker would, which
the handshake makes sure of; and a row that a peer was given and may still write to is not given to anybody else.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import zmq
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.p2p.manager import P2PSecondaryTierManager, P2PSourceInfo

from engine_patches.disk.flags import NO_NIXL
from engine_patches.disk.load_cost import PeerCost

# What comes later than this is not believed: then a peer may have given its own rows to others meanwhile (it holds them
# for 30 seconds), and its heartbeats (10 seconds) may have ended. Seconds.
LATEST = 10.0

# For so long a peer that let a request wait in vain, or is gone, is not asked. Seconds.
REST = 5.0

LINGER_MILLISECONDS = 1000

# Part of the rows that may be lost to peers before none is asked any more.
LOST_SHARE = 0.25

logger = logging.getLogger("vllm.seamark")


class _Load(NamedTuple):
    """Rows that a peer was asked to fill."""

    peer: str
    session: Any  # vLLM's, with that peer, when it was asked
    began: float
    keys: tuple[bytes, ...]
    num_bytes: int


class PeerStates(P2PSecondaryTierManager):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Peers behind vLLM's rows in host memory. All methods run on the scheduler's thread."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        identity: str,
        host: str,
        port: int,
        backpressure_detector: Any = None,
    ) -> None:
        """`identity`: hex of `identity.identity_of`, "" if unknown; `host`, `port`: where peers reach this worker.

        Raises `ValueError` if NIXL is not installed.
        """
        more = {"host": host, "port": port, "backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **more)
        self._finished_jobs: list[Any]
        # Else what was not sent to a peer that has gone keeps this process from ending.
        self._control._zmq_ctx.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        if not self._data.available:
            raise ValueError(NO_NIXL)
        self.cost = PeerCost()
        self.lost: set[bytes] = set()  # keys whose rows a peer may still write to
        self._identity = identity = identity or uuid.uuid4().hex  # nobody is a peer of one that knows no weights
        # vLLM's own covers the model's name, types and block sizes, and says of them what differs.
        bound = f"{self._data.config_fingerprint} {identity}"
        self._data._config_fingerprint = hashlib.sha256(bound.encode()).hexdigest()[:32]
        self._loads: dict[int, _Load] = {}  # by job
        self._withheld: list[Any] = []  # results of loads whose rows are lost
        self._most_lost = int(self._data.num_blocks * LOST_SHARE)
        self._asking = True
        self._waited_since: dict[str, float] = {}  # by request, as peers know it
        self._resting: dict[str, float] = {}  # peer -> until when
        logger.warning(
            "seamark: peers take states from %s:%d: whoever reaches it, and NIXL's own ports, reads what prompts were "
            "made into, and can write to it",
            host,
            port,
        )

    def ask(self, keys: Iterable[bytes], req_context: Any, patience: float) -> bool:
        """Whether all is known that the request's peer is going to say of these keys; else it is asked.

        An answer is waited for `patience` seconds at most, since the first question of the request.
        """
        asked = self._asked(req_context)
        if asked is None:
            return True
        source, session = asked
        answers = [session.register_lookup(source.kv_request_id, key) for key in keys]
        if None not in answers:
            return True
        now = time.monotonic()
        if now - self._waited_since.setdefault(source.kv_request_id, now) <= patience:
            return False
        self._let_rest(source.peer_id)
        self._failed_req_ids.add(source.kv_request_id)
        return True

    def holds(self, key: bytes, req_context: Any = None) -> bool:
        """Whether the request's peer, which was asked, has said that it has a key."""
        asked = self._asked(req_context)
        return asked is not None and asked[1].register_lookup(asked[0].kv_request_id, key) is True

    usable = True  # as of a directory

    bytes_held = 0  # of files: a peer's memory is not counted

    def take_counts(self) -> tuple[Counter[str], int]:
        """As of a directory: no files, no bytes."""
        return Counter(), 0

    def lookup(self, key: Any, req_context: Any) -> Any:
        """vLLM's: whether a key can be loaded."""
        return LookupResult.HIT if self.holds(key, req_context) else LookupResult.MISS

    def on_new_request(self, req_context: Any) -> Any:
        """vLLM's: a request comes, and may name a peer.

        Of vLLM's three ways to name one this is the one that asks before it takes. Its `kv_request_id` is not used: two
        requests with one would end each other's transfers.
        """
        peer = _peer_in(req_context.kv_transfer_params)
        if peer is not None and self._may_ask(peer) and self._get_or_create_session(peer) is not None:
            name = uuid.uuid4().hex
            req_context.set_state(P2PSourceInfo(kv_request_id=name, peer_id=peer, do_probe=True))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """vLLM's: a request is over."""
        source = req_context.get_state(P2PSourceInfo)
        if source is not None:
            self._waited_since.pop(source.kv_request_id, None)
        super().on_request_finished(req_context)

    def submit_load(self, job_metadata: Any) -> None:
        """vLLM's: let the peer fill rows of host memory."""
        source = job_metadata.req_context.get_state(P2PSourceInfo)
        session = self._sessions.get(source.peer_id) if source is not None else None
        if session is not None:
            keys = tuple(map(bytes, job_metadata.keys))
            num_bytes = len(keys) * self.block_size_bytes
            self._loads[job_metadata.job_id] = _Load(source.peer_id, session, time.monotonic(), keys, num_bytes)
            self.cost.load_began(job_metadata.job_id, num_bytes)
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[Any]:
        """vLLM's: the jobs that have ended since the last call, but for those that a peer may not know to have ended.

        A peer that was cut off, or is late, may come back to its work when nobody expects it.
        """
        return [result for result in super().get_finished_jobs() if self._has_ended(result)]

    def drain_jobs(self) -> None:
        """vLLM's: return when no job runs any more. The cache is going to be emptied, and nothing is stored again."""
        super().drain_jobs()
        self._asking = False
        self._finished_jobs, self._withheld = [*self.get_finished_jobs(), *self._withheld], []

    def _has_ended(self, result: Any) -> bool:
        load = self._loads.pop(result.job_id, None)
        if load is None:  # rows that were read, or a load that nobody was asked for
            return True
        self.cost.load_ended(result.job_id)
        seconds = time.monotonic() - load.began
        told = result.success or self._sessions.get(load.peer) is load.session  # the peer has said that it is done
        if told and seconds < LATEST:
            if result.success:
                self.cost.load_took(load.num_bytes, seconds)
            return True
        self._withheld.append(replace(result, success=False))
        self.lost.update(load.keys)
        if self._asking and len(self.lost) > self._most_lost:
            self._asking = False
            logger.warning("seamark: too many transfers of peers have not ended: none is asked any more")
        return False

    def _get_hash_seed(self) -> str:
        """vLLM's: what has to be the same for a peer to be one. A fingerprint may be left out, this may not."""
        return f"{super()._get_hash_seed()} {self._identity}"

    def _reap_dead_sessions(self) -> None:
        """vLLM's: forget peers that are gone. A new session with one waits for its handshake in vain, half a minute."""
        before = set(self._sessions)
        super()._reap_dead_sessions()
        for peer in before - self._sessions.keys():
            self._let_rest(peer)

    def _let_rest(self, peer: str) -> None:
        now = time.monotonic()
        self._resting = {other: end for other, end in self._resting.items() if end > now} | {peer: now + REST}

    def _may_ask(self, peer: str) -> bool:
        return self._asking and peer != self._local_id and time.monotonic() >= self._resting.get(peer, 0.0)

    def _asked(self, req_context: Any) -> tuple[Any, Any] | None:
        """What a request is asked of, and vLLM's session with it, as long as that may answer."""
        source = req_context.get_state(P2PSourceInfo) if req_context is not None else None
        if source is None or not self._asking or source.kv_request_id in self._failed_req_ids:
            return None
        session = self._sessions.get(source.peer_id)
        return None if session is None else (source, session)


def _peer_in(params: Any) -> str | None:
    """host:port of the peer that a request names."""
    source = params.get("remote_kv_source") if isinstance(params, dict) else None
    if not isinstance(source, dict):
        return None
    host, port = source.get("remote_host"), source.get("remote_port")
    if not isinstance(host, str) or not host or not isinstance(port, int) or not 0 < port < 65536:
        return None
    return f"{host}:{port}"
