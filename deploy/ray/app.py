"""Ray Serve LLM with Seamark: `serve run app:build model=MODEL`, in this folder. The engine's arguments are yours."""

from __future__ import annotations

import os
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.llm import LLMConfig, build_openai_app


def build(arguments: dict[str, Any]) -> Any:
    """The application. Arguments: `model`, a name or folder; `name`, what clients call it; `replicas`; `router`."""
    model, unit = arguments["model"], int(arguments.get("match_unit", 16))
    deployment: dict[str, Any] = {"num_replicas": int(arguments.get("replicas", 1)), "max_ongoing_requests": 64}
    if str(arguments.get("router", "true")) == "true":
        deployment["request_router_config"] = RequestRouterConfig(
            request_router_class="seamark_router:SeamarkRouter",
            request_router_kwargs={"tokenizer": model, "match_unit": unit},
        )
    engine: dict[str, Any] = {
        "enable_prefix_caching": True,
        "prefix_match_unit": unit,  # as `seamark worker` sets it
        "enable_prompt_tokens_details": True,  # usage says what came from the cache
    }
    options: dict[str, Any] = {}
    if os.environ.get("SEAMARK_RAY_CPU") == "1":
        engine |= {"dtype": "float32", "max_model_len": 8192, "max_num_seqs": 8, "enforce_eager": True}
        options["accelerator_config"] = {"kind": "cpu"}
    names = ("PYTHONPATH", "HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
    config = LLMConfig(
        model_loading_config={"model_id": arguments.get("name", model), "model_source": model},
        deployment_config=deployment,
        engine_kwargs=engine,
        runtime_env={"env_vars": {name: os.environ[name] for name in names if name in os.environ}},
        **options,
    )
    return build_openai_app({"llm_configs": [config]})
