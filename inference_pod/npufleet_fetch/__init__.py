"""Fetches a model's files into a cache, before the engine starts. Neither torch nor the engine is imported."""
