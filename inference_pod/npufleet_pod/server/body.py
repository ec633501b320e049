"""What all request bodies have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """Base of all request bodies: unknown fields are ignored, as OpenAI does."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=(), serialize_by_alias=True)
