"""Time of a step, from bytes and operations: the longer of reading and computing, besides communication and starts.

After Williams et al., "Roofline" (CACM 2009), with efficiencies below the peaks. What a replica does in one step:

- operations: 2 per parameter and token, and 4 · heads · head size · layers for each pair of a token with one that it attends to;
- bytes: all weights once, and K and V of every token attended to by some sequence, once per sequence;
- tensor parallel divides both among the ranks, and adds two all-reduces a layer of the ring's cost, 2 (n − 1)/n of the activations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from npufleet_operator.simulator.constants import (
    BYTES_PER_PARAMETER,
    COLLECTIVES_PER_LAYER,
    ENGINE_START_SECONDS,
    HBM_RESERVED_BYTES,
    HBM_USABLE_SHARE,
    MATRIX_OPS_PER_LAYER,
    VECTOR_OPS_PER_LAYER,
    WEIGHT_BYTES_PER_SECOND,
    Device,
)
from npufleet_operator.simulator.shapes import Shape


@dataclass(frozen=True, slots=True)
class Work:
    """What one step computes."""

    tokens: int
    """Tokens computed: one per decoding sequence, and those of prompts."""
    pairs: float
    """Sum over these tokens of the tokens that each attends to."""
    context: float
    """Tokens whose K and V are read: the sum of the sequences' lengths."""


def decode(sequences: int, context: float) -> Work:
    """One token for each of `sequences`, which together hold `context` tokens."""
    return Work(sequences, context, context)


def prefill(start: int, tokens: int) -> Work:
    """`tokens` tokens of one prompt, of which `start` are computed already."""
    return Work(tokens, tokens * (start + (tokens + 1) / 2), start + tokens)


@dataclass(frozen=True)
class Roofline:
    """One replica: a model's shape on `npus` NPUs of one node."""

    device: Device
    shape: Shape
    npus: int

    @cached_property
    def kv_tokens(self) -> int:
        """Tokens whose K and V fit beside the weights; negative where even the weights do not fit."""
        usable = self.npus * (self.device.hbm_bytes * HBM_USABLE_SHARE - HBM_RESERVED_BYTES)
        return int((usable - self.shape.weight_bytes) // self.shape.kv_bytes_per_token)

    @cached_property
    def load_seconds(self) -> float:
        """From a started engine to one that is ready."""
        return ENGINE_START_SECONDS + self.shape.weight_bytes / WEIGHT_BYTES_PER_SECOND

    def compute_seconds(self, work: Work) -> float:
        """Time of the operations."""
        pair = 4 * self.shape.heads * self.shape.head_size * self.shape.layers
        operations = 2 * self.shape.step_parameters * work.tokens + pair * work.pairs
        return operations / (self.npus * self.device.fp16_flops * self.device.compute_efficiency)

    def memory_seconds(self, work: Work) -> float:
        """Time of the reads."""
        read = self.shape.step_parameters * BYTES_PER_PARAMETER + self.shape.kv_bytes_per_token * work.context
        return read / (self.npus * self.device.hbm_bytes_per_second * self.device.memory_efficiency)

    @cached_property
    def _fixed_seconds(self) -> float:
        d = self.device
        layer = MATRIX_OPS_PER_LAYER * d.matrix_op_seconds + VECTOR_OPS_PER_LAYER * d.vector_op_seconds
        if self.npus > 1:
            layer += COLLECTIVES_PER_LAYER * (d.collective_op_seconds + 2 * (self.npus - 1) * d.link_latency_seconds)
        return self.shape.layers * layer + d.host_step_seconds

    def communication_seconds(self, tokens: int) -> float:
        """Time of the all-reduces' bytes."""
        if self.npus == 1:
            return 0.0
        size = tokens * self.shape.hidden * BYTES_PER_PARAMETER
        share = 2 * (self.npus - 1) / self.npus
        rate = self.device.link_bytes_per_second * self.device.link_efficiency
        return self.shape.layers * COLLECTIVES_PER_LAYER * share * size / rate

    def step_seconds(self, work: Work) -> float:
        """Time of one step."""
        longer = max(self.compute_seconds(work), self.memory_seconds(work))
        return longer + self.communication_seconds(work.tokens) + self._fixed_seconds

    def tpot_seconds(self, sequences: int, input_tokens: float, output_tokens: float) -> float:
        """Time per output token in steady state, with `sequences` at work and each one's prompt computed among the others' steps."""
        step = self.step_seconds(decode(sequences, sequences * (input_tokens + output_tokens / 2)))
        prompt = self.step_seconds(prefill(0, max(1, round(input_tokens))))
        return step + sequences / max(1.0, output_tokens) * prompt

    def sequences_that_fit(self, tokens_each: float, limit: int) -> int:
        """Sequences of `tokens_each` tokens that memory holds, at most `limit`."""
        return max(0, min(limit, int(self.kv_tokens // max(1.0, tokens_each))))

    def sequences_within(self, tpot_seconds: float | None, input_tokens: float, output_tokens: float, limit: int) -> int:
        """Most sequences whose time per output token stays within `tpot_seconds`, at least 1: it grows with their number."""
        low, high = 1, max(1, self.sequences_that_fit(input_tokens + output_tokens, limit))
        if tpot_seconds is None:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if self.tpot_seconds(middle, input_tokens, output_tokens) <= tpot_seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def peak_requests_per_second(self, input_tokens: float, output_tokens: float, limit: int) -> float:
        """Requests of these lengths that the roofline allows at most: full memory, no start cost, efficiencies of 1."""
        ideal = replace(
            self.device,
            compute_efficiency=1.0,
            memory_efficiency=1.0,
            link_efficiency=1.0,
            link_latency_seconds=0.0,
            matrix_op_seconds=0.0,
            vector_op_seconds=0.0,
            collective_op_seconds=0.0,
            host_step_seconds=0.0,
        )
        peak = Roofline(ideal, self.shape, self.npus)
        sequences = max(1, self.sequences_that_fit(input_tokens + output_tokens, limit))
        return sequences / (output_tokens * peak.tpot_seconds(sequences, input_tokens, output_tokens))
