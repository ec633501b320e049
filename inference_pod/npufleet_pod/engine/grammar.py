"""Which tokens may follow in an answer that has to obey a grammar. Built on llguidance; imports no torch.

Compiling is the server's work, on threads of its own; the sampler only asks for masks, each of which the library computes within a
bound of steps.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from npufleet_pod.errors import GrammarError, InvalidRequestError, one_line

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

    def __init__(self, tokenizer_json: str, vocabulary: int, eos_token_ids: Collection[int]) -> None:
        """tokenizer_json: the content of tokenizer.json; vocabulary: columns of the logits. Raises ValueError if it is of no known kind."""
        self.size = vocabulary
        self.tokens = LLTokenizer(tokenizer_json, n_vocab=vocabulary, eos_token=sorted(eos_token_ids))


class Grammar:
    """A compiled grammar, shared by the requests that obey it. Safe to use from several threads.

    Only where tokens are chosen is the compiled form needed: a copy that went through pickle, to another rank, is without it.
    """

    def __init__(self, matcher: LLMatcher | None, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def __reduce__(self) -> tuple[type[Grammar], tuple[None, int]]:
        return Grammar, (None, self._vocabulary)

    def start(self) -> GrammarState:
        """The state of a new answer. Raises GrammarError for a copy that has no compiled form."""
        if self._matcher is None:
            raise GrammarError("the grammar was compiled in another process: this one chooses no tokens")
        return GrammarState(self._matcher.deep_copy(), self._vocabulary)


class GrammarState:
    """How far one answer has come in its grammar. Used by one thread."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> NDArray[np.bool_]:
        """(vocabulary,) whether each token may come next; at least one. Raises GrammarError if that takes too long to find out."""
        words = np.zeros((self._vocabulary + 31) // 32, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        mask: NDArray[np.bool_] = np.unpackbits(words.view(np.uint8), count=self._vocabulary, bitorder="little").view(np.bool_)
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
    return Grammar(matcher, vocabulary.size)


def _reason(error: str) -> str:
    """The library's first line; further ones repeat the grammar."""
    return one_line(error.strip().split("\n")[0])[:MAX_REASON_CHARS]
