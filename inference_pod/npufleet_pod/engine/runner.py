"""Runs the steps that the scheduler decides: builds the batch, computes it, samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from npufleet_pod.engine.kv_cache import GrowingKVCache
from npufleet_pod.engine.request import GenerationRequest, SampledToken, StopParams
from npufleet_pod.engine.sampling import Sampler
from npufleet_pod.models.decoder import Decoder

WARM_UP_TOKENS = 32


@dataclass(slots=True)
class _Sequence:
    request: GenerationRequest
    tokens: list[int]
    cache: GrowingKVCache | None = None


class ModelRunner:
    """Holds the sequences' tokens and KV caches. Used by one thread."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._sampler = Sampler(decoder.config.vocab_size)
        self._sequences: dict[str, _Sequence] = {}

    def add(self, request: GenerationRequest, seed: int) -> None:
        """Take a request; `seed` is used unless it brings its own."""
        self._sampler.add(request, seed, self._decoder.config.eos_token_ids)
        self._sequences[request.request_id] = _Sequence(request, list(request.prompt_token_ids))

    def remove(self, request_id: str) -> None:
        """Forget a request and free its KV; an unknown one is no error."""
        self._sequences.pop(request_id, None)
        self._sampler.remove(request_id)

    def free_cache(self, request_ids: Iterable[str]) -> None:
        """Free the KV of requests that were preempted or ended."""
        for request_id in request_ids:
            if request_id in self._sequences:
                self._sequences[request_id].cache = None

    def execute(self, tokens: Mapping[str, int]) -> dict[str, SampledToken]:
        """Compute a step; returns the new token of each request whose tokens are now all computed."""
        sequences = [self._sequences[request_id] for request_id in tokens]
        counts = list(tokens.values())
        with torch.inference_mode():
            hidden = self._forward(sequences, counts)
            complete: list[str] = []
            last_rows: list[int] = []
            end = 0
            for (request_id, count), sequence in zip(tokens.items(), sequences, strict=True):
                end += count
                computed = 0 if sequence.cache is None else sequence.cache.length
                self._sampler.observe_prompt(request_id, computed - count, hidden[end - count : end], self._decoder.logits)
                if computed == len(sequence.tokens):
                    complete.append(request_id)
                    last_rows.append(end - 1)
            sampled = self._sampler.sample(complete, self._decoder.logits(hidden[last_rows])) if complete else {}
        for request_id, token in sampled.items():
            self._sequences[request_id].tokens.append(token.token_id)
        return sampled

    def warm_up(self) -> None:
        """Compute a prompt and a token of no request, so that the first client does not wait for what a device prepares once."""
        prompt = [0] * WARM_UP_TOKENS
        request = GenerationRequest("warm-up", tuple(prompt), StopParams(max_tokens=1))
        sequence = _Sequence(request, prompt)
        with torch.inference_mode():
            for count in (WARM_UP_TOKENS, 1):
                self._decoder.logits(self._forward([sequence], [count])[-1:])
                sequence.tokens.append(0)

    def _forward(self, sequences: list[_Sequence], counts: list[int]) -> torch.Tensor:
        """Hidden states (T, hidden) of the sequences' new tokens, end to end in batch order; KV is stored."""
        device = self._decoder.device
        token_ids: list[int] = []
        positions: list[int] = []
        caches: list[GrowingKVCache] = []
        for sequence, count in zip(sequences, counts, strict=True):
            if sequence.cache is None:
                sequence.cache = GrowingKVCache(self._decoder.config, self._decoder.dtype, device)
            cache = sequence.cache
            cache.reserve(count)
            token_ids += sequence.tokens[cache.length : cache.length + count]
            positions += range(cache.length, cache.length + count)
            caches.append(cache)
        hidden = self._decoder.forward(torch.tensor(token_ids, device=device), torch.tensor(positions, device=device), counts, caches)
        for cache in caches:
            cache.commit()
        return hidden
