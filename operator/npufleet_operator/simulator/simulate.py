"""One run of one policy, and what it came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from npufleet_api.slo import Judgement, Outcome
from npufleet_operator.core.acceptance import class_bounds
from npufleet_operator.core.observed import ModelKey
from npufleet_operator.errors import InputError
from npufleet_operator.simulator.allocations import Allocation, candidates, static_split
from npufleet_operator.simulator.cluster import EPOCH, SimulatedCluster
from npufleet_operator.simulator.constants import RETRY_AFTER_SECONDS
from npufleet_operator.simulator.events import Clock
from npufleet_operator.simulator.gateway import SimulatedGateway
from npufleet_operator.simulator.policies import Deployments, HpaPolicy, KpaPolicy, Npufleet, Policy, Stage
from npufleet_operator.simulator.request import Request
from npufleet_operator.simulator.scenario import Scenario
from npufleet_operator.simulator.workload import Workload

BRING_UP_SECONDS = 900.0
"""Before time 0, in which the split's replicas load."""
TAIL_SECONDS = 6 * 3600.0
"""After the last arrival, in which what still runs ends."""
SAMPLE_SECONDS = 1.0

POLICIES: dict[str, Callable[[], Policy]] = {"npufleet": Npufleet, "hpa": HpaPolicy, "kpa": KpaPolicy, "static": Deployments}
ORACLE = "oracle"
POLICY_NAMES = (*POLICIES, ORACLE)


