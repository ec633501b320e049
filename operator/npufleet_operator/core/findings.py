"""What a plan finds out about the pool as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from npufleet_operator.core.allocation import Allocation, ClassAccount
from npufleet_operator.core.capacity import Sharing
from npufleet_operator.core.ledger import Ledger
from npufleet_operator.core.observed import ModelKey


@dataclass(frozen=True, slots=True)
class Findings:
    """For the pool's status."""

    ledger: Ledger
    accounts: Mapping[str, ClassAccount]
    allocation: Allocation
    sharing: Sharing
    too_large: Mapping[ModelKey, int]
    """Models of which one replica takes more NPUs than their class is guaranteed, and how many it takes."""
    classes: Mapping[ModelKey, str]
