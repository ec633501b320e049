"""Why a replica does not serve, in the words of whoever knows: scheduler, kubelet or the engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npufleet_api.conditions import Reason
from npufleet_api.contract import EngineExit
from npufleet_api.fetching import FetchReason
from npufleet_operator.core.observed import PodView

IMAGE_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"})
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
EXIT_REASONS = {
    EngineExit.SETTINGS: Reason.SPEC_REFUSED,
    EngineExit.MODEL: Reason.MODEL_UNAVAILABLE,
    EngineExit.DEVICE: Reason.DEVICE_UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class Trouble:
    """What keeps a replica from serving."""

    reason: Reason
    message: str


def diagnose(pod: PodView) -> Trouble | None:
    """None for a replica that serves."""
    if pod.engine_ready:
        return None
    if pod.waiting_reason in IMAGE_REASONS:
        return Trouble(
            Reason.IMAGE_PULL_FAILED, f"pod {pod.name}: image cannot be fetched: {_line(pod.waiting_message) or pod.waiting_reason}"
        )
    if pod.waiting_reason in CONFIG_REASONS:
        return Trouble(Reason.CONFIG_ERROR, f"pod {pod.name}: {pod.waiting_reason}: {_line(pod.waiting_message)}")
    if not pod.node and pod.scheduling_message:
        if "persistentvolumeclaim" in pod.scheduling_message:
            return Trouble(
                Reason.MODEL_UNAVAILABLE,
                f"pod {pod.name}: spec.model.uri: {_line(pod.scheduling_message)}; create the claim in the model's namespace",
            )
        return Trouble(Reason.UNSCHEDULABLE, f"pod {pod.name}: {_line(pod.scheduling_message)}")
    if pod.fetch is not None and pod.fetch.reason is not None and not pod.engine_started:
        return Trouble(Reason(pod.fetch.reason.value), f"pod {pod.name}: {_line(pod.fetch.message)}")
    if pod.fetching:
        return Trouble(Reason.FETCHING, f"pod {pod.name} fetches the model; see status.source.download")
    if pod.terminated_reason == "OOMKilled" and not pod.engine_started:
        return Trouble(Reason.OUT_OF_MEMORY, f"pod {pod.name}: spec.resources.memory: the engine needs more than its limit; raise it")
    if pod.terminated_message and not pod.engine_started:
        reason = next((r for code, r in EXIT_REASONS.items() if code == pod.exit_code), Reason.ENGINE_FAILED)
        return Trouble(reason, f"pod {pod.name}: {_line(pod.terminated_message)}")
    if pod.engine_restarts > 0 and not pod.engine_started:
        return Trouble(
            Reason.ENGINE_FAILED, f"pod {pod.name}: engine restarted {pod.engine_restarts} times; see kubectl logs {pod.name} -c engine -p"
        )
    return Trouble(Reason.LOADING, f"pod {pod.name} is loading")


_SEVERITY = (
    Reason.IMAGE_PULL_FAILED,
    Reason.SPEC_REFUSED,
    Reason.MODEL_UNAVAILABLE,
    *(Reason(reason.value) for reason in FetchReason),
    Reason.DEVICE_UNAVAILABLE,
    Reason.OUT_OF_MEMORY,
    Reason.CONFIG_ERROR,
    Reason.ENGINE_FAILED,
    Reason.UNSCHEDULABLE,
    Reason.FETCHING,
    Reason.LOADING,
)


def worst(pods: Sequence[PodView]) -> Trouble | None:
    """The most telling trouble among `pods`; what a person must act on comes before what only takes time."""
    troubles = [trouble for pod in pods if (trouble := diagnose(pod))]
    return min(troubles, key=lambda t: _SEVERITY.index(t.reason), default=None)


def _line(text: str) -> str:
    """The last line that says something: engines end with one clear line, whatever came before it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:600] if lines else ""
