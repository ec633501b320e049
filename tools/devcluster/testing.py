"""What tests on a cluster need: kubectl in a namespace, waiting that explains itself."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from devcluster.cluster import Cluster
from devcluster.errors import CommandError, DevclusterError

_T = TypeVar("_T")
_POLL_SECONDS = 0.2
_LOG_LINES = 40

Object = Mapping[str, Any]


class WaitTimeoutError(DevclusterError, AssertionError):
    """What was waited for did not come; the message ends with pods, events and logs of the namespace."""


def wait_until(what: str, check: Callable[[], _T | None], timeout_seconds: float = 60.0) -> _T:
    """Call `check` until it returns something true, and return that; raises WaitTimeoutError.

    A CommandError inside `check` counts as "not yet": what is waited for often does not exist at first.
    """
    deadline, last = time.monotonic() + timeout_seconds, "nothing yet"
    while True:
        try:
            result = check()
            if result:
                return result
            last = repr(result)
        except CommandError as error:
            last = str(error)
        if time.monotonic() > deadline:
            raise WaitTimeoutError(f"waited {timeout_seconds:.0f} s for {what}; last seen: {last}")
        time.sleep(_POLL_SECONDS)


@dataclass(frozen=True)
class Kubectl:
    """kubectl bound to one namespace of one cluster."""

    cluster: Cluster
    namespace: str

    def __call__(self, *arguments: str, stdin: str | None = None, timeout_seconds: float | None = 60.0) -> str:
        """Run kubectl in the namespace; returns its output, raises CommandError."""
        # In front, since after `exec … --` arguments belong to the program in the container.
        return self.cluster.run_kubectl(f"--namespace={self.namespace}", *arguments, stdin=stdin, timeout_seconds=timeout_seconds)

    def apply(self, *objects: Object | str) -> None:
        """Server-side apply of objects (mappings) or YAML texts."""
        for item in objects:
            text = item if isinstance(item, str) else json.dumps(item)
            self("apply", "--server-side", "-f", "-", stdin=text)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """One object; raises CommandError when it is not there."""
        return dict(json.loads(self("get", kind, name, "-o", "json")))

    def list(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        """All objects of a kind in the namespace, those with these labels only if `selector` is given."""
        return list(json.loads(self("get", kind, "-l", selector, "-o", "json"))["items"])

    def wait(self, what: str, check: Callable[[], _T | None], timeout_seconds: float = 60.0) -> _T:
        """`wait_until`, whose error shows what is going on in the namespace."""
        try:
            return wait_until(what, check, timeout_seconds)
        except WaitTimeoutError as error:
            raise WaitTimeoutError(f"{error}\n{self.diagnosis()}") from None

    def wait_pod_ready(self, name: str, timeout_seconds: float = 60.0) -> dict[str, Any]:
        """The pod once its condition Ready is True."""

        def ready() -> dict[str, Any] | None:
            pod = self.get("pod", name)
            conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
            return pod if conditions.get("Ready") == "True" else None

        return self.wait(f"pod {name} to be Ready", ready, timeout_seconds)

    def wait_pod_phase(self, name: str, *phases: str, timeout_seconds: float = 60.0) -> dict[str, Any]:
        """The pod once it is in one of `phases`."""

        def reached() -> dict[str, Any] | None:
            pod = self.get("pod", name)
            return pod if pod["status"].get("phase") in phases else None

        return self.wait(f"pod {name} to be {' or '.join(phases)}", reached, timeout_seconds)

    def wait_gone(self, kind: str, name: str, timeout_seconds: float = 60.0) -> None:
        """Return once the object does not exist any more."""
        self.wait(
            f"{kind} {name} to be gone",
            lambda: not self("get", kind, name, "--ignore-not-found", "-o", "name"),
            timeout_seconds,
        )

    def diagnosis(self) -> str:
        """Pods, events and the end of every container's log, as text; never raises."""
        parts = []
        questions = {"pods": ("get", "pods", "-o", "wide"), "events": ("get", "events", "--sort-by=.lastTimestamp")}
        for title, question in questions.items():
            try:
                parts.append(f"--- {title}\n{self(*question)}")
            except CommandError as error:
                parts.append(f"--- {title}: {error}")
        pods: list[dict[str, Any]] = []
        with contextlib.suppress(CommandError):
            pods = self.list("pods")
        for pod in pods:
            name = pod["metadata"]["name"]
            for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
                arguments = ("logs", name, "-c", container["name"], f"--tail={_LOG_LINES}")
                with contextlib.suppress(CommandError):  # it has not started
                    parts.append(f"--- log of {name}/{container['name']}\n{self(*arguments)}")
        return "\n".join(parts)
