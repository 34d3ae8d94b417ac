"""`make mutants`: which planted mistakes the tests notice. A room that is rewritten has to notice as many as before.

One run of the tests says which of them run each line. Each mistake then meets those alone, its room's and the shortest
first, in a copy of the tree, in a fork of a process that has imported what is not ours. Ends with 1 if one escapes that
the file of `--than` (the `--out` of an earlier run, also of another tree) calls noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest
from coverage.numbits import num_in_numbits

from tests.bench.mutator import Mutant, draw, those_named

ROOT = Path(__file__).parents[2]
SEEDS = (20281101, 20281102, 20281103)
FAST, ENGINE = ("tests/unit", "tests/gateway"), ("tests/engine/unit",)
# Survivors that nobody can notice, judged by reading: a line each, as `Mutant` prints itself, and the reason.
EQUIVALENT = ROOT / "tests" / "data" / "equivalent_mutants.txt"

BATCH = 40  # tests in the first, quick try
TEST_SECONDS = 20  # of one test; one that took longer without a mistake is left out
SECONDS = 120  # of all tests of one mistake and tier
IMPORTED = (
    "aiohttp", "anthropic", "fastapi.testclient", "httpx", "hypothesis.stateful", "msgspec", "openai", "pytest_timeout",
    "prometheus_client", "pytest_asyncio.plugin", "redis.asyncio", "uvicorn", "xdist.plugin", "yaml",
)  # fmt: skip
VLLM = ("torch", "transformers", "vllm", "vllm.v1.core.sched.scheduler", "vllm.v1.core.kv_cache_utils")

COVERAGE = """[run]
branch = false
parallel = true
data_file = {folder}/lines
source =
    {root}/proxy
    {root}/engine_patches
context = ${{SEAMARK_TEST-}}
patch = subprocess, _exit
disable_warnings = module-not-imported, no-data-collected, module-not-measured
"""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """As a plugin of the run that looks at lines: they are this test's, those of its processes too."""
    os.environ["SEAMARK_TEST"] = item.nodeid
    began, current = time.monotonic(), coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        with open(os.environ["SEAMARK_SECONDS"], "a") as file:
            file.write(json.dumps([item.nodeid, time.monotonic() - began]) + "\n")


