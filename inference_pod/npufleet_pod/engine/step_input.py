"""A step as every tensor-parallel rank gets it: small, picklable, and enough to compute it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from npufleet_pod.engine.memory.layout import Transfer
from npufleet_pod.models.fusion_plan import FusionPlan


@dataclass(frozen=True, slots=True)
class StepInput:
    """N sequences with T new tokens, which lie end to end."""

    transfers: tuple[Transfer, ...]
    """To be done before anything is computed, in order."""
    token_ids: NDArray[np.int64]
    """(T,); a negative one is known only when the step before has been sampled."""
    counts: tuple[int, ...]
    """New tokens of each sequence."""
    starts: tuple[int, ...]
    """Position of each sequence's first new token."""
    prompt_lengths: tuple[int, ...] | None
    """Of each sequence, where the model's rotation depends on it."""
    pages: NDArray[np.int32]
    """Pages of all sequences, end to end."""
    page_counts: tuple[int, ...]
    """Pages of each sequence."""
    sample_rows: tuple[int, ...]
    """Rows of the T whose logits are wanted."""
    plan: FusionPlan
