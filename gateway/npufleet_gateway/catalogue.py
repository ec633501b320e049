"""The models of the pool as OpenAI clients list them. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from npufleet_gateway.errors import model_not_found
from npufleet_gateway.routing import ModelRoute, RoutingTable


def list_models(table: RoutingTable) -> dict[str, Any]:
    """Answer of GET /v1/models: each model once, under its public name."""
    return {"object": "list", "data": [_entry(route) for route in table.routes]}


def get_model(table: RoutingTable, name: str) -> dict[str, Any]:
    """Answer of GET /v1/models/{name}. Raises ApiError (404)."""
    route = table.find(name)
    if route is None:
        raise model_not_found(name)
    return _entry(route)


def _entry(route: ModelRoute) -> dict[str, Any]:
    return {"id": route.public_name, "object": "model", "created": _unix(route.model.created), "owned_by": route.model.namespace}


def _unix(timestamp: str) -> int:
    try:
        return int(datetime.fromisoformat(timestamp).timestamp())
    except ValueError:
        return 0
