"""What elastic scaling wants of one model."""

from __future__ import annotations

from dataclasses import dataclass

from npufleet_api.conditions import Reason
from npufleet_api.model import AttainedAt, ScalingStatus
from npufleet_operator.core.autoscale.worth import Worth


@dataclass(frozen=True, slots=True)
class Target:
    """Replicas that a model shall have, as far as the pool grants them."""

    base: int
    """Replicas that it was granted before."""
    wanted: int
    least: int
    """Never fewer than this, whatever is missing."""
    reason: Reason
    message: str
    status: ScalingStatus
    """With everything but what depends on the grant."""
    elastic: bool = True
    worth: Worth | None = None
    """What a replica more or fewer is worth to clients, where that is known."""
    known: tuple[AttainedAt, ...] = ()
    """What clients get now from the replicas that there are, and got from other numbers: remembered when the number changes."""
    settled: bool = False
    """No replica comes or goes."""
    rests: bool = False
    """Settled, the cooldown is over, and there are more replicas than there must be."""

    def granted(self, running: int, victims: int) -> int:
        """Replicas that the model is granted, of which `running` are there or start now. What was granted once is taken by a decision
        only (a falling load, a reclaim), never by a shortage."""
        if not self.elastic:
            return self.wanted
        return max(self.least, min(self.wanted, max(self.base, running)) - victims)
