"""Fakes, servers and clients that tests and benchmarks share."""
