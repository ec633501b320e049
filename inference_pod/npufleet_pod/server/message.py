"""Turns the text of a chat's answer into a message: thoughts, text, calls of tools."""

from __future__ import annotations

from dataclasses import dataclass

from npufleet_pod.server.delta import Delta
from npufleet_pod.server.reasoning import ReasoningSplitter
from npufleet_pod.server.tool_parser import ToolParser
from npufleet_pod.server.tools import ToolFormat, ToolUse


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """What an answer may hold besides text."""

    tools: ToolUse | None = None
    tool_format: ToolFormat | None = None
    thinks: bool = False
    thoughts_begun: bool = False
    """Whether the prompt ends with the mark that begins the thoughts."""
    tells_thoughts: bool = True

    def parser(self) -> MessageParser:
        """A parser of one answer."""
        tools = None if self.tools is None or self.tool_format is None else self.tools.parser(self.tool_format)
        splitter = ReasoningSplitter(begun=self.thoughts_begun) if self.thinks else None
        return MessageParser(splitter, tools, named=self.tools is not None and self.tools.named, silent=not self.tells_thoughts)


class MessageParser:
    """Reads one answer as it comes. Pure: how the text is cut makes no difference."""

    def __init__(
        self, splitter: ReasoningSplitter | None = None, tools: ToolParser | None = None, *, named: bool = False, silent: bool = False
    ) -> None:
        """named: the client named the one function to call; OpenAI then calls the end a stop, as of text. silent: thoughts are left out."""
        self._silent = silent
        self._splitter = splitter
        self._tools = tools
        self._named = named

    @property
    def called(self) -> bool:
        """Whether the answer ends with calls that the client has to carry out."""
        return self._tools is not None and self._tools.called and not self._named

    def push(self, text: str) -> Delta:
        """What `text` makes certain."""
        return self._find_calls(Delta(text) if self._splitter is None else self._splitter.push(text))

    def finish(self) -> Delta:
        """What was held back, at the answer's end."""
        delta = self._find_calls(Delta() if self._splitter is None else self._splitter.finish())
        if self._tools is None:
            return delta
        last = self._tools.finish()
        return Delta(delta.content + last.content, delta.reasoning, delta.calls + last.calls)

    def _find_calls(self, delta: Delta) -> Delta:
        if self._silent:
            delta.reasoning = ""
        if self._tools is None or not delta.content:
            return delta
        found = self._tools.push(delta.content)
        return Delta(found.content, delta.reasoning, found.calls)
