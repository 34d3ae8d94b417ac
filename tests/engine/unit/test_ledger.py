"""All patches or none, once, and only if vLLM looks as expected. Each case patches a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

PRELUDE = """
import io, logging
logging.getLogger("vllm.seamark").setLevel(logging.INFO)
logging.getLogger("vllm.seamark").addHandler(logging.StreamHandler(log := io.StringIO()))
from engine_patches import ledger, plugin

def applicable():
    # for this vLLM and platform; asked before any is applied
    from engine_patches.patches import PATCHES
    return [patch for patch in PATCHES if patch.is_for(ledger.platform_here())]

def replaced():
    from engine_patches.patches import PATCHES
    return [patch.name for patch in PATCHES if ledger.is_applied(patch)]
"""

# All that is patched.
WHOLE = """
from tests.harness.image_libraries import sitecustomize
from engine_patches import ledger
from engine_patches.patches import PATCHES
for patch in PATCHES:
    if patch.is_for(ledger.platform_here()):
        ledger.resolve(patch.target)
"""

# What a process of vLLM has imported before it loads plugins.
BEGINNING = """
import torch, vllm, vllm.platforms, vllm.plugins
vllm.platforms.current_platform
"""

# Importing vLLM takes longer than what the cases do with it, so that is done once and each case runs in a fork.
FORKING = """
import contextlib, gc, io, json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
exec(sys.argv[1])
gc.freeze()
for line in sys.stdin:
    mode, code = json.loads(line)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.environ.update({} if mode is None else {"SEAMARK_ENGINE": mode})
        error = None
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                exec(code, {"__name__": "__main__"})
            except BaseException:
                error = traceback.format_exc()
        os.write(writing, json.dumps([out.getvalue(), error]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        print(pipe.read(), file=answers, flush=True)
    os.waitpid(child, 0)
os._exit(0)  # taking all that was imported apart takes seconds
"""

Run = Callable[..., str]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "SEAMARK_ENGINE"}


@contextlib.contextmanager
def forks(imported: str, **variables: str) -> Iterator[Run]:
    """Runs code in a process of its own with `SEAMARK_ENGINE=mode`, which has imported so much; what it prints."""
    command = [sys.executable, "-c", FORKING, imported]
    settings = {**environment(), **variables}
    with subprocess.Popen(command, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def run_in_fork(code: str, mode: str | None = None) -> str:
            print(json.dumps([mode, code]), file=process.stdin, flush=True)
            output, error = json.loads(process.stdout.readline())
            assert error is None, error
            return output

        yield run_in_fork
        process.stdin.close()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """What `code` prints in a fork that has imported all that is patched."""
    with forks(WHOLE) as in_fork:
        yield lambda code, mode=None: in_fork(PRELUDE + code, mode)


@pytest.fixture(scope="module")
def begin() -> Iterator[Run]:
    """What `code` prints in a fork that has got as far as `FRONT_END` on a platform."""
    with forks(BEGINNING, VLLM_PLUGINS="none") as in_fork:
        yield lambda platform, code: in_fork(f"PLATFORM = {platform!r}\n" + FRONT_END + PRELUDE + code)


def test_switched_off_nothing_of_vllm_is_even_imported():
    code = "import sys; plugin.register(); print(ledger.patches_live(), 'vllm' in sys.modules, log.getvalue())"
    command = [sys.executable, "-c", PRELUDE + code]
    done = subprocess.run(command, env={**environment(), "SEAMARK_ENGINE": "0"}, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_an_unknown_mode_leaves_vllm_untouched_with_one_line(run):
    out = run("plugin.register(); print(ledger.patches_live(), replaced(), len(log.getvalue().splitlines()))", "2")
    assert out.split() == ["False", "[]", "1"]


def test_as_reference_only_the_cures_are_applied(run):
    out = run(
        """
cures = [patch.name for patch in applicable() if patch.role is ledger.PatchRole.CURE]
plugin.register()
print(ledger.patches_live(), replaced() == cures, len(cures))
""",
        "reference",
    )
    assert out.split() == ["False", "True", "13"]


def test_loaded_twice_every_patch_is_applied_once(run):
    out = run(
        """
patches = applicable()
plugin.register(); plugin.register()
names = []
for target in {patch.target for patch in patches}:
    function = ledger.resolve(target).value
    while hasattr(function, ledger.MARK):
        names.append(getattr(function, ledger.NAME))
        function = getattr(function, ledger.MARK)
print(ledger.patches_live(), len(replaced()) == len(patches), len(names) > len(patches))
print(len(log.getvalue().splitlines()))
"""
    )
    assert out.split() == ["True", "True", "False", "1"]


@pytest.mark.parametrize("how", ["del target.owner.schedule", "target.owner.schedule = lambda something_else: None"])
def test_an_imported_function_of_another_shape_or_that_is_gone_leaves_vllm_untouched_with_one_line(run, how):
    """Each function in turn, by its source: `test_whichever_source_differs_vllm_stays_untouched_with_one_line`."""
    out = run(
        f"""
(patch,) = {{patch.target for patch in applicable() if patch.target.endswith(":Scheduler.schedule")}}
target = ledger.resolve(patch)
{how}
plugin.register()
(line,) = log.getvalue().splitlines()
assert "Scheduler.schedule" in line and "untouched" in line, line
print(replaced(), ledger.patches_live())
"""
    )
    assert out.split() == ["[]", "False"]


def test_another_list_of_free_blocks_leaves_vllm_untouched(run):
    out = run(
        """
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
FreeKVCacheBlockQueue.__init__ = lambda self, blocks: None
plugin.register()
print(replaced(), "FreeKVCacheBlockQueue.__init__" in log.getvalue())
"""
    )
    assert out.split() == ["[]", "True"]


def test_a_failure_while_applying_takes_everything_back(run):
    out = run(
        """
import dataclasses
patches = applicable()
def fails(original):
    raise RuntimeError("planned")
broken = [*patches[:-1], dataclasses.replace(patches[-1], build=fails)]
try:
    ledger.apply(broken)
except RuntimeError:
    print(replaced())
"""
    )
    assert out.split() == ["[]"]


def test_a_model_without_a_kv_cache_is_served_as_before(run):
    out = run(
        """
from vllm.pooling_params import PoolingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request
plugin.register()
lengths = dict(max_model_len=100, max_in_flight_tokens=100, scheduler_block_size=16, hash_block_size=16)
config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
manager = KVCacheManager(config, enable_caching=False, log_stats=True, **lengths)
manager.record_prefix_cache_stats(Request("r", [1, 2, 3], None, PoolingParams()), 0)
print(ledger.patches_live())
"""
    )
    assert out.split() == ["True"]


# Where the plugin comes to: a CUDA that must not be started, and a search for modules of vLLM that finds none.
# `PLATFORM` is what vLLM believes to run on.
FRONT_END = """
import sys, types
import torch, vllm
on_cpu = PLATFORM == "cpu"
if not on_cpu:
    vllm.platforms.current_platform = types.SimpleNamespace(
        is_cpu=lambda: False, is_cuda=lambda: True, is_cuda_alike=lambda: True
    )
assert vllm.platforms.current_platform.is_cpu() is on_cpu

def started(*args, **kwargs):
    raise AssertionError("CUDA was started")

names = {"_cuda_init", *(name for name in dir(torch._C) if name.startswith("_cuda_"))}
for name in names:
    setattr(torch._C, name, started)
torch.cuda._lazy_init = started

class NoModules:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("vllm", "triton", "transformers"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, NoModules())
before = set(sys.modules)
"""


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_process_that_runs_no_model_imports_nothing_of_vllm_and_starts_no_cuda(begin, platform):
    out = begin(
        platform,
        """
wanted = [patch.name for patch in applicable()]
plugin.register()
new = {name for name in set(sys.modules) - before if not name.startswith("engine_patches")}
print(ledger.patches_live(), replaced() == wanted, len(wanted) > 30)
print(len([name for name in new if "vllm" in name or "triton" in name]), len(log.getvalue().splitlines()))
""",
    )
    assert out.split() == ["True", "True", "True", "0", "1"]


def test_each_module_is_patched_when_it_is_imported_and_functions_taken_from_it_by_name_are_the_patched_ones(begin):
    out = begin(
        "cpu",
        """
wanted = applicable()
plugin.register()
del sys.meta_path[[type(finder).__name__ for finder in sys.meta_path].index("NoModules")]
assert "vllm.model_executor.layers.mamba.mamba_mixer2" not in sys.modules
from tests.harness.image_libraries import sitecustomize
import vllm.v1.worker.gpu_model_runner as runner, vllm.v1.worker.utils as utils, vllm.v1.engine.core as core
import vllm.v1.core.kv_cache_utils as cache
print(hasattr(runner.copy_kv_cache_blocks_inplace, ledger.MARK))
print(runner.copy_kv_cache_blocks_inplace is utils.copy_kv_cache_blocks_inplace)
print(core.resolve_kv_cache_block_sizes is cache.resolve_kv_cache_block_sizes)
for patch in wanted:
    function = ledger.resolve(patch.target).value
    names = []
    while hasattr(function, ledger.MARK):
        names.append(getattr(function, ledger.NAME))
        function = getattr(function, ledger.MARK)
    assert patch.name in names, patch.name
print(ledger.patches_live(), log.getvalue().splitlines())
""",
    )
    assert out.split()[:4] == ["True"] * 4 and "untouched" not in out


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_whichever_source_differs_vllm_stays_untouched_with_one_line(begin, platform):
    """Each shape and each recurrent core in turn is not found in the source, before anything is imported."""
    out = begin(
        platform,
        """
import dataclasses
from functools import cache
from engine_patches import module_source, patches
from engine_patches.families import INSIDE
read = module_source.definitions = cache(module_source.definitions)  # vLLM's files stay as they are
wanted, whole = applicable(), patches.PATCHES

def stays_untouched(function):
    plugin.register()
    (line,) = log.getvalue().splitlines()
    log.truncate(0); log.seek(0)
    assert replaced() == [] and not ledger.patches_live(), function
    assert function in line and "untouched" in line, line

for number, patch in enumerate(whole):
    if patch in wanted:
        changed = dataclasses.replace(patch, mentions=(*patch.mentions, "a word that is not there"))
        patches.PATCHES = (*whole[:number], changed, *whole[number + 1 :])
        stays_untouched(patch.target)
patches.PATCHES = whole
for layer in INSIDE:
    gone = f"{layer.name}.{layer.core}"
    module_source.definitions = lambda module, attributes: [] if attributes == gone else read(module, attributes)
    stays_untouched(gone)
module_source.definitions = read
plugin.register()
print(ledger.patches_live(), len(replaced()) == len(wanted), len(INSIDE) > 8)
""",
    )
    assert out.split() == ["True", "True", "True"]
