"""What routing reads of a request: its length, its prefixes, its session, its adapter. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from npufleet_api.prefix import MAX_PREFIX_BYTES, PrefixScope, cuts, prefix_hashes, prompt_bytes
from npufleet_gateway.affinity import key_of

BYTES_PER_TOKEN = 4
"""Of English and Chinese UTF-8 text under common vocabularies; an estimate is all that routing needs."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as routing sees it. `tokens` is an estimate; `hashes` are those of `npufleet_api.prefix`."""

    tokens: int = 0
    hashes: tuple[int, ...] = ()
    session: int | None = None
    adapter: str = ""
    streams: bool = True
    """Whether its first token will be seen."""

    def tokens_to(self, depth: int) -> int:
        """Tokens before the cut of the hash number `depth`, counted from 1; 0 for depth 0."""
        return cuts()[depth - 1] // BYTES_PER_TOKEN if depth else 0

    @classmethod
    def read(
        cls,
        model: str,
        *,
        messages: object = None,
        prompt: object = None,
        tools: object = None,
        salt: str = "",
        adapter: str = "",
        session: str = "",
        body_bytes: int = 0,
        streams: bool = True,
    ) -> Prompt:
        """The prompt of a request for `model` (namespace/name), from the fields of its body as a JSON parser gives them.

        `body_bytes` is the length of the whole body: what is known of a prompt that is longer than what is hashed, or that was not read.
        """
        data = prompt_bytes(messages, prompt, tools)
        size = max(len(data), body_bytes) if len(data) >= MAX_PREFIX_BYTES or not data else len(data)
        return cls(
            tokens=max(1, size // BYTES_PER_TOKEN),
            hashes=prefix_hashes(PrefixScope(model, adapter, salt), data),
            session=key_of(model, session) if session else None,
            adapter=adapter,
            streams=streams,
        )


NO_PROMPT = Prompt()
