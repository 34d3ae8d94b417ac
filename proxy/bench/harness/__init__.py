"""What benchmarks share: servers, clients, counters, prompts, and the comparison of answers."""
