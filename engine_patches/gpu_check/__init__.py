"""`seamark gpu-check`: exactness, hits and forward passes of this machine's vLLM, on tiny models."""
