"""A model's PodDisruptionBudget. For pods without a workload controller only an integer `minAvailable` works."""

from __future__ import annotations

from npufleet_operator.core.naming import model_child
from npufleet_operator.core.objects.common import Manifest, model_metadata, model_selector
from npufleet_operator.core.observed import ModelView


def build_disruption_budget(model: ModelView, replicas: int) -> Manifest:
    """Others may evict one replica of several, and never the last: a cordoned node's replicas are replaced by the operator first."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": model_metadata(model, model_child(model.name)),
        "spec": {"minAvailable": max(1, replicas - 1), "selector": {"matchLabels": model_selector(model)}},
    }
