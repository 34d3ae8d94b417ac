"""Seamark's engine half: a vLLM plugin that keeps recurrent states exactly where the gateway asks for them.

It never decides an answer: a hint only adds places where a state is kept, and vLLM itself finds them again by the
hashes of the real tokens.
"""
