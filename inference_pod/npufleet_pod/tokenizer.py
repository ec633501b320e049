"""The model's tokenizer. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from npufleet_pod.errors import InvalidRequestError, ModelError, one_line

TOKENIZER_FILE = "tokenizer.json"
WORD_MARK = "\u2581"
"""What SentencePiece writes for a space."""
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Character to byte, as byte-level BPE writes bytes (GPT-2, `encoder.py`, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + index): byte for index, byte in enumerate(others)}}


BYTE_ALPHABET = _byte_alphabet()


class TextTokenizer:
    """Text to token ids and back. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._longest_piece = max((len(piece) for piece in tokenizer.get_vocab()), default=1)
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._special = frozenset(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        decoders = list(_decoders(tokenizer))
        self._byte_level = any(one["type"] == "ByteLevel" for one in decoders)
        self._byte_fallback = any(one["type"] == "ByteFallback" for one in decoders)

    @property
    def vocab_size(self) -> int:
        """Ids in use, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Raises InvalidRequestError for text that is not Unicode (lone surrogates)."""
        return self._encode(text, add_special_tokens).ids

    def offsets(self, text: str) -> list[int]:
        """The character of `text` at which each token begins that `encode` makes of it with special tokens."""
        return [start for start, _ in self._encode(text, True).offsets]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token; None if there is no such token."""
        return self._tokenizer.id_to_token(token_id)

    def token_id(self, piece: str) -> int | None:
        """The id of a token by the vocabulary's spelling; None if there is no such token."""
        return self._tokenizer.token_to_id(piece)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of text where special tokens are."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes | None:
        """What the token stands for, possibly a part of a character; None if there is no such token."""
        piece = self._added.get(token_id)
        if piece is not None:
            return piece.encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return None
        if self._byte_level and all(character in BYTE_ALPHABET for character in piece):
            return bytes(BYTE_ALPHABET[character] for character in piece)
        if self._byte_fallback and (match := BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace(WORD_MARK, " ").encode()

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the tokens in `text`, found without encoding it: no token spells more than the longest piece."""
        return len(text) // self._longest_piece

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeError, TypeError) as error:
            raise InvalidRequestError("the text holds lone surrogates: send valid Unicode", "prompt") from error


def load_tokenizer(model_dir: Path) -> TextTokenizer:
    """Read tokenizer.json of `model_dir`. Raises ModelError."""
    path = model_dir / TOKENIZER_FILE
    if not path.exists():
        raise ModelError(f"{path}: no such file: copy the model's {TOKENIZER_FILE} into {model_dir}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path}: not a tokenizer ({one_line(str(error))[:200]}): copy the file again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextTokenizer(tokenizer)


def _decoders(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """The parts of the tokenizer's decoder, as tokenizer.json describes them."""
    if tokenizer.decoder is not None:
        state = json.loads(tokenizer.decoder.__getstate__())
        yield from state.get("decoders", [state])
