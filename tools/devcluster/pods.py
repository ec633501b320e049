"""Pods for tests: small Python programs in the development image, as restricted as a tenant's (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from devcluster.settings import DEV_IMAGE

FOREVER = "import time; time.sleep(3600)"
"""A program that waits until it is killed."""


def container(name: str, program: str, **fields: Any) -> dict[str, Any]:
    """A container that runs a Python program under the strictest settings that Pod Security knows."""
    return {
        "name": name,
        "image": DEV_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["python3", "-u", "-c", program],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **fields,
    }


def pod(name: str, containers: Sequence[Mapping[str, Any]], *, labels: Mapping[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """A Pod object; it is ended without delay unless `spec` says otherwise."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {"containers": list(containers), "terminationGracePeriodSeconds": 1, **spec},
    }
