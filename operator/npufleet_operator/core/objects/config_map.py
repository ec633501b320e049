"""Settings files of engines and monitors."""

from __future__ import annotations

import json

from npufleet_api.contract import ENGINE_SETTINGS_FILE, MONITOR_SETTINGS_FILE, REVISION_LABEL
from npufleet_api.fetching import FETCH_SETTINGS_FILE
from npufleet_api.model import RuntimeName
from npufleet_api.pool import InferencePoolSpec
from npufleet_api.settings import MonitorSettings
from npufleet_operator.core.engine_settings import settings_document
from npufleet_operator.core.naming import monitor_child, settings_child
from npufleet_operator.core.objects.common import Manifest, model_metadata
from npufleet_operator.core.objects.pod import Blueprint
from npufleet_operator.core.objects.source import fetch_document
from npufleet_operator.core.objects.vllm import USERS, USERS_FILE
from npufleet_operator.core.observed import ModelView


def build_engine_settings(model: ModelView, plan: Blueprint) -> Manifest:
    """One ConfigMap per revision, so that a container that restarts during a rollout reads the settings of its own revision."""
    metadata = model_metadata(model, settings_child(model.name, plan.revision))
    metadata["labels"] = {**metadata["labels"], REVISION_LABEL: plan.revision}
    vllm = plan.runtime is RuntimeName.VLLM_ASCEND
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {
            **({USERS_FILE: USERS} if vllm else {ENGINE_SETTINGS_FILE: _yaml(settings_document(plan.settings))}),
            **({FETCH_SETTINGS_FILE: _yaml(fetch_document(plan.fetch))} if plan.fetch else {}),
        },
    }


def build_monitor_settings(model: ModelView, pool: InferencePoolSpec) -> Manifest:
    """One ConfigMap per model; monitors read it again when it changes."""
    settings = MonitorSettings(
        pool=model.pool_name,
        model_namespace=model.namespace,
        model_name=model.name,
        served_name=model.served_name,
        workload_class=model.spec.workload_class if model.spec else "",
        device=pool.pod_template.device,
        alerts=pool.alerts,
    )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": model_metadata(model, monitor_child(model.name)),
        "data": {MONITOR_SETTINGS_FILE: _yaml(settings.model_dump(mode="json", by_alias=True))},
    }


def _yaml(content: object) -> str:
    """JSON is YAML; written so, the planner needs no YAML library."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
