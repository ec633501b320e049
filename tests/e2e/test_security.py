"""What a tenant's AscendModel can and cannot reach, and what npufleet itself may do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from demo.install import NAMESPACE, RELEASE
from devcluster import Cluster
from devcluster.errors import CommandError
from devcluster.pods import FOREVER, container, pod
from support.team import Json, Team

OPERATOR = f"system:serviceaccount:{NAMESPACE}:{RELEASE}-operator"
GATEWAY = f"system:serviceaccount:{NAMESPACE}:{RELEASE}-gateway"
TENANT = "tenant"


def test_pods_run_where_only_restricted_ones_are_admitted(served: Team) -> None:
    """The fixture's namespace enforces it; that the model is ready says the rest."""
    loose = pod("loose", [container("loose", FOREVER, securityContext={"privileged": True})])
    with pytest.raises(CommandError, match="violates PodSecurity"):
        served.kubectl.apply(loose)
    assert served.chat("tiny") == "4 tokens"


def test_a_pod_has_no_token_no_root_and_no_writable_root(served: Team) -> None:
    (replica,) = served.pods("tiny")
    spec = replica["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(spec.get(field) for field in ("hostNetwork", "hostPID", "hostIPC"))
    containers = [*spec["initContainers"], *spec["containers"]]
    assert [c["name"] for c in containers] == ["monitor", "engine"]
    for each in containers:
        assert each["securityContext"]["allowPrivilegeEscalation"] is False
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not any("serviceaccount" in mount["mountPath"] for mount in each["volumeMounts"])
        assert not any("valueFrom" in variable and "secretKeyRef" in variable["valueFrom"] for variable in each["env"])
    assert {kind for volume in spec["volumes"] for kind in volume if kind != "name"} == {"configMap", "emptyDir", "persistentVolumeClaim"}
    model = next(mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "model")
    assert model["readOnly"] is True
    user = served.kubectl("exec", replica["metadata"]["name"], "-c", "engine", "--", "id", "-u").strip()
    assert user == "65532"
    with pytest.raises(CommandError, match="Read-only file system"):
        served.kubectl("exec", replica["metadata"]["name"], "-c", "engine", "--", "touch", "/models/x")


ESCAPES: dict[str, Json] = {
    "hostPath": {"hostPath": "/etc"},
    "podTemplate": {"podTemplate": {"spec": {"hostNetwork": True}}},
    "securityContext": {"securityContext": {"privileged": True}},
    "volumes": {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]},
    "serviceAccountName": {"serviceAccountName": "npufleet-operator"},
    "nodeName": {"nodeName": "node"},
    "env": {"env": [{"name": "LD_PRELOAD", "value": "/x.so"}]},
    "engine.image": {"engine": {"image": "evil:1"}},
    "model.hostPath": {"model": {"uri": "pvc://tiny", "hostPath": "/etc"}},
    "resources.limits": {"resources": {"limits": {"huawei.com/Ascend910": "8"}}},
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_field_that_is_not_the_tenants_is_refused_and_never_stored(served: Team, name: str) -> None:
    text = json.dumps(served.manifest("escape", **ESCAPES[name]))
    create = ("create", "--dry-run=server", "-o", "json", "-f", "-")
    with pytest.raises(CommandError, match="unknown field"):
        served.kubectl(*create, stdin=text)
    stored = json.loads(served.kubectl(*create, "--validate=false", stdin=text))["spec"]
    for part in name.split("."):
        assert part not in stored or name.split(".")[-1] != part
        stored = stored.get(part, {})


def _may(cluster: Cluster, user: str, verb: str, resource: str, namespace: str = "", group: str = "") -> bool:
    """Whether RBAC allows it; groups of service accounts are added, as the API server does."""
    what, _, subresource = resource.partition("/")
    attributes = {"verb": verb, "group": group, "resource": what, "subresource": subresource, "namespace": namespace}
    groups = ["system:authenticated"]
    if user.startswith("system:serviceaccount:"):
        groups += ["system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}"]
    review: dict[str, Any] = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": groups, "resourceAttributes": attributes},
    }
    return cluster.run_kubectl("create", "-f", "-", "-o", "jsonpath={.status.allowed}", stdin=json.dumps(review)) == "true"


