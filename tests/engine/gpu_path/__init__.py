"""The path of a GPU, as far as a CPU can run it: vLLM's Triton kernels in Triton's interpreter."""
