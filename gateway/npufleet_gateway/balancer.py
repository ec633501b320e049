"""Which replica gets the next request. Injected clock; memory is bounded.

Left out while others are there: replicas whose breaker does not let the request through, that hold more than the bound of
`affinity.load_bound`, whose KV memory is full, and, for an adapter, those that do not have it loaded. A session that asked to stay does so
within the same bound. Of the rest the cheapest is taken (`prediction.cost_seconds`): what a replica is known to hold of the prompt need not
be computed there.

A gateway that never saw a prompt's beginning assumes, where there are other gateways, that one of them sent it to that beginning's home by
hash, and counts it as held there. The beginning meant is the shortest that is not shared by many conversations.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence

from npufleet_gateway.affinity import load_bound, weight
from npufleet_gateway.breaker import Breaker, BreakerState
from npufleet_gateway.prediction import KV_FULL_PERCENT, ReplicaFigures, Speed, Speeds, cost_seconds, known_speeds, levelled, trust
from npufleet_gateway.prefix_index import PrefixIndex
from npufleet_gateway.prompt import NO_PROMPT, Prompt
from npufleet_gateway.routing import ModelKey, Replica

ALIKE = 0.5
"""How far other gateways are taken to do as this one: of 0, 0.25, 0.5 and 1, what kept most prefixes with four gateways."""
BALANCE = 1.25
"""1 + epsilon of the bounded loads: the value that Mirrokni et al. tell of Vimeo's load balancer."""
MAX_SESSIONS = 65_536
TRAIL = 64
TRAIL_SECONDS = 0.25
LONGEST_BLIND_SECONDS = 60.0
"""A prompt whose first token is not seen is taken to be computed after this at the latest."""


class Measured:
    """Speeds that were measured, of one replica or of all replicas of a model."""

    __slots__ = ("prefill", "tpot")

    def __init__(self) -> None:
        self.prefill = Speed()
        self.tpot = Speed()

    @property
    def speeds(self) -> Speeds:
        """As they stand."""
        return Speeds(self.prefill.value, self.tpot.value)


class _Load:
    __slots__ = (
        "blind", "breaker", "computed", "figures", "foreign", "last_pick", "measured", "outstanding", "own_then", "prefill_tokens", "trail",
    )  # fmt: skip

    def __init__(self) -> None:
        self.outstanding = 0
        self.prefill_tokens = 0
        """Of requests without a first token: what is yet to be computed."""
        self.computed = 0
        """Prompt tokens sent here that were not thought to be cached."""
        self.last_pick = 0
        self.breaker = Breaker()
        self.figures: ReplicaFigures | None = None
        self.foreign = 0
        """Requests that the last report shows beyond what this gateway can have had there when it was made: other gateways'."""
        self.own_then = 0
        """What was outstanding when the last report was made."""
        self.trail: deque[tuple[float, int]] = deque(maxlen=TRAIL)
        """The most that was outstanding, in steps of TRAIL_SECONDS: a report's figures are a little older than it."""
        self.blind: deque[tuple[float, Lease]] = deque()
        """Requests whose first token is not seen, with the time at which their prompt should be computed."""
        self.measured = Measured()

    def note(self, now: float) -> None:
        """What is outstanding has changed."""
        if not self.trail or now - self.trail[-1][0] >= TRAIL_SECONDS:
            self.trail.append((now, self.outstanding))
        elif self.outstanding > self.trail[-1][1]:
            self.trail[-1] = (self.trail[-1][0], self.outstanding)

    def outstanding_at(self, time: float) -> int:
        """The most that was outstanding around `time`."""
        after = self.outstanding
        for at, outstanding in reversed(self.trail):
            if at <= time:
                return max(after, outstanding)
            after = outstanding
        return after


