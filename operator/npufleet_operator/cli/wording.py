"""Why a pool or model is as it is, in words and numbers, from status. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from npufleet_api.conditions import Condition, ConditionStatus, ModelCondition, PoolCondition
from npufleet_api.model import AscendModelSpec, MeasuredSlo
from npufleet_api.pool import ClassLedger, Decision
from npufleet_operator.cli.output import table
from npufleet_operator.core.observed import ModelView, PodView, PoolView
from npufleet_operator.core.trouble import diagnose

GOOD_WHEN_FALSE = frozenset({ModelCondition.NOT_YET_EFFECTIVE, PoolCondition.NOT_YET_EFFECTIVE})
SHOWN_DECISIONS = 8


def explain_model(model: ModelView, pool: PoolView | None, pods: Sequence[PodView]) -> str:
    """Why a model runs as many replicas as it does."""
    status = model.status
    replicas = f"{status.replicas} replica(s): {status.ready_replicas} ready, {status.draining_replicas} leaving"
    lines = [f"AscendModel {'/'.join(model.key)}", f"  at {replicas}, {status.npus} NPU(s) charged"]
    lines.append(f"  wanted: {status.desired_replicas}, {_bounds(model.spec)}")
    if status.observed_generation < model.generation:
        lines.append(
            f"  status is of generation {status.observed_generation}, the spec of {model.generation}: the operator has not seen it yet"
        )
    if status.last_decision:
        lines.append(f"  last decision: {_decision(status.last_decision)}")
    lines += ["", "SLO, as clients saw it", *(f"  {line}" for line in _slo(status.slo, model.spec))]
    lines += ["", *_class_of(model, pool)]
    if pods:
        lines += ["", "Replicas", *(f"  {line}" for line in table(["POD", "NODE", "STATE"], [_pod(pod) for pod in pods]).splitlines())]
    if pool:
        own = [d for d in pool.status.decisions if d.model == "/".join(model.key)]
        lines += _decisions(own)
    return "\n".join([*lines, *_conditions(status.conditions)])


def explain_pool(pool: PoolView, models: Sequence[ModelView]) -> str:
    """Who holds a pool's NPUs, and what changed last."""
    status = pool.status
    lines = [f"InferencePool {pool.name}"]
    if pool.spec is None:
        lines.append(f"  its spec cannot be used: {pool.spec_error}")
    lines.append(f"  {status.nominal} NPU(s) nominal, {status.supply} usable, {status.foreign} held by others' pods")
    lines.append(
        f"  {status.allocated} charged to models, {status.draining} of them draining, {max(0, status.supply - status.allocated)} free"
    )
    if pool.spec:
        lines.append(f"  mode {pool.spec.mode.value}, a decision at least every {pool.spec.rebalancing.interval_seconds} s")
    lines += ["", "Classes", *(f"  {line}" for line in ledger_table(pool).splitlines())]
    if models:
        lines += ["", "Models", *(f"  {line}" for line in models_table(models).splitlines())]
    return "\n".join([*lines, *_decisions(status.decisions), *_conditions(status.conditions)])


def ledger_table(pool: PoolView) -> str:
    """The classes of a pool, in NPUs, by priority."""
    priority = {c.name: c.priority for c in pool.spec.classes} if pool.spec else {}
    head = ["CLASS", "PRIORITY", "GUARANTEED", "CEILING", "USED", "BORROWED", "DRAINING", "PENDING"]
    order = sorted(pool.status.classes, key=lambda c: (-priority.get(c.name, 0), c.name))
    return table(head, [_ledger_row(c, priority.get(c.name)) for c in order])


def models_table(models: Sequence[ModelView], *, with_pool: bool = False) -> str:
    """Models with what clients got."""
    head = [
        "MODEL",
        *(["POOL"] if with_pool else []),
        "CLASS",
        "REPLICAS",
        "READY",
        "WANTED",
        "NPUS",
        "SLO",
        "TTFT-P95",
        "TPOT-P95",
        "STATE",
    ]
    rows = []
    for model in models:
        status, slo = model.status, model.status.slo
        ready = status.condition(ModelCondition.READY)
        rows.append(
            [
                "/".join(model.key),
                *([model.pool_name] if with_pool else []),
                model.spec.workload_class if model.spec else "?",
                str(status.replicas),
                str(status.ready_replicas),
                str(status.desired_replicas),
                str(status.npus),
                "-" if slo is None or slo.attainment_percent is None else f"{slo.attainment_percent}%",
                _measured(slo.ttft_p95_milliseconds, slo.ttft_target_milliseconds) if slo else "-",
                _measured(slo.tpot_p95_milliseconds, slo.tpot_target_milliseconds) if slo else "-",
                ready.reason if ready else "Unknown",
            ]
        )
    return table(head, rows)


