.PHONY: demo test test-fast test-all lint mutants test-deploy soak fuzz attacks damage bench-gateway audit lock test-gpu-path test-drafts test-nixl test-ray test-clients test-chart

# Real engines with a generated model, the gateway in front, a table. `make demo ARGS=--keep` serves on afterwards.
demo:
	@./set-up.sh
	@.venv/bin/seamark bench demo $(ARGS)

# Style, rooms and types.
lint:
	@./set-up.sh
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/lint-imports
	@.venv/bin/mypy

# On every save: what needs no vLLM. `make test-fast ARGS="-k finder"` for a part.
test-fast: lint
	@./set-up.sh tests
	@.venv/bin/python -m pytest -n 2 tests/gateway tests/unit $(ARGS)

# The whole suite, in two processes: tests of the shared engines in one, all others in the other.
test: lint
	@./set-up.sh tests
	@.venv/bin/python -m pytest -n 2 $(ARGS)

# The same and what takes long: before a change is sent, its rooms' part of it (`make test-all ARGS=tests/engine/drafts`;
# tests/README.md says which). All of it before a release.
test-all: lint
	@./set-up.sh tests
	@.venv/bin/python -m pytest -n 2 -m "not on_request" $(ARGS)

# Which of 300 planted mistakes the tests notice, in less than an hour; where a room is rewritten, its own, before and after (`--than`: the same mistakes again):
# `make mutants ARGS="--only proxy/routing --tests tests/unit/routing --count 40 --out before.json"`, then `--than before.json`.
mutants:
	@./set-up.sh tests
	@.venv/bin/python -m tests.bench.mutants $(ARGS)

# What of a GPU's path takes minutes on a CPU: the kernels of more versions and dtypes in Triton's interpreter, model
# runner V2, vLLM 0.33 as an engine. Fetches two wheels (some 700 MB) into .cache once.
test-gpu-path:
	@./set-up.sh
	@.venv/bin/python -m pytest -n 2 -m "on_request or thorough or not thorough" tests/engine/gpu_path $(ARGS)

# Engines that draft tokens: both families, vLLM 0.33 as an engine, and the recipes' flags. Fetches a wheel (some 400 MB) into .cache once.
test-drafts:
	@./set-up.sh
	@.venv/bin/python -m pytest -n 2 -m "on_request or thorough or not thorough" tests/engine/drafts tests/recipes $(ARGS)

# Prefill and decode apart: two engines that hand states over, behind the gateway. Fetches NIXL (some 70 MB) into .cache once.
test-nixl:
	@./set-up.sh
	@.venv/bin/python -m pytest -n 0 -s -m on_request tests/engine/test_prefill_workers.py $(ARGS)

# Engines whose workers Ray starts, a Ray of this machine that believes to have GPUs. Fetches it (some 75 MB) into .cache once.
test-ray:
	@./set-up.sh
	@.venv/bin/python -m pytest -n 0 -s -m on_request tests/engine/test_ray.py $(ARGS)

# The clients of deploy/clients.md, the real programs before a scripted worker. Installs them into .cache once (npm, pip;
# some 10 GB, most of it Open WebUI's: without it, ARGS='-k "not open-webui"').
test-clients:
	@./set-up.sh tests
	@.venv/bin/python -m pytest -m on_request -s tests/gateway/test_clients.py $(ARGS)

# The chart's custom resources by their authors' definitions, as npm has them (some 35 MB into .cache once).
test-chart:
	@./set-up.sh tests
	@.venv/bin/python -m pytest -m on_request tests/gateway/test_deploy_helm.py $(ARGS)

# The images of deploy/ built and its stack up on a CPU, in a container engine of its own (Debian, root; no registry).
test-deploy:
	@./set-up.sh
	@.venv/bin/python -m tests.deploy

# Random traffic on real engines for half an hour; `make soak ARGS="--minutes 2"` for less. `make test` has 120 events of it.
soak:
	@./set-up.sh
	@.venv/bin/python -m tests.bench.soak $(ARGS)

# The gateway beside those of others, installed from the package index: `make bench-gateway ARGS="--rounds 9"`.
bench-gateway:
	@./set-up.sh
	@.venv/bin/python -m tests.bench.gateway_cost $(ARGS)

# Broken HTTP and broken bodies on the gateway's sockets for ten minutes; `make fuzz ARGS="--seed 2 --seconds 60"`.
fuzz:
	@./set-up.sh
	@.venv/bin/python -m tests.bench.fuzz $(ARGS)

# Honest streams beside attackers at full speed for half an hour; `make attacks ARGS="--seconds 120"`.
attacks:
	@./set-up.sh
	@.venv/bin/python -m tests.bench.attacks $(ARGS)

# A checkpoint directory damaged in every way, and two workers on one, on vLLM's scheduler.
damage:
	@./set-up.sh
	@.venv/bin/python -m pytest -n 0 -s -m "on_request or thorough or not thorough" -k disk tests/engine/unit/test_disk_tier.py tests/engine/test_scheduler.py $(ARGS)

# Known vulnerabilities of the locked versions. Needs pipx and the network.
audit:
	@pipx run pip-audit --requirement requirements.lock

# Resolve requirements.lock again. Needs uv; UV_FIND_LINKS or UV_INDEX must lead to torch's CPU build.
lock:
	uv pip compile --universal --python-version 3.11 --all-extras --no-annotate --no-header \
		--upgrade pyproject.toml -o requirements.lock
