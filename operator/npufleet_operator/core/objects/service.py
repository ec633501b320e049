"""A model's Service: a stable in-cluster name for its ready engines, beside the gateway."""

from __future__ import annotations

from npufleet_api.contract import ENGINE_PORT
from npufleet_operator.core.naming import model_child
from npufleet_operator.core.objects.common import Manifest, model_metadata, model_selector
from npufleet_operator.core.observed import ModelView


def build_service(model: ModelView) -> Manifest:
    """Headless: clients that bypass the gateway balance by themselves."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": model_metadata(model, model_child(model.name)),
        "spec": {
            "clusterIP": "None",
            "selector": model_selector(model),
            "ports": [{"name": "http", "port": ENGINE_PORT, "targetPort": ENGINE_PORT, "protocol": "TCP"}],
        },
    }
