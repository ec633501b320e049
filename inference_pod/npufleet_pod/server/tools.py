"""What a client says about tools, and the grammars that make a model call them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from npufleet_pod.errors import InvalidRequestError
from npufleet_pod.server.body import Body
from npufleet_pod.server.grammars import SCHEMA_OPTIONS
from npufleet_pod.server.structured import GrammarKind, GrammarSource
from npufleet_pod.server.tool_parser import CALL_END, CALL_START, HermesParser, LlamaParser, ToolParser

MAX_TOOLS = 512
ToolName = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[\w.:/-]+$")]


class ToolFormat(StrEnum):
    """How a family writes calls."""

    HERMES = "hermes"
    LLAMA = "llama"

    @classmethod
    def of(cls, template_source: str) -> ToolFormat | None:
        """The format that a chat template teaches; None if it has no place for tools."""
        if "tools" not in template_source:
            return None
        if CALL_START in template_source:
            return cls.HERMES
        return cls.LLAMA if '"parameters"' in template_source or "ipython" in template_source else None


class Function(Body):
    """A function that the model may call. Further fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """OpenAI's tool."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Body):
    """The function that is to be called."""

    name: str


class NamedChoice(Body):
    """OpenAI's tool_choice of one function."""

    type: Literal["function"] = "function"
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, and how the model may use them."""

    tools: Sequence[Tool]
    required: bool
    named: bool
    parallel: bool

    @classmethod
    def of(cls, tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool) -> ToolUse | None:
        """None where no tool may be called. Raises InvalidRequestError."""
        if not tools:
            if choice not in (None, "none", "auto"):
                raise InvalidRequestError("tool_choice asks for a call, but there are no tools: add tools", "tool_choice")
            return None
        names = [tool.function.name for tool in tools]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise InvalidRequestError(f"tools holds {repeated!r} more than once: rename one of them", "tools")
        if choice == "none":
            return None
        if isinstance(choice, NamedChoice):
            wanted = choice.function.name
            if wanted not in names:
                raise InvalidRequestError(f"tool_choice names {wanted!r}, which is not among tools: add it there", "tool_choice")
            return cls([tool for tool in tools if tool.function.name == wanted], True, True, False)
        return cls(tools, choice == "required", False, parallel)

    @property
    def limit(self) -> int | None:
        """Most calls of an answer."""
        return None if self.parallel else 1

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return [tool.model_dump(mode="json", exclude_unset=True) | {"type": "function"} for tool in self.tools]

    def parser(self, form: ToolFormat) -> ToolParser:
        """A parser of one answer."""
        if form is ToolFormat.HERMES:
            return HermesParser(self.limit)
        return LlamaParser(frozenset(tool.function.name for tool in self.tools), self.limit)

    def grammar_source(self, form: ToolFormat, answer: GrammarSource | None) -> GrammarSource | None:
        """What an answer has to obey: calls where they are required, calls or `answer` where they are not; None: anything.

        Raises InvalidRequestError for an answer of another kind than a JSON schema.
        """
        if not self.required and answer is None:
            return None
        if answer is not None and answer.kind is not GrammarKind.JSON_SCHEMA:
            raise InvalidRequestError(
                f"{answer.param} cannot be used together with tools: use a JSON schema, or leave one out", answer.param
            )
        rules = _call_rules([tool.function for tool in self.tools], form, self.parallel)
        if self.required or answer is None:
            return GrammarSource(GrammarKind.LARK, "\n".join(["start: calls", *rules]), "tools")
        schema = _inline(_parsed(answer))
        return GrammarSource(GrammarKind.LARK, "\n".join(["start: calls | answer", *rules, f"answer: %json {schema}"]), answer.param)


def _call_rules(functions: Sequence[Function], form: ToolFormat, parallel: bool) -> list[str]:
    """Each function's arguments are a schema of their own, so that references inside it keep their root."""
    hermes = form is ToolFormat.HERMES
    opening, closing, between = (f"{CALL_START}\n", f"\n{CALL_END}", "\n") if hermes else ("", "", "; ")
    key = "arguments" if hermes else "parameters"
    rules = [
        f"calls: call ({json.dumps(between)} call)*" if parallel else "calls: call",
        "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
    ]
    for index, function in enumerate(functions):
        head = f'{opening}{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{key}": '
        schema = _inline(function.parameters or {"type": "object", "properties": {}})
        rules.append(f"call_{index}: {_quoted(head)} args_{index} {_quoted('}' + closing)}")
        rules.append(f"args_{index}: %json {schema}")
    return rules


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _inline(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": SCHEMA_OPTIONS})


def _parsed(source: GrammarSource) -> Mapping[str, Any]:
    try:
        schema = json.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{source.param} is not JSON: correct it", source.param) from error
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{source.param} is {type(schema).__name__}, not a schema: send an object", source.param)
    return schema
