"""The operator's settings, from the chart through options and environment."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Json

from npufleet_operator.core.observed import OperatorConfig


class OperatorSettings(BaseModel):
    """Parsed once at start. A bad value stops the process with a line that names it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: Annotated[str, Field(min_length=1, max_length=63)]
    engine_image: Annotated[str, Field(max_length=512)] = ""
    control_image: Annotated[str, Field(min_length=1, max_length=512)]
    image_pull_policy: Annotated[str, Field(pattern="^(Always|IfNotPresent|Never)$")] = "IfNotPresent"
    gateway_service_account: Annotated[str, Field(min_length=1, max_length=253)] = "npufleet-gateway"
    gateway_service_type: Annotated[str, Field(pattern="^(ClusterIP|NodePort|LoadBalancer)$")] = "ClusterIP"
    gateway_resources: Json[dict[str, Any]] = {}
    image_pull_secrets: tuple[str, ...] = ()
    npu_exporter_url: Annotated[str, Field(max_length=512, pattern=r"^(https?://\S+)?$")] = ""

    record_plans: Annotated[str, Field(max_length=512)] = ""
    """File for recorded plans; empty: none are recorded."""
    record_limit_mi: Annotated[int, Field(ge=1, le=65536)] = 64

    def config(self) -> OperatorConfig:
        """As the planner takes them."""
        return OperatorConfig(**self.model_dump(exclude={"record_plans", "record_limit_mi"}))