class Lease:
    """One request at one replica, from the pick to its end."""

    __slots__ = ("_ahead", "_balancer", "_load", "_prefilling", "_probe", "_started", "new_tokens", "replica")

    def __init__(self, balancer: Balancer, load: _Load, replica: Replica, new_tokens: int) -> None:
        self._balancer = balancer
        self._load: _Load | None = load
        self._prefilling = True
        self._ahead = load.prefill_tokens + new_tokens
        self._started = balancer.clock()
        self._probe = load.breaker.state(self._started) is BreakerState.HALF_OPEN
        self.replica = replica
        self.new_tokens = new_tokens
        """Prompt tokens that the replica is not thought to hold."""
        load.outstanding += 1
        load.note(self._started)
        load.prefill_tokens += new_tokens
        load.breaker.probing = load.breaker.probing or self._probe

    def first_token(self) -> None:
        """The first token came: the prompt is computed. Only for streams, whose first token can be seen."""
        load = self._load
        if load is None or not self._prefilling:
            return
        self.computed()
        seconds = self._balancer.clock() - self._started
        for measured in (load.measured, self._balancer.typical(self.replica.model_key)):
            measured.prefill.observe(seconds, self._ahead)

    def release(self, tpot_ms: float | None = None) -> None:
        """The request has ended, however it ended. Harmless when repeated."""
        self.computed()
        load, self._load = self._load, None
        if load is None:
            return
        load.outstanding -= 1
        load.note(self._balancer.clock())
        if self._probe:
            load.breaker.probing = False
        if tpot_ms is not None:
            for measured in (load.measured, self._balancer.typical(self.replica.model_key)):
                measured.tpot.observe(tpot_ms / 1000, 1)

    def computed(self) -> None:
        """The prompt is computed, or taken to be: it is no longer ahead of others."""
        if self._prefilling and self._load is not None:
            self._prefilling = False
            self._load.prefill_tokens -= self.new_tokens

    def expected(self, prefill_seconds_per_token: float) -> float:
        """When the prompt should be computed, by what was ahead of it."""
        return self._started + min(LONGEST_BLIND_SECONDS, self._ahead * prefill_seconds_per_token)


