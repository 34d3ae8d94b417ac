"""`python -m tests.bench.fuzz`: broken HTTP and broken bodies on the gateway's sockets, for as long as one likes.

Exit status 1 when the gateway answers a 5xx of its own, leaves a connection hanging, hands a worker anything that the
client did not frame as one request, logs an error, keeps growing, or no longer serves at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from proxy.bench.harness.servers import Server, Servers, narrator
from tests.bench.fuzz_cases import ANSWERED, REFUSED, Case, case, complaint, name_of
from tests.bench.fuzz_framing import AT_ONCE, SMUGGLED, TOO_LONG
from tests.bench.soak import bad_lines, resident_bytes
from tests.harness.raw_http import Connection, Cut, request
from tests.harness.raw_worker import RawWorker, started

ANSWER_SECONDS = 15.0  # then it hangs

QUIET_SECONDS = 0.3  # given to what may be incomplete, before the client says that nothing more will come

SHOWN = 20  # failures in full

GROWTH_BYTES = 64 * 2**20

# Small tables, so that they are full soon and what grows then is a leak.
GATEWAY_FLAGS = ("--memory-bytes", "8000000", "--text-bytes", "8000000")

_RESPONSE = re.compile(rb"HTTP/1\.[01] (\d{3})[^\r\n]*\r\n(.*?)\r\n\r\n", re.S)

_CHAT = b'{"model":"m","messages":[{"role":"user","content":"Tide?"}]}'


class Run:
    """One gateway under fire, and what has been seen so far."""

    def __init__(self, gateway: Server, worker: RawWorker, seed: int) -> None:
        self._gateway, self._worker, self.seed = gateway, worker, seed
        self.kinds: Counter[str] = Counter()  # of cases
        self.statuses: Counter[int] = Counter()  # of answers
        self.reached = 0  # requests that the worker got
        self.failures: list[tuple[Case, str]] = []  # and why
        self.wrongs: list[str] = []  # of the gateway as a whole
        self._memory: list[int] = []  # resident bytes

    @property
    def held(self) -> bool:
        return not self.failures and not self.wrongs

    async def send(self, number: int) -> None:
        each = case(self.seed, number)
        self.kinds[each.kind if each.verdict != REFUSED else "ambiguous"] += 1
        if why := await self.judged(each):
            self.failures.append((each, why))
        if number % 50 == 0:
            self._memory.append(resident_bytes(self._gateway.process.pid))

    @property
    def means(self) -> tuple[float, float]:
        """Resident bytes of the run's second third, and of its last."""
        third = max(1, len(self._memory) // 3)
        second, last = self._memory[third : 2 * third], self._memory[-third:]
        return sum(second) / max(1, len(second)), sum(last) / max(1, len(last))

    async def judged(self, each: Case) -> str:
        """Send one case; what is wrong with what became of it."""
        try:
            connection = await Connection.open(self._gateway)
        except OSError as error:
            return f"no connection: {error}"
        try:
            for piece in each.pieces:
                await connection.send(piece)
                await asyncio.sleep(0)
            if each.leaves:
                return ""
            if each.verdict == ANSWERED:
                return await self._answered(connection, each)
            return await self._ended(connection, each)
        except Cut as error:
            return f"cut off: {error}"
        finally:
            connection.close()

    async def _answered(self, connection: Connection, each: Case) -> str:
        for position, sent in enumerate(each.requests):
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    response = await connection.response(to_head=sent.method == "HEAD")
            except TimeoutError:
                return f"request {position} hangs: no answer in {ANSWER_SECONDS:g} s"
            if response is None:
                return f"request {position} was not answered: the connection was closed"
            marked = response.headers.get("x-mock") == "answer"
            seen = self._worker.pop(sent.name)
            self.reached += len(seen)
            self.statuses[response.status] += 1
            if not marked and response.status >= 500:
                return f"request {position}: a {response.status} of the gateway's own: {response.body[:300]!r}"
            if len(seen) != marked:
                return f"request {position}: a {response.status}, and the worker got it {len(seen)} times"
            if seen and (wrong := complaint(sent, seen[0])):
                return f"request {position}: {wrong}"
            if response.headers.get("connection") == "close":
                return ""
        return ""

    async def _ended(self, connection: Connection, each: Case) -> str:
        """Read until the server closes, which it must soon after the client has said that nothing more will come."""
        answered = bytearray()

        async def closes_within(seconds: float) -> bool:
            try:
                async with asyncio.timeout(seconds):
                    while True:
                        answered.extend(await connection.some())
            except (Cut, ConnectionError):
                return True
            except TimeoutError:
                return False

        is_refused_at_once = each.kind in AT_ONCE
        if not await closes_within(ANSWER_SECONDS if is_refused_at_once else QUIET_SECONDS):
            if is_refused_at_once:
                return f"it is broken already, and was not refused in {ANSWER_SECONDS:g} s"
            connection.finish()
            if not await closes_within(ANSWER_SECONDS):
                return f"the connection is still open {ANSWER_SECONDS:g} s after its end"
        seen = self._worker.pop(name_of(self.seed, each.number))
        self.reached += len(seen)
        if TOO_LONG in each.data and b"HTTP/1.1 100 " in answered:
            return "the body is asked for, although it is too long"
        for status, fields in _RESPONSE.findall(answered):
            self.statuses[int(status)] += 1
            if int(status) >= 500 and b"x-mock: answer" not in fields:
                return f"a {int(status)} of the gateway's own"
            if status == b"408":
                return "a 408, although nobody was slow"
            if b"HTTP/1.1" not in each.data and b"transfer-encoding" in fields.lower():
                return "chunks, although no HTTP/1.1 was spoken"
            if status == b"200" and is_refused_at_once:
                return "it is broken, and was answered with 200"
        if any(it.target.startswith(SMUGGLED) for it in seen) and each.verdict == REFUSED:
            return "the request hidden inside reached the worker"
        if seen and each.verdict == REFUSED:
            return f"it is ambiguous, and reached the worker: {seen[0].method!r} {seen[0].target!r} {seen[0].body!r}"
        return ""

    async def left_behind(self) -> list[str]:
        """What is wrong with the gateway when all is over."""
        wrongs = [f"the worker got what is no request ({it.why}): {it.data[:300]!r}" for it in self._worker.malformed]
        if self._gateway.process.poll() is not None:
            return [*wrongs, f"the gateway has ended with {self._gateway.process.returncode}"]
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                connection = await Connection.open(self._gateway)
                await connection.send(request("POST", "/v1/chat/completions", {"x-mock-id": "last"}, _CHAT))
                response = await connection.response()
                connection.close()
        except (OSError, TimeoutError, Cut) as error:
            return [*wrongs, f"the gateway no longer serves: {type(error).__name__}"]
        if response is None or response.status != 200:
            wrongs.append(f"the gateway no longer serves: {response}")
        return wrongs + bad_lines(self._gateway, 0)[:SHOWN]


async def fuzz(servers: Servers, seed: int, seconds: float, only: Sequence[int] | None = None) -> Run:
    """Send cases to a gateway before a raw worker until time is up, or `only` those with these numbers."""
    numbers = iter(only) if only else itertools.count()
    until = time.monotonic() + seconds
    async with RawWorker() as worker:
        run = Run(await started(servers.gateway(worker, flags=GATEWAY_FLAGS)), worker, seed)

        async def send_some() -> None:
            for number in numbers:
                if time.monotonic() > until and not only:
                    return
                await run.send(number)

        await asyncio.gather(*(send_some() for _ in range(8)))
        run.wrongs += await run.left_behind()
    second, last = run.means
    if second and last > second + GROWTH_BYTES:
        run.wrongs.append(f"resident memory grew from {second / 2**20:.0f} to {last / 2**20:.0f} MiB")
    return run


def render(run: Run) -> str:
    """What was sent, what came back, and how to repeat what failed."""
    kinds, statuses = (
        ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) for counts in (run.kinds, run.statuses)
    )
    lines = [
        f"seed {run.seed}: {run.kinds.total()} cases ({kinds})",
        f"  {run.reached} requests reached the worker; answers: {statuses}",
        f"  memory (resident) {run.means[0] / 2**20:.0f} MiB, then {run.means[1] / 2**20:.0f} MiB",
    ]
    for it, why in run.failures[:SHOWN]:
        lines.append(f"  case {it.number} ({it.kind}, {len(it.data)} bytes): {why}")
        lines.append(f"    python -m tests.bench.fuzz --seed {run.seed} --case {it.number}")
        lines.append(f"    {it.data[:400]!r}")
    if len(run.failures) > SHOWN:
        lines.append(f"  and {len(run.failures) - SHOWN} more cases")
    return "\n".join([*lines, *(f"  {wrong}" for wrong in run.wrongs)])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.fuzz", description="broken requests on the gateway's sockets"
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1, help="of the stream of cases")
    parser.add_argument("--case", type=int, action="append", help="only the case with this number (repeat)")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="seamark-fuzz-"))
    with Servers(folder) as servers:
        result = asyncio.run(fuzz(servers, args.seed, args.seconds, args.case))
    print(render(result))
    if not result.held:
        narrator()(f"logs are in {folder}")
    return 0 if result.held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
