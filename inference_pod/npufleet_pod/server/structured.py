"""What a client may demand of an answer's form: OpenAI's response_format, and vLLM's guided_* and structured_outputs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from npufleet_pod.errors import InvalidRequestError
from npufleet_pod.server.body import Body

MAX_GRAMMAR_BYTES = 256 * 1024
"""Of a schema, expression or grammar as it was sent."""

GrammarText = Annotated[str, StringConstraints(min_length=1)]
Choices = Annotated[list[Annotated[str, StringConstraints(min_length=1)]], Field(min_length=1)]


class GrammarKind(StrEnum):
    """The languages in which a form can be described."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A form that an answer has to have. choice: a JSON list of strings; grammar: Lark or GBNF."""

    kind: GrammarKind
    text: str
    param: str
    """The field that described it, for messages; not a part of what it means."""


class NamedSchema(Body):
    """OpenAI's json_schema."""

    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None


class ResponseFormat(Body):
    """OpenAI's response_format."""

    type: Annotated[str, StringConstraints(max_length=64)]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """vLLM's structured_outputs: one of these."""

    json_: Annotated[Any, Field(alias="json")] = None
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    structural_tag: Any = None


class StructuredFields(Body):
    """The fields of a request that describe its answer's form."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None

    def grammar_source(self) -> GrammarSource | None:
        """The form asked for; None: any. Raises InvalidRequestError for several, and for one that is too long or of no known kind."""
        found = [*_response_format(self.response_format), *self._guided(), *_structured_outputs(self.structured_outputs)]
        if len(found) > 1:
            names = ", ".join(one.param for one in found)
            raise InvalidRequestError(f"the answer's form is given {len(found)} times, by {names}: keep one of them", found[-1].param)
        if not found:
            return None
        size = len(found[0].text.encode(errors="surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(f"{found[0].param} takes {size} bytes, the limit is {MAX_GRAMMAR_BYTES}: shorten it", found[0].param)
        return found[0]

    def _guided(self) -> list[GrammarSource]:
        found = []
        if self.guided_json is not None:
            found.append(_schema(self.guided_json, "guided_json"))
        if self.guided_regex is not None:
            found.append(GrammarSource(GrammarKind.REGEX, self.guided_regex, "guided_regex"))
        if self.guided_choice is not None:
            found.append(GrammarSource(GrammarKind.CHOICE, json.dumps(self.guided_choice), "guided_choice"))
        if self.guided_grammar is not None:
            found.append(GrammarSource(GrammarKind.GRAMMAR, self.guided_grammar, "guided_grammar"))
        return found


def _response_format(asked: ResponseFormat | None) -> list[GrammarSource]:
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [_schema({"type": "object"}, "response_format")]
    if asked.type == "json_schema":
        if asked.json_schema is None or asked.json_schema.schema_ is None:
            raise InvalidRequestError("response_format of type json_schema needs json_schema.schema: add it", "response_format")
        return [_schema(asked.json_schema.schema_, "response_format")]
    raise InvalidRequestError(
        f"response_format {asked.type!r} is not supported: use text, json_object or json_schema, or structured_outputs", "response_format"
    )


def _structured_outputs(asked: StructuredOutputs | None) -> list[GrammarSource]:
    if asked is None:
        return []
    name = "structured_outputs"
    if asked.structural_tag is not None:
        raise InvalidRequestError("structured_outputs.structural_tag is not supported: use grammar", name)
    found = []
    if asked.json_ is not None:
        found.append(_schema(asked.json_, name))
    if asked.json_object:
        found.append(_schema({"type": "object"}, name))
    if asked.regex is not None:
        found.append(GrammarSource(GrammarKind.REGEX, asked.regex, name))
    if asked.choice is not None:
        found.append(GrammarSource(GrammarKind.CHOICE, json.dumps(asked.choice), name))
    if asked.grammar is not None:
        found.append(GrammarSource(GrammarKind.GRAMMAR, asked.grammar, name))
    return found


def _schema(schema: Any, param: str) -> GrammarSource:
    """A schema, which vLLM also takes as a string."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return GrammarSource(GrammarKind.JSON_SCHEMA, text, param)