def pools_table(pools: Sequence[PoolView]) -> str:
    """Pools with their NPUs."""
    head = ["POOL", "NOMINAL", "SUPPLY", "FOREIGN", "ALLOCATED", "DRAINING", "MODELS", "STATE"]
    rows = []
    for pool in pools:
        s = pool.status
        ready = s.condition(PoolCondition.READY)
        figures = [str(n) for n in (s.nominal, s.supply, s.foreign, s.allocated, s.draining, s.models)]
        rows.append([pool.name, *figures, ready.reason if ready else "Unknown"])
    return table(head, rows)


def _bounds(spec: AscendModelSpec | None) -> str:
    if spec is None:
        return "the spec cannot be used"
    if spec.replicas is not None:
        return f"pinned by spec.replicas ({spec.replicas}): elastic scaling is off"
    most = spec.scaling.max_replicas if spec.scaling.max_replicas is not None else max(1, spec.scaling.min_replicas)
    return f"between scaling.minReplicas {spec.scaling.min_replicas} and maxReplicas {most}, {spec.parallelism.npus} NPU(s) each"


def _slo(slo: MeasuredSlo | None, spec: AscendModelSpec | None) -> list[str]:
    if slo is None:
        return ["nothing is known yet"]
    promised = spec.slo if spec else None
    lines = []
    if slo.attainment_percent is not None and promised:
        word = "met" if slo.attainment_percent >= promised.attainment_percent else "MISSED"
        lines.append(f"attainment {slo.attainment_percent} % of requests, {promised.attainment_percent} % promised: {word}")
    elif promised is None:
        lines.append("spec.slo is not set: nothing is promised")
    for name, value, target in (
        ("TTFT p95", slo.ttft_p95_milliseconds, slo.ttft_target_milliseconds),
        ("time per output token p95", slo.tpot_p95_milliseconds, slo.tpot_target_milliseconds),
    ):
        if value is not None:
            lines.append(f"{name} {value} ms" + (f", target {target} ms" if target is not None else ""))
    lines.append(f"data {slo.data}: about {slo.requests} requests and {slo.errors} errors in {slo.window_seconds} s")
    return lines


def _class_of(model: ModelView, pool: PoolView | None) -> list[str]:
    if pool is None:
        return [f"Pool {model.pool_name!r} does not exist: what runs is kept as it is"]
    name = model.spec.workload_class if model.spec else ""
    ledger = next((c for c in pool.status.classes if c.name == name), None)
    if ledger is None:
        return [f"Pool {pool.name} has no class {name!r} in its ledger"]
    free = max(0, pool.status.supply - pool.status.allocated)
    bounds = f"guaranteed {ledger.guaranteed} NPU(s), ceiling {ledger.ceiling}"
    return [
        f"Class {name} of pool {pool.name}",
        f"  {bounds}; uses {ledger.used}: {ledger.borrowed} borrowed, {ledger.draining} draining, {ledger.pending} pending",
        f"  {free} of the pool's {pool.status.supply} usable NPU(s) are free",
    ]


def _pod(pod: PodView) -> list[str]:
    if pod.terminating:
        state = "terminating"
    elif pod.drain_started is not None:
        state = f"draining since {pod.drain_started:%Y-%m-%dT%H:%M:%SZ}: {pod.drain_reason}"
    else:
        trouble = diagnose(pod)
        state = f"{trouble.reason}: {trouble.message}" if trouble else "serves"
    return [pod.name, pod.node or "-", state]


def _ledger_row(entry: ClassLedger, priority: int | None) -> list[str]:
    figures = (entry.guaranteed, entry.ceiling, entry.used, entry.borrowed, entry.draining, entry.pending)
    return [entry.name, "?" if priority is None else str(priority), *(str(n) for n in figures)]


def _measured(value: int | None, target: int | None) -> str:
    if value is None:
        return "-"
    return f"{value}ms" if target is None else f"{value}/{target}ms"


def _decision(decision: Decision) -> str:
    return f"{decision.time} {decision.reason}: {decision.message}"


def _decisions(decisions: Sequence[Decision]) -> list[str]:
    if not decisions:
        return []
    latest = sorted(decisions, key=lambda d: d.time, reverse=True)[:SHOWN_DECISIONS]
    return ["", "Decisions, latest first", *(f"  {d.time} {d.model} {d.reason}: {d.message}" for d in latest)]


def _conditions(conditions: Sequence[Condition]) -> list[str]:
    """What is not as it should be; READY only where nothing else says why."""
    bad = [c for c in conditions if c.status is not (ConditionStatus.FALSE if c.type in GOOD_WHEN_FALSE else ConditionStatus.TRUE)]
    if not bad:
        return ["", "Every condition is as it should be"] if conditions else ["", "No conditions yet: the operator has not seen it"]
    return ["", "Not as it should be", *(f"  {c.type}={c.status.value} {c.reason}: {c.message}" for c in bad)]
