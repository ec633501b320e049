"""Models from a hub on the real cluster: fetched once, kept on the node, and what goes wrong told in a condition."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from npufleet_operator.core.objects.common import NON_ROOT_UID
from support.hub_server import Hub, serve_hub
from support.team import Team

TOKEN = "hf_token_of_the_team"


@contextmanager
def hub_thread(hub: Hub, host: str) -> Iterator[Hub]:
    """Serve the hub on an address that pods reach, beside the test."""
    loop = asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with serve_hub(hub, host):
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def own_address(towards: str) -> str:
    """This host's address as the cluster sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards.rpartition(":")[0], 80))
        return str(probe.getsockname()[0])


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A directory of the node that belongs to the pods' user."""
    folder = tmp_path / "model-cache"
    folder.mkdir()
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    os.chown(folder, NON_ROOT_UID, NON_ROOT_UID)
    return folder


@pytest.mark.timeout(600)
def test_a_model_of_a_hub_is_fetched_once_and_served_from_the_nodes_cache(
    own_pool: Callable[..., Team], tiny_folder: Path, cache: Path
) -> None:
    team = own_pool(models={"cache": {"hostPath": str(cache), "sizeLimitGi": 1}})
    files = {path.name: path.read_bytes() for path in tiny_folder.iterdir() if path.is_file()}
    with hub_thread(Hub(dict(files), token=TOKEN), own_address(team.address)) as hub:
        model = {"uri": "hf://org/tiny", "endpoint": hub.url, "secretRef": {"name": "hub"}, "servedName": f"{team.namespace}-hub"}
        team.apply_model("hub", model=model)
        told = team.wait_condition("hub", "Available", "False", "SourceUnauthorized")
        assert "model.secretRef: the Secret is missing" in told["message"]
        team.kubectl("create", "secret", "generic", "hub", f"--from-literal=token={TOKEN}")
        team.wait_ready("hub", 240)
        team.wait_routed("hub")
        source = team.model("hub")["status"]["source"]
        assert source["revision"] == hub.commit
        pinned = team.condition("hub", "RevisionPinned")
        assert pinned is not None
        assert (pinned["reason"], hub.commit in pinned["message"]) == ("FloatingRevision", True)

        # A further replica starts from the cache, and from the commit that the first one saw.
        hub.commit_files("b" * 40, {**files, "config.json": b"{}"})
        seen = len(hub.requests)
        team.kubectl("delete", "pods", "-l", "npufleet.dev/model=hub", "--wait=true", "--grace-period=1")
        team.wait_ready("hub", 240)
        assert len(hub.requests) == seen
        assert team.model("hub")["status"]["source"]["cachedSeconds"] > 0

        # A new revision is on the node before a replica is replaced, and then starts from the cache.
        hub.commit_files("c" * 40, {**files, "LICENSE": b"another one"})
        team.apply_model("hub", model={**model, "revision": "c" * 40})
        team.wait_condition("hub", "RolledOut", "False", "Preloading")
        team.wait_ready("hub", 240)
        status = team.model("hub")["status"]
        assert status["source"]["revision"] == "c" * 40
        assert "fetchSeconds" not in status["source"] or status["source"]["fetchSeconds"] == 0
        assert not team.kubectl("get", "jobs", "-o", "name").strip()

        # A revision that is not there is told, and what serves goes on.
        team.apply_model("hub", model={**model, "revision": "no-such"})
        told = team.wait_condition("hub", "RolledOut", "False")
        team.kubectl.wait("the missing revision to be told", lambda: _says(team, "no revision 'no-such'"), 120)
        assert team.chat("hub")
        for shown in (team.kubectl("get", "ascendmodel,pods,configmaps,events", "-o", "yaml"), str(hub.leaked)):
            assert TOKEN not in shown


def _says(team: Team, words: str) -> bool:
    conditions = team.model("hub")["status"]["conditions"]
    return any(words in condition["message"] for condition in conditions)
