"""What the metrics page reads from the gateway's state at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from npufleet_api.accounting import Accounting
from npufleet_gateway.balancer import Balancer
from npufleet_gateway.breaker import BreakerState
from npufleet_gateway.metrics import Sample
from npufleet_gateway.reflector import Reflector
from npufleet_gateway.routing import ModelKey, ReplicaState
from npufleet_gateway.view import ClusterView


def samples(
    view: ClusterView,
    reflectors: Iterable[Reflector],
    accounting: Accounting,
    balancer: Balancer,
    view_age_seconds: float | None,
    *,
    ready: bool,
) -> list[Sample]:
    """All samples of this moment."""
    found = [Sample("npufleet_gateway_ready", "Whether the gateway takes new connections.", float(ready))]
    if view_age_seconds is not None:
        found.append(Sample("npufleet_gateway_view_age_seconds", "Age of the view of models and pods.", view_age_seconds))
    for kind, unparsable in (("AscendModel", view.models.unparsable), ("Pod", view.pods.unparsable)):
        text = "Objects that cannot be parsed."
        found.append(Sample("npufleet_gateway_unparsable_objects", text, unparsable, (("kind", kind),)))
    for reflector in reflectors:
        stats = reflector.stats
        for what, value in (
            ("lists", stats.lists),
            ("watches", stats.watches),
            ("events", stats.events),
            ("expired", stats.expired),
            ("timeouts", stats.timeouts),
            ("errors", stats.errors),
        ):
            labels = (("kind", reflector.resource.kind), ("what", what))
            found.append(Sample("npufleet_gateway_watch", "What happened to lists and watches.", value, labels, counter=True))
    for route in view.table.routes:
        model = (("namespace", route.model.namespace), ("model", route.model.name), ("workload_class", route.model.workload_class))
        states = Counter(replica.state for replica in route.replicas)
        found.extend(
            Sample("npufleet_gateway_replicas", "Replicas by state.", states[state], (*model, ("state", state.value)))
            for state in ReplicaState
        )
        found.extend(_class_samples(route.model.key, accounting))
        breakers = Counter(balancer.breaker_state(replica.pod_uid) for replica in route.ready)
        found.extend(
            Sample(
                "npufleet_gateway_breakers",
                "Circuit breakers of ready replicas by state.",
                breakers[state],
                (*model, ("state", state.value)),
            )
            for state in BreakerState
        )
    return found


def _class_samples(key: ModelKey, accounting: Accounting) -> list[Sample]:
    found = []
    for name, traffic in accounting.classes(key).items():
        labels = (("namespace", key[0]), ("model", key[1]), ("workload_class", name))
        found.append(Sample("npufleet_gateway_in_flight", "Requests in flight.", traffic.in_flight, labels))
        windows = [(traffic.window_seconds, traffic.judged, traffic.attained)]
        windows += [(window.window_seconds, window.judged, window.attained) for window in accounting.windows(key, name)]
        found.extend(
            Sample(
                "npufleet_gateway_slo_attainment_ratio",
                "Share of the judged requests that met every target, in the latest seconds; absent without any.",
                attained / judged,
                (*labels, ("window_seconds", f"{seconds:g}")),
            )
            for seconds, judged, attained in windows
            if judged
        )
    return found
