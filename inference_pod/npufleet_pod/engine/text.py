"""Turns generated tokens into text as they come: whole characters only, and no part of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from npufleet_pod.engine.request import PlacedLogprobs, TokenLogprobs

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 16
"""A character has at most 4 bytes, each at most one token; beyond this the model writes invalid UTF-8 and waiting does not help."""


class IncrementalDetokenizer:
    """Decodes a growing list of tokens. What it has given out never changes.

    A token's text depends on its neighbours (leading spaces, characters split over tokens), so a window of two pieces is decoded:
    the new text is what the window has beyond its first piece.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._prefix_start = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        """Text that the token completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        prefix, text = self._window()
        held = len(self._ids) - self._read
        if len(text) <= len(prefix) or (text.endswith(REPLACEMENT) and held < MAX_HELD_TOKENS):
            return ""
        return self._take(prefix, text)

    def flush(self) -> str:
        """What is still held back, incomplete characters replaced."""
        if self._read == len(self._ids):
            return ""
        return self._take(*self._window())

    def _window(self) -> tuple[str, str]:
        window = self._ids[self._prefix_start :]
        return self._decode(window[: self._read - self._prefix_start]), self._decode(window)

    def _take(self, prefix: str, text: str) -> str:
        # Only the last piece is needed as context again.
        self._ids = self._ids[self._read :]
        self._prefix_start, self._read = 0, len(self._ids)
        return text[len(prefix) :]


class StopStringMatcher:
    """Finds stop strings wherever they begin, and holds back text that may become one."""

    def __init__(self, stop_strings: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stop_strings)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to send, the stop string that was completed or None). After a match nothing more is pushed."""
        if not self._stops:
            return text, None
        pending = self._held + text
        matches = [(end, -len(stop), stop) for stop in self._stops if (end := _end_of(pending, stop)) >= 0]
        if matches:
            end, negative_length, stop = min(matches)
            self._held = ""
            return pending[: end if self._include else end + negative_length], stop
        keep = max(_overlap(pending, stop) for stop in self._stops)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def flush(self) -> str:
        """What was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held


class AnswerText:
    """The text of one answer as its tokens come, and the log probabilities of the tokens whose text was given out."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str] = (), include_stop_string: bool = False) -> None:
        self._detokenizer = IncrementalDetokenizer(decode)
        self._matcher = StopStringMatcher(stop_strings, include_stop_string)
        self._decoded = 0
        self._sent = 0
        self._ended = False
        self._entries: deque[PlacedLogprobs] = deque()

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None, *, match: bool = True) -> tuple[str, str | None]:
        """(text to send, the stop string that was completed or None), after which nothing more is pushed.

        match: whether the token's text may end the answer; once it may, so may that of all later tokens.
        """
        if logprobs is not None:
            self._entries.append(PlacedLogprobs(self._decoded, logprobs))
        return self._give(self._detokenizer.push(token_id), match)

    def finish(self) -> tuple[str, str | None]:
        """What was held back, at the answer's end; a stop string that it completes still counts."""
        text, matched = self._give(self._detokenizer.flush(), True)
        if matched is None:
            held = self._matcher.flush()
            self._sent += len(held)
            self._ended = True
            text += held
        return text, matched

    def take_logprobs(self) -> tuple[PlacedLogprobs, ...]:
        """Those of tokens whose text has begun to be given out since the last call; at the end, of all that no stop string cut off."""
        taken = []
        while self._entries and (self._ended or self._entries[0].text_offset < self._sent):
            taken.append(self._entries.popleft())
        return tuple(taken)

    def _give(self, text: str, match: bool) -> tuple[str, str | None]:
        self._decoded += len(text)
        matched = None
        if match:
            text, matched = self._matcher.push(text)
        self._sent += len(text)
        return text, matched


def _end_of(text: str, stop: str) -> int:
    start = text.find(stop)
    return -1 if start < 0 else start + len(stop)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
