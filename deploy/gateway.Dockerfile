# The gateway and nothing else: `proxy` and its few dependencies on a slim Python, no torch, no vLLM, no root.
# docker build -f deploy/gateway.Dockerfile --build-arg SEAMARK_COMMIT=$(git rev-parse HEAD) -t seamark-gateway .
# From a released wheel in deploy/wheels, not from the source: --build-arg 'SEAMARK=vllm-seamark[tracing]==0.4.0'
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
# Empty unless given; then pip's own defaults hold.
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG SEAMARK=.[tracing]
# A part of the version while in development, as in `seamark --version`; without it there is none.
ARG SEAMARK_COMMIT
RUN python3 -m venv /opt/seamark
WORKDIR /src
# Wheels in that folder are taken before any index is asked. If all are there, the build needs no network.
COPY deploy/wheels /wheels
COPY requirements.lock pyproject.toml setup.py README.md LICENSE ./
COPY proxy proxy
# The tested versions of what the gateway needs.
RUN /opt/seamark/bin/pip install --no-cache-dir --find-links /wheels --constraint requirements.lock "${SEAMARK}" \
    && /opt/seamark/bin/pip uninstall --yes --quiet pip

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/seamark /opt/seamark
# The container runs on a read-only file system.
ENV PATH=/opt/seamark/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 8080 8081
ENTRYPOINT ["seamark"]
CMD ["serve"]
