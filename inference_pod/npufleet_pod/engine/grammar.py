"""Which tokens may follow in an answer that has to obey a grammar. Built on llguidance; imports no torch.

Compiling is the server's work, on threads of its own; the sampler only asks for masks, each of which the library computes within a
bound of steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from npufleet_pod.errors import GrammarError, InvalidRequestError, one_line
from npufleet_pod.tokenizer import TextTokenizer

LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""By the library's own figures a mask takes at most some 15 ms, compiling some 20 ms, and a lexer 100 MB."""
MAX_REASON_CHARS = 200


class GrammarVocabulary:
    """The model's tokens as the library needs them. Takes about a second to build for a large vocabulary."""

    def __init__(self, tokenizer: TextTokenizer, columns: int, eos_token_ids: Collection[int]) -> None:
        """columns: of the logits; those beyond the tokenizer's vocabulary are never chosen. Raises ValueError if the library refuses it."""
        self.columns = columns
        # The library's own reading of tokenizer.json takes tokens such as <tool_call> for special ones, which no text of a grammar matches.
        size = min(tokenizer.vocab_size, columns)
        ends = sorted(token_id for token_id in eos_token_ids if token_id < size)
        self.tokens = LLTokenizer(TokenizerWrapper(_Spelling(tokenizer, size, ends)), n_vocab=size, eos_token=ends)


class _Spelling:
    """The tokenizer as the library asks for it. Ids without a token are special, so that they never come."""

    bos_token_id = None

    def __init__(self, tokenizer: TextTokenizer, size: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        spelled = [tokenizer.token_bytes(token_id) for token_id in range(size)]
        self.eos_token_id = ends[0]
        self.tokens = [one or b"" for one in spelled]
        self.special_token_ids = [token_id for token_id, one in enumerate(spelled) if not one or tokenizer.is_special(token_id)]
        self._ids = {one: token_id for token_id, one in enumerate(self.tokens) if one}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text that a grammar leaves no choice about."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        wanted = text.encode()
        if b"".join(self.tokens[token_id] for token_id in ids if token_id < len(self.tokens)) == wanted:
            return ids
        # Some tokenizers put a space before every text.
        return self._greedy(wanted)

    def _greedy(self, rest: bytes) -> list[int]:
        ids = []
        while rest:
            length = next((n for n in range(min(len(rest), self._longest), 0, -1) if rest[:n] in self._ids), None)
            if length is None:
                break
            ids.append(self._ids[rest[:length]])
            rest = rest[length:]
        return ids


class Grammar:
    """A compiled grammar, shared by the requests that obey it. Safe to use from several threads.

    Only where tokens are chosen is the compiled form needed: a copy that went through pickle, to another rank, is without it.
    """

    def __init__(self, matcher: LLMatcher | None, vocabulary: GrammarVocabulary | None) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def __reduce__(self) -> tuple[type[Grammar], tuple[None, None]]:
        return Grammar, (None, None)

    def start(self) -> GrammarState:
        """The state of a new answer. Raises GrammarError for a copy that has no compiled form."""
        if self._matcher is None or self._vocabulary is None:
            raise GrammarError("the grammar was compiled in another process: this one chooses no tokens")
        return GrammarState(self._matcher.deep_copy(), self._vocabulary)


class GrammarState:
    """How far one answer has come in its grammar. Used by one thread."""

    def __init__(self, matcher: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        self._matcher = matcher
        self._tokens = vocabulary.tokens.vocab_size
        self._columns = vocabulary.columns

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> NDArray[np.bool_]:
        """(columns,) whether each token may come next; at least one. Raises GrammarError if that takes too long to find out."""
        words = np.zeros((self._tokens + 31) // 32, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        mask = np.zeros(self._columns, dtype=np.bool_)
        mask[: self._tokens] = np.unpackbits(words.view(np.uint8), count=self._tokens, bitorder="little")
        return mask

    def accept(self, token_id: int) -> None:
        """Go on by a token that was allowed. Raises GrammarError."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed further: {_reason(self._matcher.get_error())}: simplify it")


def compile_grammar(text: str, vocabulary: GrammarVocabulary) -> Grammar:
    """Compile a grammar in the library's own form. Raises InvalidRequestError for one that is wrong, too large or allows nothing."""
    matcher = LLMatcher(vocabulary.tokens, text, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        # The first mask is the dearest, and what it needed is kept for all copies.
        matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidRequestError(f"the grammar is refused: {_reason(matcher.get_error())}: correct or simplify it")
    if matcher.is_stopped():
        raise InvalidRequestError("the grammar allows no text at all: correct it")
    return Grammar(matcher, vocabulary)


def _reason(error: str) -> str:
    """The library's first line; further ones repeat the grammar."""
    return one_line(error.strip().split("\n")[0])[:MAX_REASON_CHARS]
