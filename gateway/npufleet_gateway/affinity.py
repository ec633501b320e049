"""Where a key belongs, so that all gateways agree without talking: rendezvous hashing over pod UIDs (Thaler and Ravishankar, 1998), with
bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016): a key's place is the first in its own order of the replicas whose load is under
the bound. A replica that comes or goes moves only the keys that belong to it. Pure.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import lru_cache

MASK = (1 << 64) - 1


@lru_cache(maxsize=16_384)
def seed_of(pod_uid: str) -> int:
    """64 bits that stand for a pod, the same in every process."""
    return int.from_bytes(hashlib.sha256(pod_uid.encode()).digest()[:8], "big")


def key_of(*parts: str) -> int:
    """64 bits that stand for a session of a model, the same in every process."""
    text = b"".join(len(part).to_bytes(4, "big") + part.encode("utf-8", "replace") for part in parts)
    return int.from_bytes(hashlib.sha256(b"npufleet-session" + text).digest()[:8], "big")


def weight(key: int, pod_uid: str) -> int:
    """How much `key` belongs to a pod: the greatest weight is its home. The mixer is Murmur3's finaliser on key and pod."""
    mixed = (key ^ seed_of(pod_uid)) & MASK
    mixed = ((mixed ^ (mixed >> 33)) * 0xFF51AFD7ED558CCD) & MASK
    mixed = ((mixed ^ (mixed >> 33)) * 0xC4CEB9FE1A85EC53) & MASK
    return mixed ^ (mixed >> 33)


def home(key: int, pod_uids: Iterable[str]) -> str | None:
    """The pod to which `key` belongs; None without pods."""
    return max(pod_uids, key=lambda uid: (weight(key, uid), uid), default=None)


def load_bound(mean: float, balance: float) -> float:
    """The most requests that a replica may hold for a key's sake: `balance` (1 + epsilon) times the mean, plus two standard deviations of a
    count that is merely random.

    Without the latter a small mean makes every fluctuation look like a hot spot: at 6 requests per replica, chance alone passes 1.25 times
    the mean all the time.
    """
    return balance * mean + 2 * math.sqrt(mean)
