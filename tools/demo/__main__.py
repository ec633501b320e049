"""`python -m demo`: from nothing to a chat completion. `python -m demo down` takes it away again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click
from openai import OpenAI, OpenAIError

import devcluster
from demo.install import NAMESPACE, ROOT, apply, install_chart, service_address, volume_manifests
from devcluster import Cluster
from devcluster.errors import DevclusterError

NAME = "demo"
POOL = "demo"
MODEL = "smollm2"
QUESTION = "What is the capital of France?"
READY_SECONDS = 300
EXAMPLE = ROOT / "examples" / "smollm2.yaml"


class Progress:
    """One line per step, with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, message: str) -> None:
        click.echo(f"[{time.monotonic() - self._started:5.1f} s] {message}")


@click.group(invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Bring the demo up, ask the model a question, and leave everything running."""
    if context.invoked_subcommand is None:
        try:
            up()
        except (DevclusterError, OpenAIError, TimeoutError, subprocess.CalledProcessError) as error:
            click.echo(f"demo: {error}", err=True)
            sys.exit(1)


@main.command()
def down() -> None:
    """Take the demo's cluster away. Built binaries and the converted model stay in the cache."""
    devcluster.down(NAME)
    click.echo("the demo's cluster is gone")


def up() -> None:
    """Each step is harmless when repeated."""
    say = Progress()
    weights = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npufleet" / "models" / "smollm2-135m-instruct"
    say("weights of SmolLM2-135M-Instruct")
    subprocess.run([sys.executable, str(ROOT / "tools" / "smollm2.py"), str(weights)], check=True)
    say("a Kubernetes with eight pretend NPUs")
    cluster = devcluster.up(name=NAME, progress=say)
    say("helm upgrade --install npufleet charts/npufleet")
    install_chart(cluster)
    say(f"kubectl apply -f {EXAMPLE.relative_to(ROOT)}")
    apply(cluster, volume_manifests(MODEL, "default", weights))
    cluster.run_kubectl("apply", "-f", str(EXAMPLE))
    wait_ready(cluster, say)
    address = service_address(cluster, f"npufleet-gateway-{POOL}")
    say(f"asking {MODEL} through the gateway: {QUESTION}")
    click.echo(f"\n    {ask(address)}\n")
    click.echo(cluster.run_kubectl("get", "npool,amodel"))
    say("done. To go on:")
    click.echo(
        f"    export KUBECONFIG={cluster.kubeconfig}\n"
        f"    export PATH={cluster.kubectl.parent}:$PATH\n"
        f"    kubectl -n {NAMESPACE} get pods\n"
        f"    curl http://{address}/v1/models\n"
        "    make demo-down"
    )


def wait_ready(cluster: Cluster, say: Progress) -> None:
    """Show what the model's condition Ready says until it is True. Raises TimeoutError with its last message."""
    deadline = time.monotonic() + READY_SECONDS
    shown = ""
    while True:
        model = json.loads(cluster.run_kubectl("get", "amodel", MODEL, "-o", "json"))
        conditions = (model.get("status") or {}).get("conditions") or []
        ready = next((c for c in conditions if c["type"] == "Ready"), None)
        text = f"{ready['reason']}: {ready['message']}" if ready else "waiting for the operator"
        if text != shown:
            say(f"{MODEL}: {text}")
            shown = text
        if ready and ready["status"] == "True" and ready["observedGeneration"] == model["metadata"]["generation"]:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{MODEL} is not ready after {READY_SECONDS} s: {text}; see kubectl describe amodel {MODEL}")
        time.sleep(0.5)


def ask(address: str) -> str:
    """A chat completion by the real OpenAI client."""
    with OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=5) as client:
        answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=32)
    return (answer.choices[0].message.content or "").strip()


if __name__ == "__main__":
    main()
