"""Building blocks of the resource models: camelCase aliases, bounded strings, list types and CEL rules for the CRD."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """A frozen part of a resource. Unknown fields are ignored: the API server prunes them, and a newer CRD may add some."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore")


class Change(StrEnum):
    """What a change of a field does to what runs."""

    LIVE = "A change is picked up live."
    ROLLS = "A change rolls the pods."
    NEW_PODS = "A change applies to pods created after it."


def spec_field(description: str, change: Change, **constraints: Any) -> Any:
    """A field of a spec: its description, followed by what a change of it does."""
    return Field(description=f"{description} {change}", **constraints)


def list_map(*keys: str) -> dict[str, Any]:
    """Schema extras of a list that server-side apply merges by `keys`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


LIST_SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}
LIST_ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}


def cel(rule: str, message: str, **extra: Any) -> dict[str, Any]:
    """One CEL rule; the message says what to write instead."""
    return {"rule": rule, "message": message, **extra}


def validations(*rules: dict[str, Any]) -> dict[str, Any]:
    """Schema extras that carry CEL rules."""
    return {"x-kubernetes-validations": list(rules)}


DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
QUALIFIED_NAME = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
ENDPOINT_URL = r"^https?://[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?(:[0-9]{1,5})?(/[-A-Za-z0-9._~/]*)?$"
"""Base URL without credentials, query or fragment."""

DnsLabel = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=DNS_LABEL)]
DnsSubdomain = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
ImageRef = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\s]+$")]
EndpointUrl = Annotated[str, StringConstraints(min_length=8, max_length=253, pattern=ENDPOINT_URL)]
Region = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9][-a-z0-9]*$")]
Digest = Annotated[str, StringConstraints(min_length=71, max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")]
Quantity = Annotated[str, StringConstraints(min_length=1, max_length=32, pattern=QUANTITY)]
LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=317, pattern=QUALIFIED_NAME)]
LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]
Text = Annotated[str, StringConstraints(max_length=1024)]
Timestamp = Annotated[str, StringConstraints(max_length=40), Field(json_schema_extra={"format": "date-time"})]
Percent = Annotated[int, Field(ge=0, le=100)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32)]
