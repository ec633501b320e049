from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from npufleet_pod.errors import InvalidRequestError, ModelError
from npufleet_pod.tokenizer import TextTokenizer, load_tokenizer
from support.tiny_model import build_tokenizer

TOKENIZER = TextTokenizer(build_tokenizer())


@given(st.text(st.characters(codec="utf-8")))
def test_text_comes_back_and_never_has_fewer_tokens_than_the_bound(text: str) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(tokens, False) == text
    assert len(tokens) >= TOKENIZER.fewest_tokens(text)


def test_lone_surrogates_are_the_clients_mistake() -> None:
    with pytest.raises(InvalidRequestError, match="surrogates"):
        TOKENIZER.encode("a\ud800", add_special_tokens=False)


def test_ids_beyond_the_vocabulary_decode_to_nothing() -> None:
    assert TOKENIZER.decode([TOKENIZER.vocab_size + 5], False) == ""
    assert TOKENIZER.piece(TOKENIZER.vocab_size + 5) is None


@pytest.mark.parametrize("content", ["", "{}", "[1]", "\x00\xff"])
def test_a_bad_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer.json: not a tokenizer .*: copy the file again"):
        load_tokenizer(tmp_path)


@given(st.text(st.characters(codec="utf-8")))
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(text: str) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    assert b"".join(TOKENIZER.token_bytes(token) or b"?" for token in tokens) == text.encode()


def test_pieces_of_sentencepiece_vocabularies_stand_for_spaces_and_single_bytes() -> None:
    pieces = ["<unk>", "▁the", "re", "<0xE2>", "<s>"]
    raw = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    raw.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer = TextTokenizer(raw)
    assert [tokenizer.token_bytes(index) for index in range(1, 6)] == [b" the", b"re", b"\xe2", b"<s>", None]
    assert [tokenizer.is_special(index) for index in range(1, 6)] == [False, False, False, True, False]
    assert tokenizer.token_id("▁the") == 1


@given(st.text(st.characters(codec="utf-8")))
def test_offsets_are_where_tokens_begin(text: str) -> None:
    offsets, position = TOKENIZER.offsets(text), 0
    for offset, token in zip(offsets, TOKENIZER.encode(text, add_special_tokens=True), strict=True):
        assert offset == len(text.encode()[:position].decode(errors="ignore"))
        position += len(TOKENIZER.token_bytes(token) or b"")
