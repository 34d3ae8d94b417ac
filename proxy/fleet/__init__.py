"""The workers: which are up, what they say of themselves, their warm-up, and whether their answers are right."""
