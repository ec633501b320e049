"""`npufleet simulate`: what a policy would come to on a pool, with a trace or a closed loop."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any

import click

from npufleet_operator.cli.output import friendly, table
from npufleet_operator.core.observed import ModelKey
from npufleet_operator.errors import InputError
from npufleet_operator.simulator.calibration import load_calibration
from npufleet_operator.simulator.scenario import Scenario, load_scenario
from npufleet_operator.simulator.simulate import POLICY_NAMES, Result, simulate
from npufleet_operator.simulator.traces import TraceRequest, read_trace
from npufleet_operator.simulator.workload import ClosedLoop, Traces, Workload

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
MAX_CLIENTS = 100_000
MAX_MINUTES = 7 * 24 * 60


@click.command(name="simulate")
@click.option("--pool", "pool_file", required=True, type=FILE, help="File with the InferencePool.")
@click.option("--models", "models_file", required=True, type=FILE, help="File with its AscendModels.")
@click.option(
    "--trace", "traces", multiple=True, metavar="FILE:MODEL", help="Arrivals of a model, Mooncake's or Azure's format; repeatable."
)
@click.option("--closed-loop", type=click.IntRange(1, MAX_CLIENTS), metavar="N", help="N clients, each with one request at a time.")
@click.option(
    "--policy", "policies", multiple=True, type=click.Choice(POLICY_NAMES), default=("npufleet",), show_default=True, help="Repeatable."
)
@click.option("--minutes", type=click.FloatRange(0, MAX_MINUTES, min_open=True), default=30.0, show_default=True, help="Simulated time.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--calibration", type=FILE, help="A benchmark's JSON, for the constants of the device.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@friendly
def simulate_command(
    pool_file: Path,
    models_file: Path,
    traces: tuple[str, ...],
    closed_loop: int | None,
    policies: tuple[str, ...],
    minutes: float,
    seed: int,
    calibration: Path | None,
    as_json: bool,
) -> None:
    """Simulate a pool on the operator's own planner. Figures are simulated, by a roofline of the NPU: see docs/simulation.md."""
    if bool(traces) == (closed_loop is not None):
        raise InputError("give either --trace FILE:MODEL (repeatable) or --closed-loop N")
    if not isfinite(minutes):
        raise InputError(f"--minutes {minutes}: write a number")
    scenario = load_scenario(pool_file, models_file, load_calibration(calibration) if calibration else None)
    workload: Workload = ClosedLoop(closed_loop) if closed_loop is not None else _traces(scenario, traces)
    if isinstance(workload, Traces):
        scenario = scenario.with_lengths(dict(workload.of))
    results = {name: simulate(scenario, workload, name, minutes * 60, seed) for name in dict.fromkeys(policies)}
    if as_json:
        click.echo(json.dumps(document(scenario, results, minutes, seed), indent=2))
    else:
        click.echo(render(results))


def document(scenario: Scenario, results: dict[str, Result], minutes: float, seed: int) -> dict[str, Any]:
    """For JSON."""
    device = scenario.models[0].roofline.device
    return {
        "simulated": True,
        "pool": scenario.pool_name,
        "device": device.name,
        "npus": scenario.npus,
        "minutes": minutes,
        "seed": seed,
        "policies": {name: result.document() for name, result in results.items()},
    }


def render(results: dict[str, Result]) -> str:
    """For people."""
    classes = list(dict.fromkeys(name for result in results.values() for name in result.attainment_by_class))
    head = ["POLICY", "ATTAINMENT", *(name.upper() for name in classes), "UTILISATION", "NPU-HOURS", "MOVES", "RECLAIMS", "LOST", "BELOW"]
    rows = [
        [
            name,
            f"{r.attainment_percent:.1f}%",
            *(f"{r.attainment_by_class[c]:.1f}%" if c in r.attainment_by_class else "-" for c in classes),
            f"{r.utilisation_percent:.1f}%",
            f"{r.npu_hours:.2f}",
            str(r.moves),
            str(r.reclaims),
            str(r.lost_requests),
            f"{r.seconds_below_guarantee:.0f}s",
        ]
        for name, r in results.items()
    ]
    return table(head, rows)


def _traces(scenario: Scenario, given: tuple[str, ...]) -> Traces:
    found: list[tuple[ModelKey, list[TraceRequest]]] = []
    for text in given:
        file, colon, model = text.rpartition(":")
        if not colon or not file or not model:
            raise InputError(f"--trace {text!r}: write FILE:MODEL, for example conversation.jsonl:chat")
        found.append((scenario.find(model).key, read_trace(Path(file))))
    return Traces(found)
