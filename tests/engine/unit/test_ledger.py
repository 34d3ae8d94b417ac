"""All patches or none, once, and only if vLLM looks as expected. Each case patches a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from engine_patches.commands.worker import main
from tests.harness.versions import source_of

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


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "SEAMARK_ENGINE"}


@pytest.fixture(scope="module")
def begin() -> Iterator[Callable[..., str]]:
    """What code prints in a fork with `SEAMARK_ENGINE=mode` that has got as far as `FRONT_END` on a platform."""
    command = [sys.executable, "-c", FORKING, BEGINNING]
    variables = {**ENVIRONMENT, "VLLM_PLUGINS": "none"}
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def run_in_fork(platform: str, code: str, mode: str | None = None) -> str:
            whole = f"PLATFORM = {platform!r}\n" + FRONT_END + PRELUDE + code
            print(json.dumps([mode, whole]), file=process.stdin, flush=True)
            output, error = json.loads(process.stdout.readline())
            assert error is None, error
            return output

        yield run_in_fork
        process.stdin.close()


def test_switched_off_nothing_of_vllm_is_even_imported():
    code = "import sys; plugin.register(); print(ledger.patches_live(), 'vllm' in sys.modules, log.getvalue())"
    command = [sys.executable, "-c", PRELUDE + code]
    done = subprocess.run(command, env={**ENVIRONMENT, "SEAMARK_ENGINE": "0"}, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr


@pytest.mark.parametrize(
    ("mode", "wanted", "told"),
    [
        ("1", "True", "True True True 1"),
        ("2", "False", "False True False 1"),
        ("reference", "patch.role is ledger.PatchRole.CURE", "False True True 0"),
    ],
)
def test_a_mode_decides_which_patches_are_applied_and_one_line_says_if_checkpoints_are(begin, mode, wanted, told):
    code = f"""
wanted = [patch.name for patch in applicable() if {wanted}]
plugin.register()
print(ledger.patches_live(), replaced() == wanted, len(wanted) > 9, len(log.getvalue().splitlines()))
"""
    assert begin("cpu", code, mode).split() == told.split()


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
from inspect import signature
wanted = applicable()
plugin.register(); plugin.register()
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
    assert names.count(patch.name) == 1, (patch.name, names)
    assert signature(ledger.resolve(patch.target).value) == signature(function), patch.name
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


CHECK = """
import sys
from engine_patches.__main__ import main
status = main(["patches", "--check", *sys.argv[1:]])
assert not {"torch", "vllm", "numpy"} & sys.modules.keys()
sys.exit(status)
"""


@pytest.mark.parametrize(("version", "platform"), [("0.33.0", "gpu"), ("0.33.0", "cpu"), (None, "gpu"), (None, None)])
def test_a_supported_vllm_fits_on_either_platform_and_what_it_is_built_for_is_known(version, platform):
    """What an image would answer, without loading a model or even torch."""
    path = os.pathsep.join([*([str(source_of(version))] if version else []), os.getcwd()])
    command = [sys.executable, "-c", CHECK, *[platform] * bool(platform)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    shown = (platform or "cpu").upper()
    assert line.startswith(f"vLLM {version or ''}") and f"({shown}): all " in line and line.endswith("fit")


@pytest.mark.parametrize("spelt", [["--port", "{}"], ["--port=1", "--port={}"], ["--config", "{}"]])
def test_a_port_that_is_taken_is_named_with_what_holds_it(monkeypatch, capsys, tmp_path, spelt):
    from vllm.entrypoints.cli import main as cli

    monkeypatch.setattr(cli, "importlib", cli.importlib)
    monkeypatch.setattr(sys, "argv", ["python"])
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        monkeypatch.setattr(cli, "main", lambda: socket.create_server(("127.0.0.1", int(port))))
        (tmp_path / "vllm.yaml").write_text(f"port: {port}\n")
        value = tmp_path / "vllm.yaml" if spelt[0] == "--config" else port
        assert main(["m", *(part.format(value) for part in spelt)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"seamark worker: port {port} is held by process {os.getpid()} (")


@pytest.mark.thorough  # so it is here
def test_a_model_that_cannot_be_had_costs_a_line():
    command = [sys.executable, "-m", "proxy.cli", "worker", "nobody/has-this-model"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "seamark worker: the model is neither here nor to be had: " in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
