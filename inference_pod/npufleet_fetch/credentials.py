"""Credentials: files of a mounted Secret, read when they are needed, never passed on by environment or arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from npufleet_fetch.errors import SourceUnauthorizedError

MAX_BYTES = 16384
TOKEN_KEYS = ("token", "HF_TOKEN", "MODELSCOPE_API_TOKEN")
ACCESS_KEYS = ("accessKeyId", "AWS_ACCESS_KEY_ID", "access-key-id")
SECRET_KEYS = ("secretAccessKey", "AWS_SECRET_ACCESS_KEY", "secret-access-key")
SESSION_KEYS = ("sessionToken", "AWS_SESSION_TOKEN", "session-token")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Keys of an object store. They do not show in a representation."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


def read_token(folder: Path, *, expected: bool) -> str:
    """A hub's token; empty where none is asked for. Raises SourceUnauthorizedError where one is expected and missing."""
    return _needed(folder, TOKEN_KEYS) if expected else ""


def read_keys(folder: Path, *, expected: bool) -> KeyPair | None:
    """Keys of an object store; None where none are asked for. Raises SourceUnauthorizedError where they are expected and missing."""
    if not expected:
        return None
    return KeyPair(_needed(folder, ACCESS_KEYS), _needed(folder, SECRET_KEYS), _first(folder, SESSION_KEYS))


def _needed(folder: Path, names: tuple[str, ...]) -> str:
    value = _first(folder, names)
    if not value:
        raise SourceUnauthorizedError(
            f"model.secretRef: the Secret is missing, or has no entry {names[0]}: create it in the model's namespace with that entry"
        )
    return value


def _first(folder: Path, names: tuple[str, ...]) -> str:
    for name in names:
        try:
            with (folder / name).open("rb") as file:
                text = file.read(MAX_BYTES).decode(errors="strict").strip()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise SourceUnauthorizedError(f"model.secretRef: entry {name} cannot be read: write it as plain text") from error
        if text and text.isprintable():
            return text
    return ""
