"""Compiles the forms that clients demand: on threads of its own, within bounds, and each one once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from npufleet_pod.errors import InvalidRequestError, one_line
from npufleet_pod.server.structured import GrammarKind, GrammarSource
from npufleet_pod.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from npufleet_pod.engine.grammar import Grammar, GrammarVocabulary

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 10.0
"""A form that takes longer is refused. The thread goes on for as long as the library's own bounds let it."""
THREADS = 2
MAX_CACHED = 128
SCHEMA_OPTIONS: JsonCompileOptions = {"coerce_one_of": True, "whitespace_pattern": r"[ \n\r\t]{1,32}"}
"""oneOf counts as anyOf; white space is bounded, since models that have nothing to say fill answers with it."""


class GrammarCompiler:
    """Turns sources into grammars for one model's vocabulary. Lives on the event loop."""

    def __init__(self, tokenizer: TextTokenizer, vocabulary: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._columns = vocabulary
        self._eos_token_ids = eos_token_ids
        self._executor = ThreadPoolExecutor(THREADS, "grammar")
        self._vocabulary: asyncio.Future[GrammarVocabulary | None] | None = None
        self._cache: OrderedDict[tuple[GrammarKind, str], Grammar] = OrderedDict()

    async def warm(self) -> None:
        """Make the vocabulary ready, so that the first request need not wait for it."""
        await self._ready()

    async def compile(self, source: GrammarSource) -> Grammar:
        """The grammar of `source`. Raises InvalidRequestError for one that is wrong, or cannot be compiled in time."""
        key = (source.kind, source.text)
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                vocabulary = await self._ready()
                if vocabulary is None:
                    raise InvalidRequestError("this model's tokenizer allows no structured output: leave it out", source.param)
                grammar = await asyncio.get_running_loop().run_in_executor(self._executor, _compile, source, vocabulary)
        except TimeoutError as error:
            raise InvalidRequestError(
                f"{source.param} is not compiled within {COMPILE_SECONDS:g} s: simplify it, or try again later", source.param
            ) from error
        self._cache[key] = grammar
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return grammar

    def close(self) -> None:
        """Let the threads end."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _ready(self) -> GrammarVocabulary | None:
        if self._vocabulary is None:
            self._vocabulary = asyncio.get_running_loop().run_in_executor(self._executor, self._build)
        return await asyncio.shield(self._vocabulary)

    def _build(self) -> GrammarVocabulary | None:
        try:
            from npufleet_pod.engine.grammar import GrammarVocabulary

            return GrammarVocabulary(self._tokenizer, self._columns, self._eos_token_ids)
        except (ImportError, ValueError) as error:
            # Without the library, or for a tokenizer that it does not know, everything else can still be served.
            logger.warning("no structured output", extra={"reason": one_line(str(error))})
            return None


def _compile(source: GrammarSource, vocabulary: GrammarVocabulary) -> Grammar:
    from npufleet_pod.engine.grammar import compile_grammar

    try:
        return compile_grammar(_translate(source), vocabulary)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{source.param}: {error.message}", source.param) from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{source.param}: {one_line(str(error))[:200]}: correct it", source.param) from error


def _translate(source: GrammarSource) -> str:
    """`source` in the library's own form. Raises ValueError or RecursionError."""
    from llguidance import LLMatcher, grammar_from

    match source.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(source.text, overrides=SCHEMA_OPTIONS)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(source.text)
        case GrammarKind.CHOICE:
            alternatives = " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(source.text))
            return LLMatcher.grammar_from_lark(f"start: {alternatives}")
        case GrammarKind.GRAMMAR:
            return grammar_from("gbnf", source.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(source.text)