@dataclass(slots=True)
class _Book:
    """One model's requests."""

    judged: int = 0
    attained: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    prompt_tokens: int = 0
    answer_tokens: int = 0
    done: int = 0
    """Requests that ended well before the last arrival: what was served in that time."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a policy came to. Requests count when they arrived in the simulated time, NPUs while it lasted."""

    attainment_percent: float
    attainment_by_class: dict[str, float]
    utilisation_percent: float
    """Tokens per second over what the roofline allows on the NPUs that were held."""
    npu_hours: float
    moves: int
    """Replicas started and retired."""
    reclaims: int
    lost_requests: int
    """Requests that a replica had accepted and that got no whole answer."""
    seconds_below_guarantee: float
    """Summed over classes: requests waited, and the class served with less than its guarantee by at least one replica."""
    longest_below_guarantee_seconds: float
    requests: int
    refused_requests: int
    """Requests that found every queue full, or no replica in time: misses, but not lost."""
    tokens_per_second: float
    mean_replicas: dict[str, float]
    start: dict[str, int]
    """Replicas at time 0."""

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Simulation:
    """One policy's run."""

    def __init__(self, scenario: Scenario, workload: Workload, seconds: float, seed: int) -> None:
        self.scenario, self.workload, self.seconds, self.seed = scenario, workload, seconds, seed
        self.clock = Clock(-BRING_UP_SECONDS)
        self.gateway = SimulatedGateway(self.clock, scenario.pool_name, scenario.models, self._finished, EPOCH.timestamp())
        self.cluster = SimulatedCluster(self.clock, scenario, self.gateway)
        self._books: dict[ModelKey, _Book] = {model.key: _Book() for model in scenario.models}
        self._sent = self._ended = 0
        self._npu_seconds = 0.0
        self._replica_seconds: Counter[ModelKey] = Counter()
        self._below: Counter[str] = Counter()
        self._below_now: Counter[str] = Counter()
        self._longest_below = 0.0

    def run(self, policy: Policy, split: Allocation) -> Result:
        """From time 0 with the replicas of `split`, until every request has ended."""
        policy.start(Stage(self.scenario, self.clock, self.cluster, self.gateway), split)
        self.clock.run(0)
        serving = sum(pod.engine_ready for pod in self.cluster.pods.values())
        if serving != sum(split.values()):
            begin = f"{serving} of the {sum(split.values())} replicas to begin with serve after {BRING_UP_SECONDS:.0f} s"
            raise InputError(f"{begin}: {policy.trouble()}: change the pool or the models")
        self._sample()
        self.workload.start(self.clock, self.scenario.models, self._send, self.seconds, self.seed, RETRY_AFTER_SECONDS)
        # After the first arrivals: a policy takes over a pool under load, not an idle one that it may empty at once.
        self.clock.after(0, policy.release)
        self.clock.run(self.seconds)
        self.clock.run(self.seconds + TAIL_SECONDS, done=lambda: self._ended == self._sent)
        if self._ended != self._sent:
            raise AssertionError(f"{self._sent - self._ended} of {self._sent} requests did not end within {TAIL_SECONDS:.0f} s")
        return self._result(policy, split)

    def _send(self, model: ModelKey, input_tokens: int, output_tokens: int, ended: Callable[[bool], None]) -> None:
        self._sent += 1
        self.gateway.send(model, input_tokens, output_tokens, ended)

    def _finished(self, request: Request, judgement: Judgement) -> None:
        self._ended += 1
        book = self._books[request.model]
        book.judged += judgement.judged
        book.attained += judgement.attained
        book.outcomes[request.outcome or Outcome.OK] += 1
        if request.outcome is Outcome.OK and self.clock.now <= self.seconds:
            book.done += 1
            book.prompt_tokens += request.input_tokens
            book.answer_tokens += request.output_tokens

    def _sample(self) -> None:
        self._npu_seconds += self.cluster.charged() * SAMPLE_SECONDS
        for model in self.scenario.models:
            self._replica_seconds[model.key] += sum(pod.engine_ready for pod in self.cluster.of(model.key))
        for workload_class in self.scenario.pool.classes:
            name = workload_class.name
            guarantee = class_bounds(workload_class, self.scenario.npus)[0]
            held = self.cluster.charged(name, ready=True)
            members = [m for m in self.scenario.models if m.spec.workload_class == name]
            if any(held + m.npus <= guarantee and self.gateway.starved(m.key) for m in members):
                self._below[name] += 1
                self._below_now[name] += 1
                self._longest_below = max(self._longest_below, self._below_now[name] * SAMPLE_SECONDS)
            else:
                self._below_now[name] = 0
        if self.clock.now + SAMPLE_SECONDS < self.seconds:
            self.clock.after(SAMPLE_SECONDS, self._sample)

    def _result(self, policy: Policy, split: Allocation) -> Result:
        books = self._books
        by_class: dict[str, float] = {}
        for workload_class in self.scenario.pool.classes:
            members = [books[m.key] for m in self.scenario.models if m.spec.workload_class == workload_class.name]
            if any(book.judged for book in members):
                by_class[workload_class.name] = _percent(sum(b.attained for b in members), sum(b.judged for b in members))
        outcomes: Counter[Outcome] = Counter()
        for book in books.values():
            outcomes.update(book.outcomes)
        tokens = sum(b.prompt_tokens + b.answer_tokens for b in books.values())
        return Result(
            attainment_percent=_percent(sum(b.attained for b in books.values()), sum(b.judged for b in books.values())),
            attainment_by_class=by_class,
            utilisation_percent=round(100 * self._roofline_npu_seconds() / self._npu_seconds, 2) if self._npu_seconds else 0.0,
            npu_hours=round(self._npu_seconds / 3600, 3),
            moves=policy.tally.started + policy.tally.retired,
            reclaims=policy.tally.reclaims,
            lost_requests=outcomes[Outcome.INTERRUPTED],
            seconds_below_guarantee=sum(self._below.values()) * SAMPLE_SECONDS,
            longest_below_guarantee_seconds=self._longest_below,
            requests=self._sent,
            refused_requests=outcomes[Outcome.OVERLOADED] + outcomes[Outcome.NO_REPLICA],
            tokens_per_second=round(tokens / self.seconds, 1),
            mean_replicas={"/".join(key): round(total * SAMPLE_SECONDS / self.seconds, 2) for key, total in self._replica_seconds.items()},
            start={"/".join(key): replicas for key, replicas in sorted(split.items())},
        )

    def _roofline_npu_seconds(self) -> float:
        """NPU-seconds that the roofline needs for what was served."""
        total = 0.0
        for model in self.scenario.models:
            book = self._books[model.key]
            if book.done:
                rate = model.roofline.peak_requests_per_second(
                    book.prompt_tokens / book.done, book.answer_tokens / book.done, model.limits.max_sequences
                )
                total += book.done * model.npus / rate
        return total


def simulate(scenario: Scenario, workload: Workload, policy: str, seconds: float, seed: int) -> Result:
    """Run one policy. All but the oracle start from the static split. Raises InputError."""
    if policy == ORACLE:
        return _oracle(scenario, workload, seconds, seed)
    return Simulation(scenario, workload, seconds, seed).run(POLICIES[policy](), static_split(scenario))


def _oracle(scenario: Scenario, workload: Workload, seconds: float, seed: int) -> Result:
    """The best of all fixed allocations within the pool's and the models' bounds, each run."""
    results = [Simulation(scenario, workload, seconds, seed).run(Deployments(), allocation) for allocation in candidates(scenario)]
    return best(results)


def best(results: Sequence[Result]) -> Result:
    """The best of fixed allocations: by attainment, then by the worst class's, then by fewest NPU-hours. Raises InputError if there is
    none."""
    if not results:
        raise InputError(
            "policy oracle: no allocation gives every model its minReplicas: lower them or spec.parallelism, or raise maxPercent"
        )
    return max(results, key=lambda r: (r.attainment_percent, min(r.attainment_by_class.values(), default=0.0), -r.npu_hours))


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 2) if whole else 100.0