def test_neither_operator_nor_gateway_reads_secrets_or_gains_rights(installed: Cluster) -> None:
    denied = [
        *(
            (user, verb, "secrets", ns, "")
            for user in (OPERATOR, GATEWAY)
            for verb in ("get", "list", "create")
            for ns in ("default", NAMESPACE)
        ),
        *((user, "create", "pods/exec", "default", "") for user in (OPERATOR, GATEWAY)),
        *((user, "create", "serviceaccounts/token", NAMESPACE, "") for user in (OPERATOR, GATEWAY)),
        *((user, "create", "clusterrolebindings", "", "rbac.authorization.k8s.io") for user in (OPERATOR, GATEWAY)),
        *((user, "patch", "nodes", "", "") for user in (OPERATOR, GATEWAY)),
        *((user, "impersonate", "users", "", "") for user in (OPERATOR, GATEWAY)),
        (OPERATOR, "create", "deployments", "default", "apps"),
        (OPERATOR, "patch", "ascendmodels", "default", "npufleet.dev"),
        (OPERATOR, "patch", "npupools", "", "npufleet.dev"),
        (GATEWAY, "create", "pods", "default", ""),
        (GATEWAY, "delete", "pods", "default", ""),
        (GATEWAY, "patch", "ascendmodels/status", "default", "npufleet.dev"),
    ]
    allowed = [
        (OPERATOR, "create", "pods", "default", ""),
        (OPERATOR, "patch", "ascendmodels/status", "default", "npufleet.dev"),
        (OPERATOR, "patch", "deployments", NAMESPACE, "apps"),
        (GATEWAY, "watch", "pods", "", ""),
    ]
    assert [case for case in denied if _may(installed, *case)] == []
    assert [case for case in allowed if not _may(installed, *case)] == []


def test_a_tenant_with_rights_to_models_alone_reaches_no_other_namespace(served: Team) -> None:
    role = ("create", "role", TENANT, "--verb=get,list,create,patch,delete", "--resource=ascendmodels.npufleet.dev")
    served.kubectl(*role)
    served.kubectl("create", "rolebinding", TENANT, f"--role={TENANT}", f"--user={TENANT}")

    def apply_as_tenant(manifest: Json) -> None:
        served.kubectl.cluster.run_kubectl(f"--as={TENANT}", "apply", "-f", "-", stdin=json.dumps(manifest))

    elsewhere = served.manifest("theirs", replicas=0)
    elsewhere["metadata"]["namespace"] = "default"
    with pytest.raises(CommandError, match=r"cannot (get|create) resource"):
        apply_as_tenant(elsewhere)
    with pytest.raises(CommandError, match=r"without it|volume path"):
        apply_as_tenant(served.manifest("theirs", model={"uri": "pvc://tiny/../../kube-system"}))
    # A claim is looked for in the model's own namespace, whatever its name looks like.
    apply_as_tenant(served.manifest("theirs", model={"uri": "pvc://default/tiny", "secretRef": {"name": "someone-elses"}}))
    told = served.wait_condition("theirs", "Available", "False", "ModelUnavailable")
    assert '"default" not found' in told["message"]
    (replica,) = served.pods("theirs")
    assert replica["metadata"]["namespace"] == served.namespace
    claims = [v["persistentVolumeClaim"]["claimName"] for v in replica["spec"]["volumes"] if "persistentVolumeClaim" in v]
    assert claims == ["default"]
    assert "someone-elses" not in json.dumps(replica["spec"])
    served.kubectl("delete", "amodel", "theirs")
