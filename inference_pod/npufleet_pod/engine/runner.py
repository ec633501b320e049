"""Runs the steps that the scheduler decides: builds the batch, computes it, samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from npufleet_pod.engine.kv_cache import GrowingKVCache
from npufleet_pod.engine.request import GenerationRequest, StopParams
from npufleet_pod.engine.sampling import forbid, new_generator, sample
from npufleet_pod.models.decoder import Decoder

WARM_UP_TOKENS = 32


@dataclass(slots=True)
class _Sequence:
    request: GenerationRequest
    tokens: list[int]
    banned: frozenset[int]
    """Tokens that end the generation, which min_tokens forbids at first."""
    generator: torch.Generator
    cache: GrowingKVCache | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)


class ModelRunner:
    """Holds the sequences' tokens and KV caches. Used by one thread."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._sequences: dict[str, _Sequence] = {}

    def add(self, request: GenerationRequest, seed: int) -> None:
        """Take a request; `seed` is used unless it brings its own."""
        chosen = request.sampling.seed if request.sampling.seed is not None else seed
        end_tokens = frozenset() if request.stop.ignore_eos else self._decoder.config.eos_token_ids
        self._sequences[request.request_id] = _Sequence(
            request, list(request.prompt_token_ids), end_tokens | request.stop.stop_token_ids, new_generator(chosen)
        )

    def remove(self, request_id: str) -> None:
        """Forget a request and free its KV; an unknown one is no error."""
        self._sequences.pop(request_id, None)

    def free_cache(self, request_ids: Iterable[str]) -> None:
        """Free the KV of requests that were preempted or ended."""
        for request_id in request_ids:
            if request_id in self._sequences:
                self._sequences[request_id].cache = None

    def execute(self, tokens: Mapping[str, int]) -> dict[str, int]:
        """Compute a step; returns the new token of each request whose tokens are now all computed."""
        sequences = [self._sequences[request_id] for request_id in tokens]
        with torch.inference_mode():
            logits = self._forward(sequences, list(tokens.values()))
            greedy = logits.argmax(-1).tolist()
            sampled: dict[str, int] = {}
            row = 0
            for request_id, sequence in zip(tokens, sequences, strict=True):
                if sequence.cache is None or sequence.cache.length < len(sequence.tokens):
                    continue
                sampled[request_id] = token = self._choose(sequence, logits[row], greedy[row])
                sequence.tokens.append(token)
                row += 1
        return sampled

    def warm_up(self) -> None:
        """Compute a prompt and a token of no request, so that the first client does not wait for what a device prepares once."""
        prompt = [0] * WARM_UP_TOKENS
        request = GenerationRequest("warm-up", tuple(prompt), StopParams(max_tokens=1))
        sequence = _Sequence(request, prompt, frozenset(), new_generator(0))
        with torch.inference_mode():
            self._forward([sequence], [WARM_UP_TOKENS])
            sequence.tokens.append(0)
            self._forward([sequence], [1])

    def _forward(self, sequences: list[_Sequence], counts: list[int]) -> torch.Tensor:
        """Logits (N, vocabulary) of the last token of each sequence that has no token left to compute, in batch order."""
        device = self._decoder.device
        token_ids: list[int] = []
        positions: list[int] = []
        caches: list[GrowingKVCache] = []
        last_rows: list[int] = []
        for sequence, count in zip(sequences, counts, strict=True):
            if sequence.cache is None:
                sequence.cache = GrowingKVCache(self._decoder.config, self._decoder.dtype, device)
            cache = sequence.cache
            cache.reserve(count)
            token_ids += sequence.tokens[cache.length : cache.length + count]
            positions += range(cache.length, cache.length + count)
            caches.append(cache)
            if cache.length + count == len(sequence.tokens):
                last_rows.append(len(token_ids) - 1)
        hidden = self._decoder.forward(torch.tensor(token_ids, device=device), torch.tensor(positions, device=device), counts, caches)
        for cache in caches:
            cache.commit()
        return self._decoder.logits(hidden[last_rows])

    def _choose(self, sequence: _Sequence, logits: torch.Tensor, greedy: int) -> int:
        params = sequence.request.sampling
        if sequence.generated < sequence.request.stop.min_tokens and sequence.banned:
            return sample(forbid(logits, sequence.banned), params, sequence.generator)
        return greedy if params.greedy else sample(logits, params, sequence.generator)
