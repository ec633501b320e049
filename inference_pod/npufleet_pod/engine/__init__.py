"""Continuous batching: the scheduler decides, the runner computes, the engine ties both to asyncio."""
