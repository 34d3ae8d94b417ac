"""Seamark's vLLM plugin: recurrent states are kept exactly where the gateway asks for them. It never decides an answer:
a hint only adds places where a state is kept, and vLLM finds states by the hashes of the real tokens."""
