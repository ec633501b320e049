"""Speed of the engine on this CPU beside other engines: `python -m benchmarks.engine --json`.

Tokens a second of 128 new tokens after prompts of 128, greedy, whatever they are, for 1, 8, 32 and 64 sequences at once, prompts included;
of one prompt of 1,024; and seconds from the start of a process until it can serve. Every engine has a process of its own, one after the
other, with as many threads, on the same weights. One that fails is reported with its reason, and the others go on. `limits` is what the
machine can do at best, `share_of_limit` the least time that each point could take by it over the time that it took.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.engine import bert, limits, own
from benchmarks.engine.peers import PEERS, PeerError, measure
from benchmarks.engine.points import BATCHES, model_size, shares
from benchmarks.real_text import progress, smollm2

ROOT = Path(__file__).parents[2]
ENGINE_SECONDS = 1800
OWN_BITS = {"npufleet-bf16": 16, "npufleet-int8": 8}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="folder of a model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--peers", default="", help=f"comma-separated, of {', '.join(PEERS)} (default: none)")
    parser.add_argument("--engines", default=",".join(own.PRECISIONS), help="comma-separated, of npufleet's own (default: both)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="compute threads of each engine")
    parser.add_argument("--repeats", type=int, default=2, help="runs of the shorter points, of which the best counts (default: 2)")
    parser.add_argument("--profile", action="store_true", help="add the time of each fused part")
    parser.add_argument("--bert", action="store_true", help="add the time of a layer of BERT-base, fused and not")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "BEGAN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    peers = [name for name in arguments.peers.split(",") if name]
    if unknown := [name for name in peers if name not in PEERS] + [
        name for name in arguments.engines.split(",") if name and name not in own.PRECISIONS
    ]:
        parser.error(f"{unknown[0]!r} is unknown: peers are {', '.join(PEERS)}, engines {', '.join(own.PRECISIONS)}")
    model = arguments.model or smollm2()
    if arguments.child:
        what, began = arguments.child
        print(json.dumps(_child(what, float(began), model, arguments.threads, arguments.repeats)))
        return
    found = _all(arguments, model, peers)
    print(json.dumps(found) if arguments.json else _table(found))


def _child(what: str, began: float, model: Path, threads: int, repeats: int) -> Any:
    if what == "limits":
        return limits.measure(threads)
    if what == "bert":
        return bert.measure(threads)
    if what.startswith("profile:"):
        return own.profile(model, threads, what.removeprefix("profile:"))
    return own.measure(what, model, threads, repeats, began)


def _all(arguments: argparse.Namespace, model: Path, peers: list[str]) -> dict[str, Any]:
    failed: dict[str, str] = {}
    found: dict[str, Any] = {"model": model.name, "threads": arguments.threads, "engines": {}, "share_of_limit": {}, "failed": failed}
    bits: dict[str, int] = {}

    def child(what: str) -> Any:
        command = [sys.executable, "-m", "benchmarks.engine", "--model", str(model), "--threads", str(arguments.threads)]
        return _run([*command, "--repeats", str(arguments.repeats), "--child", what], {})

    def attempt(name: str, work: Any) -> Any:
        progress(name)
        try:
            return work()
        except (PeerError, ValueError) as error:
            failed[name] = " ".join(str(error).split())[-500:]
            progress(f"{name} failed: {failed[name]}")
            return None

    found["limits"] = attempt("limits", lambda: child("limits"))
    for name in filter(None, arguments.engines.split(",")):
        if points := attempt(name, lambda name=name: child(name)):
            found["engines"][name], bits[name] = points, OWN_BITS[name]
    for peer in peers:
        for kind, (_, own_bits) in PEERS[peer].kinds.items():

            def measured(peer: str = peer, kind: str = kind) -> dict[str, float]:
                return measure(PEERS[peer], kind, model, arguments.threads, arguments.repeats, _run)

            if points := attempt(kind, measured):
                found["engines"][kind], bits[kind] = points, own_bits
    if found["limits"]:
        size, best = model_size(model), found["limits"]
        read, flops = best["memory_read_gb_s"] * 1e9, best["matmul_tflop_s"] * 1e12
        found["share_of_limit"] = {name: shares(points, size, bits[name], read, flops) for name, points in found["engines"].items()}
    if arguments.profile:
        found["profile"] = {name: attempt(f"profile of {name}", lambda name=name: child(f"profile:{name}")) for name in own.PRECISIONS}
    if arguments.bert:
        found["bert_base"] = attempt("bert", lambda: child("bert"))
    return found


def _run(command: list[str], more: Mapping[str, str]) -> Any:
    """What a process prints last, as JSON; it is told when it was started. Raises PeerError."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false", **more}
    try:
        done = subprocess.run(
            [*command, str(time.time())],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=ENGINE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"took longer than {ENGINE_SECONDS} s") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise PeerError(f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-500:] or 'nothing was printed'}")
    return json.loads(lines[-1])


def _table(found: Mapping[str, Any]) -> str:
    columns = [*(f"b{batch}_tok_s" for batch in BATCHES), "prefill_1024_tok_s", "start_s"]
    lines = [f"{'':20}" + "".join(f"{name:>20}" for name in columns)]
    for name, points in found["engines"].items():
        lines.append(f"{name:20}" + "".join(f"{points.get(column, '-'):>20}" for column in columns))
        if share := found["share_of_limit"].get(name):
            lines.append(f"{'  share of limit':20}" + "".join(f"{share.get(column, ''):>20}" for column in columns))
    lines += [f"{name} failed: {reason}" for name, reason in found["failed"].items()]
    lines.append("limits: " + json.dumps(found["limits"]))
    lines += [json.dumps({key: found[key]}, indent=1) for key in ("profile", "bert_base") if key in found]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
