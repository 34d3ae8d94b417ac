"""Which worker gets a request: who holds which prefix, the policy, and the queue."""
