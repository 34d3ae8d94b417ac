"""The recipes that hybrids are run by, one a file, and what Seamark does with each on vLLM as it is released."""
