"""Model folders without weights for vLLM's render server: a tokenizer that cuts text as today's models do.

Two of them for a set of chat templates: one knows the templates' markers as special tokens, one sees plain text, where
markers can merge with what stands around them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx

from proxy.bench.harness.servers import free_port

VOCABULARY = 4096

START_SECONDS = 420.0

MARKERS = re.compile(r"<[|｜]?[A-Za-z][\w▁｜|/.-]{0,40}[|｜]?>|<｜[^｜<>]{1,40}｜>|\[/?[A-Z_]{3,20}\]")

# As in GPT-4's and Qwen's tokenizers: digits one by one, runs of line breaks together.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def markers_in(templates: Iterable[str]) -> list[str]:
    """What looks like a control token in chat templates."""
    return sorted({marker for template in templates for marker in MARKERS.findall(template)})


def write_render_model(out: Path, config: Path, markers: Iterable[str]) -> Path:
    """A folder with the model config `config` and a tokenizer whose special tokens are `markers`."""
    from pydoc_data.topics import topics

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<s>", "</s>", *markers]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(dict.fromkeys(special)),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # With line breaks and markup in it, so that "\n\n", ">(" and the like become tokens of their own.
    texts = [topics[name] for name in sorted(topics)] + ['])} ")> :) ?> <| |> ><\n\n\n\n  \n' * 200]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    out.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(out)
    shutil.copy(config, out / "config.json")
    return out


@contextlib.contextmanager
def render_server(model: Path) -> Iterator[str]:
    """vLLM's render server for `model`, which takes a chat template with each request; its address."""
    port = free_port()
    command = [sys.executable, "-m", "tests.harness.launch_render", "--model", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--enable-scale-out", "--served-model-name", "m"]
    command += ["--trust-request-chat-template", "--max-model-len", "200000"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    more = {"SEAMARK_ENGINE": "0", "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    with tempfile.TemporaryFile() as log:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(command, **pipes, env={**os.environ, **more})
        try:
            url = f"http://127.0.0.1:{port}"
            deadline, is_up = time.monotonic() + START_SECONDS, False
            while not is_up:
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"no render server: {log.read().decode(errors='replace')[-2000:]}")
                with contextlib.suppress(httpx.HTTPError):
                    is_up = httpx.get(url + "/health", timeout=2).status_code == 200
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait()
