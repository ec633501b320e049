"""The chart, rendered by Helm: what it installs, with which rights, and which values it refuses."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from npufleet_api import GROUP, MODEL_PLURAL, POOL_PLURAL
from npufleet_api.contract import OPERATOR_PORT
from npufleet_operator.cli.main import run as run_command
from npufleet_operator.run import watched_kinds
from npufleet_operator.shell.kinds import CHILDREN, DEPLOYMENT, OPTIONAL, POD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # Helm may have to be built first

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "npufleet"
NAMESPACE = "npufleet-system"
DIGEST = f"sha256:{'0123456789abcdef' * 4}"

Helm = Callable[..., subprocess.CompletedProcess[str]]
Object = dict[str, Any]


@pytest.fixture
def helm(helm_binary: Path, tmp_path: Path) -> Helm:
    """Run Helm with folders of its own, so that no plugin or configuration of the machine takes part."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": "/usr/bin:/bin",
            "HELM_CACHE_HOME": str(tmp_path / "cache"),
            "HELM_CONFIG_HOME": str(tmp_path / "config"),
            "HELM_DATA_HOME": str(tmp_path / "data"),
        }
        return subprocess.run([str(helm_binary), *arguments], env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
def render(helm: Helm, tmp_path: Path) -> Callable[..., list[Object]]:
    """Render the chart with `values` and give back its objects."""

    def run(values: Object | None = None, *arguments: str, release: str = "npufleet") -> list[Object]:
        path = tmp_path / "values.yaml"
        path.write_text(yaml.safe_dump(values or {}), encoding="utf-8")
        result = helm("template", release, str(CHART), "--namespace", NAMESPACE, "--values", str(path), *arguments)
        assert result.returncode == 0, result.stderr
        return [document for document in yaml.safe_load_all(result.stdout) if document]

    return run


def one(objects: list[Object], kind: str, component: str = "operator") -> Object:
    """The only object of a kind and component."""
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["labels"]["app.kubernetes.io/component"] == component]
    return found


def operator_pod(objects: list[Object]) -> Object:
    spec: Object = one(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


def environment(objects: list[Object]) -> dict[str, str]:
    (container,) = operator_pod(objects)["containers"]
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def source_text() -> str:
    """The Python source of every process that serves metrics."""
    folders = ("operator", "gateway", "inference_pod")
    return "\n".join(path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).glob("**/*.py"))


def grants(rules: list[Object]) -> set[tuple[str, str, str]]:
    """Rules as (group, resource, verb), each granted once."""
    listed = [(group, resource, verb) for r in rules for group in r["apiGroups"] for resource in r["resources"] for verb in r["verbs"]]
    assert len(listed) == len(set(listed)), "a right is granted twice"
    return set(listed)


def test_lint_finds_nothing(helm: Helm) -> None:
    result = helm("lint", "--strict", str(CHART))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "[WARNING]" not in result.stdout
    assert "[ERROR]" not in result.stdout


def test_it_installs_what_the_operator_needs_and_nothing_else(render: Callable[..., list[Object]]) -> None:
    kinds = sorted(o["kind"] for o in render())
    assert kinds == sorted(
        ["ServiceAccount"] * 2 + ["ClusterRole"] * 2 + ["ClusterRoleBinding"] * 2 + ["Role", "RoleBinding", "Service", "Deployment"]
    )


def test_the_crds_come_along(render: Callable[..., list[Object]]) -> None:
    installed = [o for o in render(None, "--include-crds") if o["kind"] == "CustomResourceDefinition"]
    generated = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / "crds").glob("*.yaml")]
    assert sorted(installed, key=str) == sorted(generated, key=str)


