"""Processor time of one plan at rest, on a simulated pool of the same size: what the planner takes where nobody else wants the
processor."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from benchmarks.operator_scale.objects import NPUS, POOL, REPLICAS, TEAM, model, model_name, pool
from npufleet_api.model import AscendModelSpec
from npufleet_api.pool import InferencePoolSpec
from npufleet_operator.collector import spare_plans_the_collector
from npufleet_operator.core.plan import make_plan
from npufleet_operator.simulator.constants import DEFAULT_DEVICE, DEVICES
from npufleet_operator.simulator.policies import Npufleet, Stage
from npufleet_operator.simulator.replica import ReplicaLimits
from npufleet_operator.simulator.roofline import Roofline
from npufleet_operator.simulator.scenario import Scenario, SimulatedModel
from npufleet_operator.simulator.shapes import SHAPES
from npufleet_operator.simulator.simulate import BRING_UP_SECONDS, Simulation
from npufleet_operator.simulator.workload import ClosedLoop

ROUNDS = 7
SETTLE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class PlanTime:
    """Milliseconds of processor time."""

    median_ms: float
    longest_ms: float
    """With the garbage collector as the operator sets it."""


def scenario(nodes: int, models: int) -> Scenario:
    """The pool and models that the benchmark applies, with an invented shape: nothing is served."""
    spec = InferencePoolSpec.model_validate({**pool("huawei.com/Ascend910")["spec"], "npus": {"resourceName": "huawei.com/Ascend910"}})
    roofline = Roofline(DEVICES[DEFAULT_DEVICE], SHAPES["qwen-14b"], NPUS)
    limits = ReplicaLimits(64, 8192, 256, chunked_prefill=True)
    simulated = (
        SimulatedModel(TEAM, model_name(i), AscendModelSpec.model_validate(model(i)["spec"]), roofline, limits, 1.0, 512, 256, 0.5)
        for i in range(models)
    )
    return Scenario(POOL, spec, nodes, 8, tuple(simulated))


def plan_time(nodes: int, models: int) -> PlanTime:
    """Plans of a pool at rest with every replica ready."""
    chosen = scenario(nodes, models)
    simulation = Simulation(chosen, ClosedLoop(1), 1.0, 1)
    policy = Npufleet()
    policy.start(Stage(chosen, simulation.clock, simulation.cluster, simulation.gateway), {m.key: REPLICAS for m in chosen.models})
    simulation.clock.run(SETTLE_SECONDS - BRING_UP_SECONDS)
    observed, now = policy.observe(), simulation.cluster.now()
    make_plan(observed, now)
    spare_plans_the_collector()
    times = []
    for _ in range(ROUNDS):
        started = time.process_time()
        make_plan(observed, now)
        times.append(1000 * (time.process_time() - started))
    return PlanTime(round(median(times), 1), round(max(times), 1))
