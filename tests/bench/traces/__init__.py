"""`python -m tests.bench.traces`: a trace replayed on a simulated fleet, Seamark's choice of workers beside others'."""