def test_one_operator_runs_at_a_time(render: Callable[..., list[Object]]) -> None:
    spec = one(render(), "Deployment")["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}


def test_the_operator_is_started_as_its_command_line_expects(render: Callable[..., list[Object]]) -> None:
    objects = render(
        {
            "image": {
                "controlPlane": {"repository": "registry.example.com/control", "tag": "1.2.3"},
                "engine": {"repository": "registry.example.com/engine", "digest": DIGEST, "pullPolicy": "Never"},
            },
            "imagePullSecrets": ["pull-a", "pull-b"],
            "gateway": {"serviceType": "LoadBalancer", "resources": {"limits": {"memory": "2Gi"}, "requests": None}},
            "operator": {"logLevel": "debug", "logFormat": "text", "recordPlansMi": 8},
            "monitoring": {"npuExporterUrl": "http://$(HOST_IP):8082/metrics"},
        }
    )
    (container,) = operator_pod(objects)["containers"]
    assert container["command"] == ["npufleet-operator", "run"]
    assert container["args"] == ["--namespace", "$(POD_NAMESPACE)"]
    assert container["image"] == "registry.example.com/control:1.2.3"
    values = environment(objects)
    assert json.loads(values.pop("NPUFLEET_GATEWAY_RESOURCES")) == {"limits": {"memory": "2Gi"}}
    assert {name: value for name, value in values.items() if name.startswith("NPUFLEET_")} == {
        "NPUFLEET_ENGINE_IMAGE": f"registry.example.com/engine@{DIGEST}",
        "NPUFLEET_CONTROL_IMAGE": "registry.example.com/control:1.2.3",
        "NPUFLEET_IMAGE_PULL_POLICY": "Never",
        "NPUFLEET_IMAGE_PULL_SECRETS": "pull-a,pull-b",
        "NPUFLEET_GATEWAY_SERVICE_ACCOUNT": "npufleet-gateway",
        "NPUFLEET_GATEWAY_SERVICE_TYPE": "LoadBalancer",
        "NPUFLEET_NPU_EXPORTER_URL": "http://$(HOST_IP):8082/metrics",
        "NPUFLEET_LOG_LEVEL": "debug",
        "NPUFLEET_LOG_FORMAT": "text",
        "NPUFLEET_RECORD_PLANS": "/var/lib/npufleet/plans.jsonl",
        "NPUFLEET_RECORD_LIMIT_MI": "8",
    }
    assert {"name": "plans", "mountPath": "/var/lib/npufleet"} in container["volumeMounts"]
    assert operator_pod(objects)["imagePullSecrets"] == [{"name": "pull-a"}, {"name": "pull-b"}]


def test_the_images_default_to_the_charts_own_version(render: Callable[..., list[Object]]) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"]
    values = environment(render())
    assert values["NPUFLEET_CONTROL_IMAGE"].endswith(f":{version}")
    assert values["NPUFLEET_ENGINE_IMAGE"].endswith(f":{version}")


def test_the_operator_is_probed_and_measured_on_its_port(render: Callable[..., list[Object]]) -> None:
    objects = render()
    (container,) = operator_pod(objects)["containers"]
    (port,) = container["ports"]
    assert port == {"name": "metrics", "containerPort": OPERATOR_PORT}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    service = one(objects, "Service")["spec"]
    labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert [p["port"] for p in service["ports"]] == [OPERATOR_PORT]


def test_the_operator_holds_no_privilege(render: Callable[..., list[Object]]) -> None:
    pod = operator_pod(render())
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
    assert {next(iter(set(volume) - {"name"})) for volume in pod["volumes"]} == {"emptyDir"}


def test_rights_are_named_one_by_one(render: Callable[..., list[Object]]) -> None:
    for role in [o for o in render() if o["kind"] in ("ClusterRole", "Role")]:
        for group, resource, verb in grants(role["rules"]):
            assert "*" not in (group, resource, verb), role["metadata"]["name"]
            assert resource != "secrets", role["metadata"]["name"]
            assert verb in {"get", "list", "watch", "create", "patch", "update", "delete"}, (resource, verb)
            assert "/" not in resource or resource.endswith("/status"), resource


def test_nobody_may_change_what_users_declare(render: Callable[..., list[Object]]) -> None:
    for role in [o for o in render() if o["kind"] == "ClusterRole"]:
        verbs = {verb for group, resource, verb in grants(role["rules"]) if group == GROUP and "/" not in resource}
        assert verbs == {"get", "list", "watch"}


def test_the_operator_may_do_what_its_code_does(render: Callable[..., list[Object]]) -> None:
    objects = render()
    cluster = grants(one(objects, "ClusterRole")["rules"])
    own = grants(one(objects, "Role")["rules"])
    watched = {(w.kind.group, w.kind.plural, verb) for w in watched_kinds() for verb in ("list", "watch")}
    assert watched <= cluster, "a watch is cluster-wide, and needs rights that are"
    written = [*CHILDREN, POD]
    assert {(kind.group, kind.plural, verb) for kind in written for verb in ("create", "patch", "delete")} <= cluster
    assert {(GROUP, f"{plural}/status", "patch") for plural in (POOL_PLURAL, MODEL_PLURAL)} <= cluster
    gateways = (DEPLOYMENT, *OPTIONAL)
    assert own == {(kind.group, kind.plural, verb) for kind in gateways for verb in ("create", "patch", "delete")}
    for kind in gateways:
        assert {verb for group, _, verb in cluster if group == kind.group} == {"get", "list", "watch"}


def test_every_setting_of_the_operator_is_set_by_the_chart(render: Callable[..., list[Object]]) -> None:
    understood = {str(parameter.envvar) for parameter in run_command.params if parameter.envvar}
    assert {name for name in environment(render({"operator": {"recordPlansMi": 8}})) if name != "POD_NAME"} == understood


def test_the_gateway_only_reads(render: Callable[..., list[Object]]) -> None:
    rights = grants(one(render(), "ClusterRole", "gateway")["rules"])
    assert rights == {
        (group, resource, verb)
        for group, resource in ((GROUP, MODEL_PLURAL), (GROUP, POOL_PLURAL), ("", "pods"))
        for verb in ("get", "list", "watch")
    }


@pytest.mark.parametrize("release", ["npufleet", "a", "x" * 53])
def test_names_fit_together_for_every_release(render: Callable[..., list[Object]], release: str) -> None:
    objects = render(release=release)
    for component in ("operator", "gateway"):
        account = one(objects, "ServiceAccount", component)
        binding = one(objects, "ClusterRoleBinding", component)
        assert binding["roleRef"]["name"] == one(objects, "ClusterRole", component)["metadata"]["name"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": NAMESPACE}]
    assert operator_pod(objects)["serviceAccountName"] == one(objects, "ServiceAccount")["metadata"]["name"]
    assert environment(objects)["NPUFLEET_GATEWAY_SERVICE_ACCOUNT"] == one(objects, "ServiceAccount", "gateway")["metadata"]["name"]
    for o in objects:
        assert len(o["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in o["metadata"]["labels"].values())


def test_scheduling_values_reach_the_operator(render: Callable[..., list[Object]]) -> None:
    values: Object = {
        "nodeSelector": {"kubernetes.io/arch": "arm64"},
        "tolerations": [{"key": "control", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
    }
    assert values.items() <= operator_pod(render({"operator": values})).items()


def test_labels_of_the_site_do_not_replace_the_selectors(render: Callable[..., list[Object]]) -> None:
    deployment = one(render({"operator": {"podLabels": {"team": "platform"}}}), "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels["team"] == "platform"
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_monitoring_is_off_unless_asked_for(render: Callable[..., list[Object]]) -> None:
    assert not [o for o in render() if o["apiVersion"].startswith("monitoring.coreos.com")]
    values = {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}, "prometheusRule": {"enabled": True}}
    asked = render({"monitoring": values})
    monitors = [o for o in asked if o["kind"] == "PodMonitor"]
    assert monitors
    assert all(o["metadata"]["labels"]["release"] == "prometheus" for o in monitors)
    (rules,) = [o for o in asked if o["kind"] == "PrometheusRule"]
    for group in rules["spec"]["groups"]:
        for rule in group["rules"]:
            assert rule["expr"].strip()
            assert rule["annotations"]["summary"]
            assert rule["annotations"]["description"]


def test_alerts_speak_of_metrics_that_exist(render: Callable[..., list[Object]]) -> None:
    (rules,) = [o for o in render({"monitoring": {"prometheusRule": {"enabled": True}}}) if o["kind"] == "PrometheusRule"]
    source = source_text()
    expressions = "\n".join(rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"])
    names = set(re.findall(r"npufleet_[a-z_]+", expressions))
    assert names
    assert not {name for name in names if f'"{name.removesuffix("_total")}"' not in source}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"operatr": {}}, "operatr"),
        ({"operator": {"replicas": 2}}, "replicas"),
        ({"operator": {"logLevel": "loud"}}, "logLevel"),
        ({"operator": {"logFormat": "xml"}}, "logFormat"),
        ({"operator": {"recordPlansMi": -1}}, "recordPlansMi"),
        ({"operator": {"nodeSelector": {"a": 1}}}, "nodeSelector"),
        ({"operator": {"resources": {"limit": {}}}}, "limit"),
        ({"operator": {"resources": {"limits": {"memory": "lots"}}}}, "memory"),
        ({"gateway": {"serviceType": "ExternalName"}}, "serviceType"),
        ({"image": {"engine": {"digest": "sha256:abc"}}}, "digest"),
        ({"image": {"engine": {"repository": ""}}}, "repository"),
        ({"image": {"controlPlane": {"pullPolicy": "Sometimes"}}}, "pullPolicy"),
        ({"image": {"controlPlane": {"version": "1"}}}, "version"),
        ({"imagePullSecrets": [{"name": "pull"}]}, "imagePullSecrets"),
        ({"imagePullSecrets": ["a,b"]}, "imagePullSecrets"),
        ({"monitoring": {"podMonitor": {"enabled": "yes"}}}, "enabled"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_a_value_that_would_be_ignored_or_misread_is_refused(helm: Helm, tmp_path: Path, values: Object, named: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    result = helm("template", "npufleet", str(CHART), "--values", str(path))
    assert result.returncode != 0
    assert named in result.stderr


def test_a_cluster_without_native_sidecars_is_refused(helm: Helm) -> None:
    result = helm("template", "npufleet", str(CHART), "--kube-version", "1.28.9")
    assert result.returncode != 0
    assert "1.29" in result.stderr


def test_the_notes_name_the_next_steps(helm: Helm) -> None:
    result = helm("install", "npufleet", str(CHART), "--namespace", NAMESPACE, "--dry-run=client")
    assert result.returncode == 0, result.stderr
    notes = result.stdout.partition("NOTES:")[2]
    assert f"kubectl -n {NAMESPACE} rollout status deployment/npufleet-operator" in notes
    assert "kubectl get npupools,ascendmodels -A" in notes
