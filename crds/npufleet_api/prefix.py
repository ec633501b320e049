"""Prefix hashes: names of the beginnings of a prompt, so that whoever routes, caches or reports can speak of one without its text.

A prompt is taken as bytes (`prompt_bytes`) and cut at fixed offsets (`cuts`). The hash at a cut covers everything before it, the model, the
adapter and the salt: equal hashes mean, but for a chance of 2**-64 per pair, equal prefixes of the same scope. A hash is a hint where KV
may lie, never a proof: the engine's cache compares contents.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache

FIRST_CUTS = 16
FIRST_CUT_BYTES = 1024
"""About 256 tokens of English or Chinese text."""
GROWTH_SHIFT = 3
"""Beyond the first cuts each is an eighth further than the one before: a shared prefix is named to within 1/9 of its length by few hashes.
"""
MAX_PREFIX_BYTES = 256 * 1024
"""What lies behind is not hashed: two prompts that share so much are one place's."""
HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """Whose prefix it is: equal bytes under another model, adapter or salt share no KV. `model` is namespace/name."""

    model: str
    adapter: str = ""
    salt: str = ""


@cache
def cuts() -> tuple[int, ...]:
    """Offsets in bytes, ascending, at which prompts are cut."""
    offsets = [FIRST_CUT_BYTES * (n + 1) for n in range(FIRST_CUTS)]
    while (following := offsets[-1] + (offsets[-1] >> GROWTH_SHIFT)) <= MAX_PREFIX_BYTES:
        offsets.append(following)
    return tuple(offsets)


def prefix_hashes(scope: PrefixScope, prompt: bytes) -> tuple[int, ...]:
    """The hash at each cut that `prompt` reaches: integers of 64 bits, the shortest prefix first."""
    running = hashlib.sha256(_scope_key(scope))
    view = memoryview(prompt)
    found = []
    start = 0
    for end in cuts():
        if end > len(prompt):
            break
        running.update(view[start:end])
        found.append(int.from_bytes(running.copy().digest()[:HASH_BYTES], "big"))
        start = end
    return tuple(found)


def prompt_bytes(messages: object = None, prompt: object = None, tools: object = None) -> bytes:
    """The bytes of a request's prompt, up to about MAX_PREFIX_BYTES: the fields `messages`, `prompt` and `tools` as a JSON parser gives
    them.

    Tools stand first, as chat templates put them. A message is its role, its text and whatever else it has as JSON with sorted keys. Of a
    batch of prompts the first counts. What has none of these shapes is taken as JSON: nothing is refused here.
    """
    parts: list[bytes] = [_json(tools)] if tools else []
    if isinstance(messages, list):
        size = 0
        for message in messages:
            before = len(parts)
            _add_message(parts, message)
            size += sum(map(len, parts[before:]))
            if size >= MAX_PREFIX_BYTES:
                break
    elif messages is not None:
        parts.append(_json(messages))
    elif prompt is not None:
        parts.append(_plain(prompt))
    return b"".join(parts)


def _plain(prompt: object) -> bytes:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _text(prompt)
    return " ".join(map(str, prompt[: MAX_PREFIX_BYTES // 4])).encode("utf-8", "replace") if isinstance(prompt, list) else _json(prompt)


def _add_message(parts: list[bytes], message: object) -> None:
    if not isinstance(message, dict):
        parts.append(_json(message))
        return
    content = message.get("content")
    if isinstance(content, str):
        parts.append(_text(f"\x1e{message.get('role')}\x1f{content}"))
    else:
        parts.append(_text(f"\x1e{message.get('role')}"))
        for item in content if isinstance(content, list) else ():
            text = item.get("text") if isinstance(item, dict) else None
            parts.append(_text(f"\x1f{text}") if isinstance(text, str) else _json(item))
    if len(message) > 2:
        parts.append(_json({key: value for key, value in message.items() if key not in ("role", "content")}))


def _text(text: str) -> bytes:
    return (text if len(text) <= MAX_PREFIX_BYTES else text[:MAX_PREFIX_BYTES]).encode("utf-8", "replace")


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _scope_key(scope: PrefixScope) -> bytes:
    """Fields are length-prefixed: no adapter's name equals a salt."""
    fields = (scope.model.encode("utf-8", "replace"), scope.adapter.encode("utf-8", "replace"), scope.salt.encode("utf-8", "replace"))
    return b"npufleet-prefix" + b"".join(len(field).to_bytes(4, "big") + field for field in fields)
