"""The trial of hints beside drafts: the process that has the engine asks itself."""
