"""Developers' benchmarks and long runs: `python -m tests.bench` lists them."""
