"""Three models on one node of eight 910B3, in a closed loop: npufleet's planner beside HPA, KPA, a static split and the oracle. Simulated.

    python -m benchmarks.mixed_load --json

Everything is simulated (docs/simulation.md): the replicas by a roofline of the NPU, the planner is the operator's own. The last column
repeats what was once reported for other hardware; it is not comparable and stands there for orientation only.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from npufleet_operator.simulator.allocations import candidates
from npufleet_operator.simulator.policies import Deployments
from npufleet_operator.simulator.scenario import Scenario, load_scenario
from npufleet_operator.simulator.simulate import Result, Simulation, best, simulate
from npufleet_operator.simulator.workload import ClosedLoop

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "mixed-load"
SHARE = 1
REPORTED = {50: 98.2, 100: 96.8, 200: 94.5, 500: 91.2}
"""Percent, as once reported for other hardware and another method, by concurrent requests."""
BASELINES = ("hpa", "kpa", "static")


def promise_seconds(scenario: Scenario) -> float:
    """The longest that a class may serve with less than a guarantee that it uses: cooldown, drain and load."""
    rebalancing = scenario.pool.rebalancing
    return rebalancing.cooldown_seconds + rebalancing.drain_seconds + max(model.roofline.load_seconds for model in scenario.models)


def run(scenario: Scenario, clients: int, seconds: float, seed: int) -> dict[str, Result]:
    """Every policy. `oracle` is the best of all fixed allocations, `oracle-within-guarantees` of those that keep the pool's promise to
    its classes."""
    loop = ClosedLoop(clients)
    results = {name: simulate(scenario, loop, name, seconds, seed) for name in ("npufleet", *BASELINES)}
    fixed = [Simulation(scenario, loop, seconds, seed).run(Deployments(), allocation) for allocation in candidates(scenario)]
    kept = [result for result in fixed if result.longest_below_guarantee_seconds <= promise_seconds(scenario)]
    results["oracle"] = best(fixed)
    results["oracle-within-guarantees"] = best(kept)
    return results


def verdict(results: dict[str, Result], promise: float) -> dict[str, Any]:
    """What the aim says of these results."""
    ours, oracle, kept = results["npufleet"], results["oracle"], results["oracle-within-guarantees"]
    return {
        "percent_of_oracle": _percent(ours.attainment_percent, oracle.attainment_percent),
        "percent_of_oracle_within_guarantees": _percent(ours.attainment_percent, kept.attainment_percent),
        "percent_of_oracle_within_guarantees_by_class": {
            name: _percent(value, kept.attainment_by_class[name]) for name, value in ours.attainment_by_class.items()
        },
        "lead_over_best_baseline": round(ours.attainment_percent - max(results[name].attainment_percent for name in BASELINES), 2),
        "guarantee_kept": ours.longest_below_guarantee_seconds <= promise,
        "lost_requests": ours.lost_requests,
    }


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 1) if whole else 100.0


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=list(REPORTED), help="concurrent requests")
    parser.add_argument("--minutes", type=float, default=30.0, help="simulated time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    scenario = load_scenario(EXAMPLE / "pool.yaml", EXAMPLE / "models.yaml")
    promise = promise_seconds(scenario)
    table: dict[str, Any] = {}
    for clients in options.clients:
        results = run(scenario, clients, options.minutes * 60, options.seed)
        table[str(clients)] = {
            "policies": {name: result.document() for name, result in results.items()},
            "aim": verdict(results, promise),
            "reported_for_other_hardware_percent": REPORTED.get(clients),
        }
    if options.json:
        print(json.dumps({"simulated": True, "minutes": options.minutes, "seed": options.seed, "clients": table}, indent=2))
        return
    print(f"simulated, {options.minutes:g} minutes, attainment in % (chat / document / code)")
    for count, row in table.items():
        print(f"{count} concurrent requests (once reported for other hardware: {row['reported_for_other_hardware_percent']} %)")
        for name, r in row["policies"].items():
            classes = " / ".join(f"{value:5.1f}" for value in r["attainment_by_class"].values())
            held = f"utilisation {r['utilisation_percent']:.1f} %, {r['npu_hours']:.2f} NPU-hours"
            print(f"  {name:25} {r['attainment_percent']:5.1f} ({classes})  {held}")
        print(f"  {json.dumps(row['aim'])}")


if __name__ == "__main__":
    main()