class Lines:
    """Which tests ran a line, and how long each took without a mistake."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows = (json.loads(line) for line in (folder / "seconds").read_text().splitlines())
        self.seconds: dict[str, float] = dict(rows)

    @classmethod
    def of_a_run(cls, folder: Path, tests: list[str]) -> Lines:
        """Run the tests once and write down what they ran. Takes twice as long as without."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "coverage.ini").write_text(COVERAGE.format(folder=folder, root=ROOT))
        environment = {**os.environ, "SEAMARK_SECONDS": str(folder / "seconds"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={folder}/coverage.ini", "-m", "pytest"]
        options = ["-p", "tests.bench.mutants", "-p", "no:cacheprovider", "-n", "2", "-q", "--tb=short"]
        done = subprocess.run([*command, *options, *tests], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            sys.exit("mutants: the tests fail without a mistake")
        combine = [sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={folder}/coverage.ini"]
        subprocess.run(combine, cwd=ROOT, check=True)
        return cls(folder)

    def covering(self, mutant: Mutant) -> set[str]:
        """The tests that run the mistake; all of the module's where the line is run by its import alone."""
        with contextlib.closing(sqlite3.connect(self.folder / "lines")) as database:
            rows = database.execute(
                "select context.context, numbits from line_bits join file on file.id = file_id"
                " join context on context.id = context_id where path = ? and context.context != ''",
                (str(ROOT / mutant.file),),
            ).fetchall()
        lines = range(mutant.line, mutant.end + 1)
        found = [context for context, bits in rows if any(num_in_numbits(line, bits) for line in lines)]
        tests = {context.split("|")[-1] for context in found or [context for context, _ in rows]}
        return tests & self.seconds.keys()

    def chosen(self, mutant: Mutant, tier: tuple[str, ...]) -> list[list[str]]:
        """Those of a tier in the order to try them, as many as SECONDS allow, in two batches."""
        part = "/engine/" if mutant.file.startswith("engine_patches") else f"/{Path(mutant.file).parent.name}/"
        ours = [test for test in self.covering(mutant) if test.startswith(tier) and self.seconds[test] < TEST_SECONDS]
        ours.sort(key=lambda test: (part not in test, self.seconds[test]))
        sums = itertools.accumulate(self.seconds[test] for test in ours)
        few = [test for test, until in zip(ours, sums, strict=True) if until < SECONDS]
        return [batch for batch in (few[:BATCH], few[BATCH:]) if batch]


class _Picked:
    """Runs these tests in this order, and says which one failed first."""

    def __init__(self, tests: list[str]) -> None:
        self.order = {test: at for at, test in enumerate(tests)}
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def _in_a_fork(work: Callable[[], str], seconds: float) -> str:
    """What `work` returns in a child of its own process group, or "slow"."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        try:
            os.write(writer, f"={work()}".encode())
        except BaseException as error:  # a mistake may raise anything, at import as well
            os.write(writer, f"=raises {type(error).__name__}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb", buffering=0) as pipe:
        answer = pipe.read(2000) if multiprocessing.connection.wait([pipe], seconds) else b"=slow"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return (answer or b"=died").decode()[1:]


def _tests_on(copy: Path, tests: list[str]) -> str:
    """The first of these tests that fails, or nothing. In the fork: what is ours is imported now."""
    os.chdir(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    os.environ["PYTHONPATH"] = str(copy)
    for name in [name for name in sys.modules if name.split(".")[0] in ("proxy", "engine_patches", "tests")]:
        del sys.modules[name]
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    picked = _Picked(tests)
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))
    options = f"-x -q --tb=no -p no:cacheprovider --timeout={3 * TEST_SECONDS} --hypothesis-profile=planted".split()
    options += ["-m", "not on_request", "--rootdir", str(copy)]
    status = pytest.main([*options, *files], plugins=[picked])
    return picked.failed or ("" if status in (0, 5) else f"exit {status}")


def _copy_of_the_tree(folder: Path) -> Path:
    """What git knows or would add, in a folder of the project's name."""
    copy = folder / ROOT.name
    listed = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    for name in (".venv", ".cache", ".git"):
        (copy / name).symlink_to((ROOT / name).resolve())
    return copy


def _judge(jobs: Any, results: Any, is_engine: bool) -> None:
    """One process: takes mistakes until none is left."""
    for name in IMPORTED + (VLLM if is_engine else ()):
        importlib.import_module(name)
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy_of_the_tree(Path(folder))
        for number, mutant, batches, seconds in iter(jobs.get, None):
            began = time.monotonic()
            results.put((number, _noticed_by(copy, mutant, batches, seconds), time.monotonic() - began))


def _noticed_by(copy: Path, mutant: Mutant, batches: list[list[str]], seconds: float) -> str:
    """The test that fails with the mistake and not without, or how the tests end with it alone; empty if none does."""

    def first_failure(tests: list[str]) -> str:
        return _in_a_fork(functools.partial(_tests_on, copy, tests), seconds)

    for batch in batches:
        left = batch
        while left:
            with _planted(copy, mutant):
                noticed = first_failure(left)
            if not noticed:
                break
            suspected = [noticed] if noticed in left else left  # what is slow or dies names no test
            if not first_failure(suspected):
                return noticed
            left = [test for test in left if test not in suspected]
    return ""


@contextlib.contextmanager
def _planted(copy: Path, mutant: Mutant) -> Iterator[None]:
    path = copy / mutant.file
    original = path.read_bytes()
    path.write_text(mutant.source)
    try:
        yield
    finally:
        path.write_bytes(original)


def judged(mutants: list[Mutant], lines: Lines, tier: tuple[str, ...], processes: int) -> list[str]:
    """The test that noticed each mistake, or nothing."""
    context = multiprocessing.get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    noticed = [""] * len(mutants)
    waiting = 0
    for number, mutant in enumerate(mutants):
        if batches := lines.chosen(mutant, tier):
            expected = sum(lines.seconds[test] for batch in batches for test in batch)
            jobs.put((number, mutant, batches, 90 + 3 * expected))
            waiting += 1
    workers = [context.Process(target=_judge, args=(jobs, results, tier == ENGINE)) for _ in range(processes)]
    for each in workers:
        jobs.put(None)
        each.start()
    for _ in range(waiting):
        number, test, seconds = results.get()
        noticed[number] = test
        print(f"{seconds:6.1f} s  {test or 'SURVIVES'}  {mutants[number]}", flush=True)
    for each in workers:
        each.join()
    return noticed


def _row(name: object, counts: Iterable[object]) -> str:
    return f"{name:>10} " + " ".join(f"{count:>12}" for count in counts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the draws (default %(default)s)")
    parser.add_argument("--count", type=int, default=100, help="mistakes of each seed (default %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATH", help="modules or rooms to draw from")
    parser.add_argument("--tests", nargs="+", default=[*FAST, *ENGINE], metavar="PATH", help="tests to look with")
    parser.add_argument("--lines", type=Path, default=ROOT / ".cache" / "mutants", help="folder of which test ran what")
    parser.add_argument("--keep-lines", action="store_true", help="take what is in that folder")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write what noticed each, as JSON")
    parser.add_argument(
        "--than", type=Path, help="an earlier --out: its mistakes instead of a draw; name what escapes and did not"
    )
    args = parser.parse_args()
    lines = Lines(args.lines) if args.keep_lines else Lines.of_a_run(args.lines, args.tests)
    before: dict[str, str] = json.loads(args.than.read_text()) if args.than else {}
    if before:
        drawn = [(0, each) for each in those_named(ROOT, before)]
        print(f"of {len(before)} earlier mistakes the tree still has {len(drawn)}")
    else:
        drawn = [(seed, each) for seed in args.seeds for each in draw(ROOT, seed, args.count, tuple(args.only))]
    mutants = [mutant for _, mutant in drawn]
    fast = judged(mutants, lines, FAST, args.processes)
    left = [at for at, test in enumerate(fast) if not test]
    vllm = dict(zip(left, judged([mutants[at] for at in left], lines, ENGINE, args.processes), strict=True))
    equivalent = set(EQUIVALENT.read_text().split("\n")[::2])

    print("\n" + _row("seed", ("mistakes", "equivalent", "fast suite", "and vLLM's", "of others")))
    for name in ("all",) if before else (*args.seeds, "all"):
        of_seed = [at for at, (seed, _) in enumerate(drawn) if name in (seed, "all")]
        noticed = [at for at in of_seed if fast[at] or vllm.get(at)]
        same = sum(str(mutants[at]) in equivalent and at not in noticed for at in of_seed)
        share = f"{len(noticed) / max(len(of_seed) - same, 1):.0%}"
        print(_row(name, (len(of_seed), same, sum(bool(fast[at]) for at in of_seed), len(noticed), share)))

    by_name = {str(mutant): fast[at] or vllm.get(at, "") for at, mutant in enumerate(mutants)}
    for name, test in by_name.items():
        if not test:
            print(f"survives{' (equivalent)' if name in equivalent else ''}: {name}")
    if args.out:
        args.out.write_text(json.dumps(by_name, indent=1))
    escaped = [name for name, test in by_name.items() if not test and before.get(name)]
    for name in escaped:
        print(f"escapes, was noticed by {before[name]}: {name}")
    sys.exit(bool(escaped))


if __name__ == "__main__":
    main()
