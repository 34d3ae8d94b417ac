"""`python -m tests.bench.traces`: a trace replayed on a simulated fleet, Seamark's choice of workers beside others'.

It takes no engine: it tells which policy suits some traffic, and how many workers that takes.
"""
