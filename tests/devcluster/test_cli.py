"""The command line as a user runs it; nothing here needs a running cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from devcluster import nodes
from devcluster.cli import main
from devcluster.paths import Layout
from devcluster.settings import ClusterSettings, NpuSettings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("DEVCLUSTER_NAME", raising=False)
    return tmp_path


def stored(name: str) -> ClusterSettings:
    settings = ClusterSettings(name=name, network_index=0, npu=NpuSettings(count=3))
    layout = Layout.of(name)
    layout.root.mkdir(parents=True)
    layout.config.write_text(settings.model_dump_json())
    layout.kubeconfig.write_text("apiVersion: v1\n")
    return settings


def test_help_names_every_command() -> None:
    done = subprocess.run([sys.executable, "-m", "devcluster", "--help"], capture_output=True, text=True, check=True)
    for command in ("up", "down", "status", "kubeconfig", "load-image", "nodes", "npu", "kill", "stop", "start", "restart", "which"):
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["kubeconfig"],
        ["npu", "list"],
        ["npu", "fail", "3"],
        ["kill", "etcd"],
        ["nodes", "list"],
        ["nodes", "add", "--fake", "2"],
    ],
)
def test_without_a_cluster_each_command_says_how_to_get_one(home: Path, command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--name", "none"])
    assert result.exit_code == 1
    assert "there is no cluster 'none'; create it with `devcluster up --name none`" in result.output


def test_a_cluster_that_does_not_run_is_told_from_one_that_does_not_exist(home: Path) -> None:
    stored("x")
    result = CliRunner().invoke(main, ["status", "--name", "x"])
    assert result.exit_code == 1
    assert "cluster 'x' is not running; start it with `devcluster up --name x`" in result.output


def test_the_kubeconfig_is_printed_or_pointed_to(home: Path) -> None:
    stored("x")
    assert CliRunner().invoke(main, ["kubeconfig", "--name", "x"]).output == "apiVersion: v1\n"
    assert CliRunner().invoke(main, ["kubeconfig", "--name", "x", "--path"]).output == f"{home}/devcluster/x/kubeconfig\n"


def test_cards_fail_and_heal_while_the_cluster_is_down(home: Path) -> None:
    stored("x")
    run = CliRunner().invoke
    environment = {"DEVCLUSTER_NAME": "x"}
    assert run(main, ["npu", "fail", "0", "2"], env=environment).exit_code == 0
    assert run(main, ["npu", "list"], env=environment).output == "  0  failed\n  1  healthy\n  2  failed\n"
    assert run(main, ["npu", "heal", "0"], env=environment).exit_code == 0
    assert run(main, ["npu", "list"], env=environment).output == "  0  healthy\n  1  healthy\n  2  failed\n"
    refused = run(main, ["npu", "fail", "3"], env=environment)
    assert (refused.exit_code, refused.output) == (1, "Error: no card 3: the node has cards 0 to 2\n")
    unknown = run(main, ["npu", "set", "0", "speed", "1"], env=environment)
    assert "no metric 'speed'; the exporter has" in unknown.output


def test_a_bad_name_and_impossible_cards_are_refused_before_anything_is_done(home: Path) -> None:
    assert "cluster name '../x' is not usable" in CliRunner().invoke(main, ["up", "--name", "../x"]).output
    assert "count 3 is no multiple of unit 2" in CliRunner().invoke(main, ["up", "--name", "x", "--npus", "3", "--npu-unit", "2"]).output
    assert not list(home.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_without_root_the_kind_commands_are_shown(home: Path) -> None:
    home.chmod(0o777)
    program = "import os; from devcluster import up; os.setuid(65534); up('x')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "user id 65534 is not root: run it with sudo" in done.stderr
    assert "kind create cluster" in done.stderr


def test_fake_nodes_are_numbered_on_and_keep_other_pods_away() -> None:
    settings = ClusterSettings(name="x", network_index=0)
    assert nodes.next_index([]) == 0
    assert nodes.next_index(["fake-7", "fake-10", "npu-node-0", "fake-x"]) == 11
    node = nodes.fake_node(7, 16, settings, tainted=True)
    assert node["metadata"]["name"] == "fake-7"
    assert node["status"]["allocatable"]["huawei.com/Ascend910"] == "16"
    assert node["spec"]["taints"][0]["effect"] == "NoSchedule"
    assert "taints" not in nodes.fake_node(7, 16, settings, tainted=False)["spec"]
