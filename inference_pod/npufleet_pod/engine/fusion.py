"""Chooses, for every step, how much is computed by one operation and by which strategy each sequence attends. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npufleet_api.calibration import FULL_TOKENS, TWO_PHASE_TOKENS
from npufleet_pod.models.fusion_plan import AttentionStrategy, FusionPlan, plan_of

QUERY_BLOCK_TOKENS = 256
"""Queries whose scores two phases hold at once (`npufleet_kernels.attention`)."""
MAX_SCORE_BYTES = 256 * 2**20
"""Most memory for one sequence's scores. A strategy that would take more gives way to the next, whatever the thresholds say: a model with
many heads, or a calibration of a device with more room, must not make a step take memory that nobody counted on."""
SCORE_BYTES = 4
"""Scores are float32."""

ORDER = (AttentionStrategy.FULL, AttentionStrategy.TWO_PHASE, AttentionStrategy.BLOCKED)


@dataclass(frozen=True, slots=True)
class FusionThresholds:
    """Longest sequences, in tokens, that are computed at once and in two phases; `calibrate` measures them for a device."""

    full_tokens: int = FULL_TOKENS
    two_phase_tokens: int = TWO_PHASE_TOKENS


def score_bytes(strategy: AttentionStrategy, heads: int, new_tokens: int, length: int) -> int:
    """Memory that a strategy takes for the scores of the last `new_tokens` of `length` tokens; 0 for one that takes the same for any."""
    if strategy is AttentionStrategy.BLOCKED:
        return 0
    rows = new_tokens if strategy is AttentionStrategy.FULL else min(new_tokens, QUERY_BLOCK_TOKENS)
    return heads * rows * length * SCORE_BYTES


class DynamicFusionManager:
    """Pure: the same lengths give the same plan, on every rank. A sequence's strategy depends on no other sequence of the batch."""

    def __init__(self, level: int, heads: int, thresholds: FusionThresholds = FusionThresholds()) -> None:
        """heads: query heads of the whole model, since ranks that hold fewer must choose alike."""
        self.level = level
        self.thresholds = thresholds
        self._heads = heads

    def strategy(self, new_tokens: int, length: int) -> AttentionStrategy:
        """For a sequence of `length` tokens, the last `new_tokens` of which are computed now."""
        for strategy, longest in (
            (AttentionStrategy.FULL, self.thresholds.full_tokens),
            (AttentionStrategy.TWO_PHASE, self.thresholds.two_phase_tokens),
        ):
            if length <= longest and score_bytes(strategy, self._heads, new_tokens, length) <= MAX_SCORE_BYTES:
                return strategy
        return AttentionStrategy.BLOCKED

    def order(self, new_tokens: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], FusionPlan]:
        """Places of the sequences in the batch, those of one strategy together, so that each is called once; and the plan of that batch."""
        strategies = [self.strategy(count, length) for count, length in zip(new_tokens, lengths, strict=True)]
        places = sorted(range(len(strategies)), key=lambda index: ORDER.index(strategies[index]))
        return places, plan_of(self.level, [strategies[index] for index in places])
