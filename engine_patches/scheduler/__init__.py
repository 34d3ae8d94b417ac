"""What runs in the scheduler of vLLM's engine core: where states are kept, found, evicted and counted."""