class Balancer:
    """Load, speed, failures and prefixes of each replica, by pod UID. `gateways` is how many serve the pool, this one included."""

    def __init__(self, clock: Callable[[], float], gateways: Callable[[], int] = lambda: 1, index: PrefixIndex | None = None) -> None:
        self.clock = clock
        self._gateways = gateways
        self._index = index if index is not None else PrefixIndex()
        self._loads: dict[str, _Load] = {}
        self._typical: dict[ModelKey, Measured] = {}
        self._sessions: OrderedDict[int, str] = OrderedDict()
        self._picks = 0

    def acquire(self, replicas: Iterable[Replica], excluded: Collection[str] = (), prompt: Prompt = NO_PROMPT) -> Lease | None:
        """Pick a replica for `prompt` and count the request there until the lease is released. None if all are in `excluded` (pod UIDs).

        Replicas that should be left alone are chosen only if there is no other.
        """
        candidates = [replica for replica in replicas if replica.pod_uid not in excluded]
        if not candidates:
            return None
        now = self.clock()
        loads = [self._load(replica) for replica in candidates]
        for load in loads:
            while load.blind and load.blind[0][0] <= now:
                load.blind.popleft()[1].computed()
        depths, shared = self._depths(candidates, loads, prompt)
        number = self._choose(candidates, loads, prompt, depths, shared, now) if len(candidates) > 1 else 0
        replica, load = candidates[number], loads[number]
        lease = Lease(self, load, replica, prompt.tokens - prompt.tokens_to(depths.get(replica.pod_uid, 0)))
        if not prompt.streams:
            ((prefill, _),) = _speeds([load], self.typical(replica.model_key).speeds, now, alone=self._gateways() <= 1)
            load.blind.append((lease.expected(prefill), lease))
        self._picks += 1
        load.last_pick = self._picks
        load.computed += lease.new_tokens
        if prompt.hashes:
            self._index.add(prompt.hashes, replica.pod_uid, load.computed)
        if prompt.session is not None:
            self._sessions[prompt.session] = replica.pod_uid
            self._sessions.move_to_end(prompt.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return lease

    def acquire_spare(self, replicas: Iterable[Replica], excluded: Collection[str], prompt: Prompt = NO_PROMPT) -> Lease | None:
        """Like `acquire`, but only of replicas that nothing speaks against: for work that need not be done."""
        candidates = list(replicas)
        if not candidates:
            return None
        now = self.clock()
        loads = [self._load(replica) for replica in candidates]
        within = _within(range(len(loads)), self._held(loads, now))
        good = [
            candidates[number]
            for number in within
            if loads[number].breaker.state(now) is BreakerState.CLOSED
            and not _full(loads[number], now)
            and (not prompt.adapter or _has_adapter(loads[number], prompt.adapter))
        ]
        return self.acquire(good, excluded, prompt)

    def succeeded(self, replica: Replica) -> None:
        """`replica` answered: what it failed before is forgotten."""
        load = self._loads.get(replica.pod_uid)
        if load is not None and load.breaker.failures:
            load.breaker.succeeded()

    def failed(self, replica: Replica) -> None:
        """`replica` could not be reached or is not ready."""
        self._load(replica).breaker.failed(self.clock())

    def draining(self, replica: Replica) -> None:
        """`replica` refused because it drains."""
        self._load(replica).breaker.draining(self.clock())

    def reported(self, pod_uid: str, figures: ReplicaFigures) -> None:
        """What a replica's monitor says."""
        load = self._loads.get(pod_uid)
        if load is None:
            load = self._loads[pod_uid] = _Load()
        load.figures = figures
        load.own_then = load.outstanding_at(figures.time)
        load.foreign = max(0, figures.running + figures.waiting - load.own_then)

    def outstanding(self, pod_uid: str) -> int:
        """Requests that are running on a replica through this gateway."""
        load = self._loads.get(pod_uid)
        return load.outstanding if load else 0

    def breaker_state(self, pod_uid: str) -> BreakerState:
        """State of a replica's breaker."""
        load = self._loads.get(pod_uid)
        return load.breaker.state(self.clock()) if load else BreakerState.CLOSED

    def typical(self, key: ModelKey) -> Measured:
        """Speeds over all replicas of a model: what a replica that was not measured yet is taken for."""
        found = self._typical.get(key)
        if found is None:
            found = self._typical[key] = Measured()
        return found

    def retain(self, pod_uids: Collection[str], keys: Collection[ModelKey] = ()) -> None:
        """Forget replicas that are gone and have nothing outstanding, and models that are gone."""
        self._loads = {uid: load for uid, load in self._loads.items() if load.outstanding or uid in pod_uids}
        self._typical = {key: typical for key, typical in self._typical.items() if key in keys}

    def _load(self, replica: Replica) -> _Load:
        load = self._loads.get(replica.pod_uid)
        if load is None:
            load = self._loads[replica.pod_uid] = _Load()
        return load

    def _depths(self, candidates: Sequence[Replica], loads: Sequence[_Load], prompt: Prompt) -> tuple[dict[str, int], int]:
        if not prompt.hashes:
            return {}, 0
        # Other gateways fill the cache as well, as far as is known as fast as this one.
        gateways = max(1, self._gateways())
        computed = {replica.pod_uid: load.computed for replica, load in zip(candidates, loads, strict=True)}
        capacities = {
            replica.pod_uid: load.figures.kv_cache_tokens // gateways
            for replica, load in zip(candidates, loads, strict=True)
            if load.figures is not None and load.figures.kv_cache_tokens is not None
        }
        return self._index.depths(prompt.hashes, computed, capacities)

    def _choose(
        self, candidates: Sequence[Replica], loads: Sequence[_Load], prompt: Prompt, depths: dict[str, int], shared: int, now: float
    ) -> int:
        held = self._held(loads, now)
        through = [number for number, load in enumerate(loads) if load.breaker.lets_through(now)] or list(range(len(loads)))
        within = _within(through, held)
        if prompt.session is not None:
            return self._session_place(prompt.session, within, candidates)
        eligible = [number for number in within if not _full(loads[number], now)] or within
        if prompt.adapter:
            eligible = [number for number in eligible if _has_adapter(loads[number], prompt.adapter)] or eligible
        gateways, supposed, supposed_tokens = self._gateways(), -1, 0
        if shared < len(prompt.hashes) and max(depths.values(), default=0) <= shared and gateways > 1:
            supposed = max(eligible, key=lambda number: weight(prompt.hashes[shared], candidates[number].pod_uid))
            supposed_tokens = prompt.tokens
        speeds = _speeds(loads, self.typical(candidates[0].model_key).speeds, now, alone=gateways <= 1)
        common = prompt.tokens_to(shared)
        mean = max(1.0, sum(held) / len(held))
        best, best_rank = eligible[0], (float("inf"), 0.0, 0)
        for number in eligible:
            load = loads[number]
            cached = supposed_tokens if number == supposed else prompt.tokens_to(depths.get(candidates[number].pod_uid, 0))
            prefill, tpot = speeds[number]
            ahead = load.prefill_tokens + _foreign_ahead(load, prompt.tokens, now)
            # What many begin with, every replica will hold: it is computed there once, and then serves them all.
            once = max(0, common - cached)
            cost = cost_seconds(ahead + once, prompt.tokens - cached - once, held[number] / mean, prefill, tpot)
            rank = (cost, held[number], load.last_pick)
            if rank < best_rank:
                best, best_rank = number, rank
        return best

    def _held(self, loads: Sequence[_Load], now: float) -> list[float]:
        """Requests at replicas: this gateway's, and other gateways' as far as the last report can be trusted.

        Other gateways are taken to have chosen half as this one since: without that, all would send what comes between two reports to where
        least was held at the first.
        """
        others = max(0, self._gateways() - 1)
        found = []
        for load in loads:
            foreign = 0.0
            if load.figures is not None and (trusted := trust(now - load.figures.time)):
                foreign = trusted * max(0.0, load.foreign + ALIKE * others * (load.outstanding - load.own_then))
            found.append(load.outstanding + foreign)
        return found

    def _session_place(self, session: int, within: Sequence[int], candidates: Sequence[Replica]) -> int:
        """Where the session was, if it may stay there, else the first in its own order."""
        last = self._sessions.get(session)
        for number in within:
            if candidates[number].pod_uid == last:
                return number
        return max(within, key=lambda number: weight(session, candidates[number].pod_uid))


def _speeds(loads: Sequence[_Load], typical: Speeds, now: float, *, alone: bool) -> list[tuple[float, float]]:
    """Seconds per prompt token and per output token of each; `alone` says that this is the pool's only gateway."""
    prefill: list[float | None] = []
    tpot: list[float | None] = []
    for load in loads:
        figures, measured = load.figures, load.measured
        reported = Speeds()
        if figures is not None and trust(now - figures.time) > 0:
            reported = Speeds(figures.prefill_seconds_per_token, figures.tpot_seconds)
        own = measured.prefill.value if alone and reported.prefill is None else reported.prefill
        prefill.append(own)
        tpot.append(reported.tpot if (value := measured.tpot.value) is None else value)
    usual_prefill, usual_tpot = known_speeds((typical,))
    return list(zip(levelled(prefill, usual_prefill), levelled(tpot, usual_tpot), strict=True))


def _foreign_ahead(load: _Load, tokens: int, now: float) -> float:
    """Tokens ahead that other gateways sent: whoever waits there for them is taken for as long as this request."""
    figures = load.figures
    if figures is None or not load.foreign:
        return 0.0
    return trust(now - figures.time) * figures.waiting * load.foreign / max(1, figures.running + figures.waiting) * tokens


def _within(numbers: Sequence[int], held: Sequence[float]) -> list[int]:
    """Those that hold no more than the bound once the request is added; the least loaded always."""
    bound = load_bound((sum(held[number] for number in numbers) + 1) / len(numbers), BALANCE)
    least = min(held[number] for number in numbers)
    return [number for number in numbers if held[number] + 1 <= bound or held[number] == least]


def _full(load: _Load, now: float) -> bool:
    figures = load.figures
    if figures is None or figures.kv_cache_percent is None:
        return False
    return figures.kv_cache_percent >= KV_FULL_PERCENT and trust(now - figures.time) > 0


def _has_adapter(load: _Load, adapter: str) -> bool:
    return load.figures is not None and adapter in load.figures.adapters
