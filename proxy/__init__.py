"""Seamark's gateway: an OpenAI-compatible proxy that knows where the shared part of a chat ends."""
