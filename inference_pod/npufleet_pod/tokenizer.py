"""The model's tokenizer. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from npufleet_pod.errors import InvalidRequestError, ModelError, one_line

TOKENIZER_FILE = "tokenizer.json"


class TextTokenizer:
    """Text to token ids and back. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._longest_piece = max((len(piece) for piece in tokenizer.get_vocab()), default=1)

    @property
    def vocab_size(self) -> int:
        """Ids in use, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Raises InvalidRequestError for text that is not Unicode (lone surrogates)."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeError, TypeError) as error:
            raise InvalidRequestError("the text holds lone surrogates: send valid Unicode", "prompt") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token; None if there is no such token."""
        return self._tokenizer.id_to_token(token_id)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the tokens in `text`, found without encoding it: no token spells more than the longest piece."""
        return len(text) // self._longest_piece


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
