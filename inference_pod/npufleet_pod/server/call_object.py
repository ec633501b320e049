"""Reads one call, `{"name": …, "arguments": {…}}`, as its characters come, so that its arguments can be passed on before they end."""

from __future__ import annotations

import json
from enum import Enum, auto

ARGUMENT_KEYS = ("arguments", "parameters")
SPACE = " \t\r\n"


class _State(Enum):
    OPEN = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    AFTER = auto()
    COMPLETE = auto()
    BROKEN = auto()


class CallObject:
    """Follows the outer object's members; what stands inside a value is only followed to its end."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.raw = ""
        """All that was read."""
        self._state = _State.OPEN
        self._key = ""
        self._value = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments = ""
        self._had_arguments = False

    @property
    def complete(self) -> bool:
        """Whether the object is closed."""
        return self._state is _State.COMPLETE

    @property
    def broken(self) -> bool:
        """Whether this is no call."""
        return self._state is _State.BROKEN

    def push(self, text: str) -> int:
        """Read `text` as far as it belongs to the object; returns how many characters do. One that breaks it does not."""
        for place, character in enumerate(text):
            if self.complete or self.broken:
                return place
            self._read(character)
            if self.broken:
                return place
            self.raw += character
        return len(text)

    def take_arguments(self) -> str:
        """The arguments' text since the last call; nothing before the name is known."""
        if self.name is None:
            return ""
        taken, self._arguments = self._arguments, ""
        return taken

    def _read(self, character: str) -> None:
        match self._state:
            case _State.IN_VALUE:
                self._read_value(character)
            case _State.IN_KEY:
                self._key += character
                if self._ends_string(character):
                    self._key = _string(self._key) or ""
                    self._state = _State.COLON
            case _ if character in SPACE:
                pass
            case _State.OPEN:
                self._state = _State.KEY if character == "{" else _State.BROKEN
            case _State.KEY if character == '"':
                self._key, self._in_string, self._state = character, True, _State.IN_KEY
            case _State.COLON if character == ":":
                self._state = _State.VALUE
            case _State.VALUE:
                self._begin_value(character)
            case _State.AFTER if character == ",":
                self._state = _State.KEY
            case _State.AFTER if character == "}":
                self._close()
            case _:
                self._state = _State.BROKEN

    def _begin_value(self, character: str) -> None:
        if character in ",:}]":
            self._state = _State.BROKEN
            return
        self._value, self._depth, self._in_string, self._escaped = "", 0, False, False
        self._state = _State.IN_VALUE
        self._read_value(character)

    def _read_value(self, character: str) -> None:
        scalar = self._depth == 0 and not self._in_string and bool(self._value)
        if scalar and character in ",}" + SPACE:
            self._end_value()
            self._read(character)
            return
        self._value += character
        if self._streams:
            self._arguments += character
        if self._in_string:
            if self._ends_string(character) and self._depth == 0:
                self._end_value()
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()

    @property
    def _streams(self) -> bool:
        """Whether the value is an object of arguments, which is passed on as it comes."""
        return self._key in ARGUMENT_KEYS and not self._had_arguments and self._value[:1] == "{"

    def _end_value(self) -> None:
        self._state = _State.AFTER
        if self._key == "name" and self.name is None:
            self.name = _string(self._value) or None
            if self.name is None:
                self._state = _State.BROKEN
        elif self._key in ARGUMENT_KEYS and not self._had_arguments:
            if not self._streams:
                # Some models write the arguments as a string that holds JSON; none at all are an empty object.
                self._arguments += _string(self._value) or ("{}" if self._value == "null" else self._value)
            self._had_arguments = True

    def _close(self) -> None:
        self._state = _State.BROKEN if self.name is None else _State.COMPLETE
        if self.complete and not self._had_arguments:
            self._arguments = "{}"

    def _ends_string(self, character: str) -> bool:
        """Follow a character inside a string; whether it ends it."""
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return True
        return False


def _string(raw: str) -> str | None:
    """The value of a JSON string; None if it is none."""
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
