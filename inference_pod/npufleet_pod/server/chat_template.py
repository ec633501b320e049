"""Turns a conversation into a prompt with the model's own template, in a sandbox: templates come from the model's files."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, ConfigDict, ValidationError

from npufleet_pod.errors import InvalidRequestError, ModelError, describe_validation_error, one_line
from npufleet_pod.models.config import read_json

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 1024 * 1024


class _AddedToken(BaseModel):
    model_config = ConfigDict(extra="ignore")

    content: str


class _NamedTemplate(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str
    template: str


class _TokenizerConfig(BaseModel):
    model_config = ConfigDict(extra="ignore")

    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    unk_token: str | _AddedToken | None = None
    pad_token: str | _AddedToken | None = None


class ChatTemplate:
    """A compiled template with the model's special tokens."""

    def __init__(self, template: Template | None, special_tokens: Mapping[str, str], source: str = "") -> None:
        """template: None if the model has none; rendering then says so. source: what it was compiled from."""
        self.source = source
        self._template = template
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt of a conversation. Raises InvalidRequestError if the template refuses it.

        continue_final_message: the prompt ends where the last message does, whatever add_generation_prompt says.
        """
        if continue_final_message:
            return _open_end(self.render(_marked(messages), False, extra, tools))
        if self._template is None:
            raise InvalidRequestError("the model has no chat template: use /v1/completions", "messages")
        variables = {**(extra or {}), **self._special_tokens, "messages": messages, "add_generation_prompt": add_generation_prompt}
        if tools is not None:
            variables["tools"] = tools
        try:
            return self._template.render(variables)
        except TemplateError as error:
            raise InvalidRequestError(f"the model's chat template refuses these messages: {one_line(str(error))}", "messages") from error
        except Exception as error:  # a template runs arbitrary expressions on what the client sent
            reason = f"{type(error).__name__}: {one_line(str(error))}"
            raise InvalidRequestError(f"the model's chat template fails on these messages: {reason}", "messages") from error


END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""That of transformers: what becomes of its space shows whether the template strips what it is given."""


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with the end of the last one marked. Raises InvalidRequestError where that one says nothing."""
    content = str(messages[-1].get("content") or "")
    if not content.strip():
        raise InvalidRequestError("continue_final_message: the last message is empty: send its beginning", "continue_final_message")
    return [*messages[:-1], {**messages[-1], "content": content + END_MARK}]


def _open_end(text: str) -> str:
    """The prompt of `_marked` messages up to the mark, so that an answer goes on with the last one. Raises InvalidRequestError.

    As transformers does (`apply_chat_template(continue_final_message=True)`).
    """
    place = text.rfind(END_MARK.strip())
    if place < 0:
        raise InvalidRequestError(
            "continue_final_message: the prompt does not hold the last message as it is: send text that the chat template does not change",
            "continue_final_message",
        )
    return text[:place] if text.startswith(END_MARK, place) else text[:place].rstrip()


def load_chat_template(model_dir: Path) -> ChatTemplate:
    """Read chat_template.jinja, or else tokenizer_config.json, of `model_dir`. Raises ModelError."""
    config_path = model_dir / TOKENIZER_CONFIG_FILE
    try:
        config = _TokenizerConfig.model_validate(read_json(config_path)) if config_path.exists() else _TokenizerConfig()
    except ValidationError as error:
        raise ModelError(f"{config_path}: {describe_validation_error(error)}: copy the file again") from error
    special = {
        name: token if isinstance(token, str) else token.content
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (token := getattr(config, name)) is not None
    }
    source, path = _source(model_dir, config), model_dir / TEMPLATE_FILE
    if source is None:
        return ChatTemplate(None, special)
    try:
        return ChatTemplate(_environment().from_string(source), special, source)
    except TemplateError as error:
        where = path if path.exists() else config_path
        raise ModelError(f"{where}: chat_template: {one_line(str(error))}: correct the template") from error


def _source(model_dir: Path, config: _TokenizerConfig) -> str | None:
    path = model_dir / TEMPLATE_FILE
    if path.exists():
        try:
            with path.open(encoding="utf-8") as file:
                return file.read(MAX_TEMPLATE_BYTES)
        except (OSError, UnicodeError) as error:
            raise ModelError(f"{path}: {one_line(str(error))}: copy the file again") from error
    if isinstance(config.chat_template, list):
        named = {one.name: one.template for one in config.chat_template}
        return named.get("default") or next(iter(named.values()), None)
    return config.chat_template


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that the hub's templates are written for (transformers, `utils/chat_template_utils.py`)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)
