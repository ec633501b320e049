"""`npufleet explain` and `npufleet top` against an API server over HTTP, through a kubeconfig."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from click.testing import CliRunner, Result

from npufleet_api import API_VERSION
from npufleet_operator.cli.npufleet import main
from support.fleet import Fleet, model_spec
from support.kube_server import KubeServer


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
async def kubeconfig(tmp_path: Path) -> AsyncIterator[str]:
    server = KubeServer()
    fleet = Fleet()
    fleet.add_model("assistant", model_spec("chat", 2))
    fleet.settle()
    root = f"/apis/{API_VERSION}"
    pool = fleet.observe().pool
    assert pool is not None
    assert pool.spec is not None
    server.put(
        f"{root}/npupools/prod",
        resource("InferencePool", {"name": "prod", "uid": "p", "generation": 1}, pool.spec, pool.status),
    )
    for (namespace, name), model in fleet.models.items():
        metadata = {"name": name, "namespace": namespace, "uid": model.uid, "generation": 1}
        server.put(f"{root}/namespaces/{namespace}/ascendmodels/{name}", resource("AscendModel", metadata, model.spec, model.status))
    server.fail[("GET", f"{root}/npupools/nosuch")] = 404
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config(f"http://127.0.0.1:{runner.addresses[0][1]}")), encoding="utf-8")
    yield str(path)
    await runner.cleanup()


def resource(kind: str, metadata: dict[str, Any], spec: Any, status: Any) -> dict[str, Any]:
    parts = {name: part.model_dump(mode="json", by_alias=True, exclude_unset=True) for name, part in (("spec", spec), ("status", status))}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, **parts}


def config(server: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
    }


@pytest.mark.parametrize("name", [["assistant"], ["team/assistant"], ["assistant", "-n", "team"]])
async def test_a_model_is_found_in_the_contexts_namespace_or_the_one_that_is_named(kubeconfig: str, name: list[str]) -> None:
    done = await asyncio.to_thread(invoke, "explain", "model", *name, "--kubeconfig", kubeconfig)
    assert done.exit_code == 0, done.output
    assert "AscendModel team/assistant\n  at 2 replica(s)" in done.stdout


async def test_a_pool_is_explained(kubeconfig: str) -> None:
    done = await asyncio.to_thread(invoke, "explain", "pool", "prod", "--kubeconfig", kubeconfig)
    assert done.exit_code == 0, done.output
    assert "8 NPU(s) nominal" in done.stdout
    assert "team/assistant" in done.stdout


async def test_top_shows_all(kubeconfig: str) -> None:
    done = await asyncio.to_thread(invoke, "top", "--kubeconfig", kubeconfig)
    assert done.exit_code == 0, done.output
    assert {"prod", "chat", "team/assistant"} <= {line.split()[0] for line in done.stdout.splitlines() if line}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "model", "nosuch"], "there is no AscendModel 'nosuch' in namespace 'team'"),
        (["explain", "pool", "nosuch"], "there is no InferencePool 'nosuch'"),
        (["explain", "pool", "prod", "--context", "other"], "kubeconfig"),
    ],
)
async def test_what_is_not_there_is_said_in_one_line(kubeconfig: str, arguments: list[str], message: str) -> None:
    done = await asyncio.to_thread(invoke, *arguments, "--kubeconfig", kubeconfig)
    assert done.exit_code == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_cluster_that_does_not_answer_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config("http://127.0.0.1:1")), encoding="utf-8")
    done = invoke("top", "--kubeconfig", str(path))
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: GET /apis/npufleet.dev/v1alpha1/npupools")


def test_a_kubeconfig_that_is_not_there_is_said(tmp_path: Path) -> None:
    done = invoke("top", "--kubeconfig", str(tmp_path / "nosuch"))
    assert done.exit_code == 1
    assert "kubeconfig" in done.stderr
