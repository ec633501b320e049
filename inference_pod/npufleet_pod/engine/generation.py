"""What a client of the engine holds while its requests are served. Lives on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

from npufleet_pod.engine.request import GenerationFailed, Output, TokenOutput


class Generation:
    """The answers to one or more requests, as they come. Leaving the context cancels whatever has not ended."""

    def __init__(self, cancel: Callable[[Iterable[str]], None], request_ids: Sequence[str]) -> None:
        self._cancel = cancel
        self._open = set(request_ids)
        self._outputs: asyncio.Queue[tuple[int, str, Output]] = asyncio.Queue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._cancel(self._open)
        self._open.clear()

    @property
    def finished(self) -> bool:
        """Whether every request has ended."""
        return not self._open

    async def next(self) -> tuple[int, TokenOutput]:
        """(index of the request, its next token). Raises the GenerationError of a request that the engine gave up."""
        index, request_id, output = await self._outputs.get()
        if isinstance(output, GenerationFailed):
            self._open.discard(request_id)
            raise output.error
        if output.finish_reason is not None:
            self._open.discard(request_id)
        return index, output

    def deliver(self, index: int, request_id: str, output: Output) -> None:
        """Called on the event loop."""
        self._outputs.put_nowait((index, request_id, output))
