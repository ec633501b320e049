"""Counts tokens in a stream of server-sent events as it passes, without parsing JSON."""

from __future__ import annotations

import re

CONTENT = re.compile(rb'"(?:content|text|reasoning_content|reasoning|refusal|arguments)":\s*"(?!")')
"""A non-empty string under a key that carries generated text. Inside a JSON string every quote is escaped, so text cannot forge it."""
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*([0-9]{1,9})')
PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*([0-9]{1,9})')
ERROR = re.compile(rb'^data:\s*\{\s*"(?:error"|object":\s*"error")', re.MULTILINE)
"""An event in which an engine reports a failure of its own: {"error": …}, or vLLM's older {"object": "error", …}."""
MAX_USAGE_BYTES = 4096
"""`usage` stands at the end of an answer."""
MAX_LINE_BYTES = 64 * 1024
"""A longer line is counted as one token: what is kept of an unfinished line is bounded."""


class TokenCounter:
    """Fed with the chunks of one response. Times are those of the caller's clock, in seconds."""

    __slots__ = ("_tail", "done", "events", "failed", "first_token_time", "last_token_time", "prompt_tokens", "usage_tokens")

    def __init__(self) -> None:
        self._tail = b""
        self.events = 0
        """Data events with generated text."""
        self.usage_tokens: int | None = None
        """completion_tokens of the last event that told them."""
        self.prompt_tokens: int | None = None
        """prompt_tokens of the same event."""
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.done = False
        """Whether `[DONE]` has passed."""
        self.failed = False
        """Whether the engine reported an error in the stream."""

    @property
    def tokens(self) -> int:
        """Generated tokens: as the engine counted them, else one for each data event with text."""
        return self.usage_tokens if self.usage_tokens is not None and self.usage_tokens >= self.events else self.events

    @property
    def at_boundary(self) -> bool:
        """Whether the stream stands between two lines, so that an event of our own would be read as one."""
        return not self._tail

    def read_usage(self, body: bytes) -> None:
        """Take the usage of an answer that is not a stream; text in the answer cannot forge it, since quotes in it are escaped."""
        end = body[-MAX_USAGE_BYTES:]
        if (found := COMPLETION_TOKENS.search(end)) is not None:
            self.usage_tokens = int(found.group(1))
        if (prompt := PROMPT_TOKENS.search(end)) is not None:
            self.prompt_tokens = int(prompt.group(1))

    def feed(self, chunk: bytes, now: float) -> None:
        """Count what `chunk` completes."""
        if self._tail:
            chunk = self._tail + chunk
            self._tail = b""
        end = chunk.rfind(b"\n") + 1
        if end != len(chunk):
            self._tail = chunk[end:]
            chunk = chunk[:end]
            if len(self._tail) > MAX_LINE_BYTES:
                chunk += self._tail
                self._tail = b""
        if chunk.startswith(b"data:") and chunk.find(b"\n") >= len(chunk) - 2:
            self._line(chunk, now)
        else:
            for line in chunk.split(b"\n"):
                if line.startswith(b"data:"):
                    self._line(line, now)

    def _line(self, line: bytes, now: float) -> None:
        if CONTENT.search(line) is not None:
            self.events += 1
            if self.first_token_time is None:
                self.first_token_time = now
            self.last_token_time = now
        elif b"data: [DONE]" in line or b"data:[DONE]" in line:
            self.done = True
        elif ERROR.search(line) is not None:
            self.failed = True
        if b'"completion_tokens"' in line and (found := COMPLETION_TOKENS.search(line)) is not None:
            self.usage_tokens = int(found.group(1))
            if (prompt := PROMPT_TOKENS.search(line)) is not None:
                self.prompt_tokens = int(prompt.group(1))
