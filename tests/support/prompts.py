"""Prompts whose beginnings are shared by some, with ends at and beside the edges of blocks."""

from __future__ import annotations

import random

COUNT = 24
_random = random.Random(4)  # noqa: S311 - prompts of a test


def _tokens(count: int) -> list[int]:
    return [_random.randrange(3, 270) for _ in range(count)]


SYSTEM, TURN = _tokens(70), _tokens(33)
PROMPTS = [
    SYSTEM + _tokens(5),
    SYSTEM + _tokens(1),
    SYSTEM + TURN + _tokens(9),
    SYSTEM + TURN,
    SYSTEM[:48],
    _tokens(1),
    _tokens(130),
    _tokens(16),
]
