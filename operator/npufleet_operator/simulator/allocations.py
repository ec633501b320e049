"""Fixed allocations: the static split that an administrator would write, and all that the oracle searches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from npufleet_operator.core.acceptance import class_bounds
from npufleet_operator.core.observed import ModelKey
from npufleet_operator.errors import InputError
from npufleet_operator.simulator.scenario import Scenario, SimulatedModel

Allocation = Mapping[ModelKey, int]
"""Replicas by model."""

MAX_CANDIDATES = 2000


def replica_bounds(scenario: Scenario, model: SimulatedModel) -> tuple[int, int]:
    """Fewest and most replicas of a model: by its own spec, and what the nodes hold of it alone."""
    spec = model.spec
    holds = scenario.nodes * (scenario.npus_per_node // model.npus)
    if spec.replicas is not None:
        return min(spec.replicas, holds), min(spec.replicas, holds)
    most = spec.scaling.max_replicas if spec.scaling.max_replicas is not None else max(1, spec.scaling.min_replicas)
    return min(spec.scaling.min_replicas, holds), min(most, holds)


def fits(scenario: Scenario, allocation: Allocation) -> bool:
    """Whether every class stays within its ceiling and every replica has its place on a node, the largest placed first."""
    charged = dict.fromkeys((c.name for c in scenario.pool.classes), 0)
    sizes = []
    for model in scenario.models:
        charged[model.spec.workload_class] += model.npus * allocation[model.key]
        sizes += [model.npus] * allocation[model.key]
    if any(charged[c.name] > class_bounds(c, scenario.npus)[1] for c in scenario.pool.classes):
        return False
    free = [scenario.npus_per_node - scenario.npus_per_node % scenario.pool.npus.unit] * scenario.nodes
    for size in sorted(sizes, reverse=True):
        fitting = [left for left in free if left >= size]
        if not fitting:
            return False
        free[free.index(min(fitting))] -= size
    return True


def static_split(scenario: Scenario) -> Allocation:
    """Each class's part of all NPUs in proportion to its minPercent (equal parts where all are 0), its models in turn.

    First the models get their fewest replicas, as far as these fit; then one replica at a time goes to the class that is furthest below its
    part.
    """
    percents = {c.name: c.min_percent for c in scenario.pool.classes if any(m.spec.workload_class == c.name for m in scenario.models)}
    weights = percents if any(percents.values()) else dict.fromkeys(percents, 1)
    part = {name: scenario.npus * weight / sum(weights.values()) for name, weight in weights.items()}
    bounds = {model.key: replica_bounds(scenario, model) for model in scenario.models}
    split = dict.fromkeys(bounds, 0)
    while True:
        held = dict.fromkeys(part, 0)
        for model in scenario.models:
            held[model.spec.workload_class] += model.npus * split[model.key]
        order = sorted(
            scenario.models,
            key=lambda m: (
                split[m.key] >= bounds[m.key][0],
                held[m.spec.workload_class] - part[m.spec.workload_class],
                split[m.key],
                m.key,
            ),
        )
        for model in order:
            grown = {**split, model.key: split[model.key] + 1}
            if grown[model.key] <= bounds[model.key][1] and fits(scenario, grown):
                split = grown
                break
        else:
            return split


def candidates(scenario: Scenario) -> list[Allocation]:
    """Every allocation within the pool's and the models' bounds, each model at least once where it may run. Raises InputError."""
    found: list[Allocation] = []
    for allocation in _all(scenario, scenario.models):
        if fits(scenario, allocation):
            found.append(allocation)
            if len(found) > MAX_CANDIDATES:
                raise InputError(f"policy oracle: more than {MAX_CANDIDATES} allocations: lower the models' maxReplicas, or leave it out")
    return found


def _all(scenario: Scenario, models: tuple[SimulatedModel, ...], left: int | None = None) -> Iterator[dict[ModelKey, int]]:
    if not models:
        yield {}
        return
    left = scenario.npus if left is None else left
    first, rest = models[0], models[1:]
    low, high = replica_bounds(scenario, first)
    for replicas in range(max(low, min(1, high)), min(high, left // first.npus) + 1):
        for others in _all(scenario, rest, left - replicas * first.npus):
            yield {first.key: replicas, **others}
