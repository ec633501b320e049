"""A new revision's files are in the caches before a replica is replaced: the old one serves while they come, and no NPU waits for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from npufleet_api.model import AscendModelSpec, Rollout
from npufleet_api.pool import InferencePoolSpec, PreloadMode
from npufleet_operator.core.designs import Design
from npufleet_operator.core.objects.common import Manifest
from npufleet_operator.core.objects.preload_job import build_preload_job
from npufleet_operator.core.objects.source import asked
from npufleet_operator.core.observed import JobState, ModelView, NodeView, OperatorConfig
from npufleet_operator.core.replicas import Replicas

MOST_NODES = 16
"""Nodes that are loaded ahead at once; replicas on others fetch for themselves."""


@dataclass(frozen=True, slots=True)
class Preloading:
    """Jobs that shall be there, and on how many caches the rollout still waits."""

    jobs: tuple[Manifest, ...] = ()
    waiting: int = 0


NONE = Preloading()


def preloading(
    model: ModelView,
    spec: AscendModelSpec,
    pool: InferencePoolSpec,
    config: OperatorConfig,
    design: Design,
    replicas: Replicas,
    jobs: Mapping[tuple[str, str], JobState],
    nodes: Mapping[str, NodeView],
) -> Preloading:
    """Jobs for the nodes on which replicas with other files serve. One that fails holds nothing up: the new replica then says why."""
    cache, wanted = pool.models.cache, asked(spec)
    if (
        design.blueprint.fetch is None
        or cache is None
        or pool.models.preload.mode is PreloadMode.OFF
        or spec.rollout is not Rollout.ROLLING_UPDATE
    ):
        return NONE
    serving = [pod for pod in replicas.outdated if pod.engine_ready and pod.source_asked != wanted]
    # No successor starts on a node that is being emptied.
    places = sorted({pod.node for pod in serving if (node := nodes.get(pod.node)) is not None and node.ready and node.schedulable})[
        :MOST_NODES
    ]
    if cache.claim_name is not None:
        places = [""] if serving else []
    revision = design.blueprint.revision
    manifests = tuple(build_preload_job(model, spec, pool, config, revision, node) for node in places)
    states = [jobs.get((model.namespace, manifest["metadata"]["name"]), JobState.ABSENT) for manifest in manifests]
    return Preloading(manifests, sum(state in (JobState.ABSENT, JobState.RUNNING) for state in states))
