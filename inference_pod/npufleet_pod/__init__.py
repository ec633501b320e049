"""The inference pod's engine container: models, engine, OpenAI server."""
