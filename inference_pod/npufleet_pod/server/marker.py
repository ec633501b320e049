"""Finds marks such as `<tool_call>` in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def find_first(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """(place, mark) of the first of `marks` in `text`."""
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(found, default=None)


def held_from(text: str, marks: Sequence[str], space: str = "") -> int:
    """Where the end of `text` begins that may turn out to be a mark: what is before is certain.

    space: characters that are held too, where they stand before what is held or at the end.
    """
    place = len(text) - max((_overlap(text, mark) for mark in marks), default=0)
    return len(text[:place].rstrip(space)) if space else place


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` with which `mark` begins, without being the whole of it."""
    return next((length for length in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-length:])), 0)
