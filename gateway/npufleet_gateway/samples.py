"""What the metrics page reads from the gateway's state at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from npufleet_api.accounting import Accounting
from npufleet_gateway.admission import Admission
from npufleet_gateway.balancer import Balancer
from npufleet_gateway.breaker import BreakerState
from npufleet_gateway.hold import Holder
from npufleet_gateway.keys import KeyRing
from npufleet_gateway.metrics import Sample
from npufleet_gateway.reflector import Reflector
from npufleet_gateway.routing import ModelKey, ReplicaState
from npufleet_gateway.view import ClusterView


def samples(
    view: ClusterView,
    keys: KeyRing,
    admission: Admission,
    holder: Holder,
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
    if keys.required:
        text = "Entries of the Secret of API keys: usable, refused, or usable but of a class that the pool does not have."
        unknown = {name for name, _ in keys.unknown_classes}
        for state, count in (("valid", keys.valid), ("refused", len(keys.refused)), ("unknown_class", len(unknown))):
            found.append(Sample("npufleet_gateway_api_keys", text, count, (("state", state),)))
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
        found.append(Sample("npufleet_gateway_held", "Requests held for a first replica.", holder.held(route.model.key), model))
        found.extend(_class_samples(route.model.key, accounting))
        found.extend(_door_samples(route.model.key, admission))
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


def _door_samples(key: ModelKey, admission: Admission) -> list[Sample]:
    slots = admission.slots_of(key)
    if slots is None:
        return []
    model = (("namespace", key[0]), ("model", key[1]))
    found = [Sample("npufleet_gateway_slots", "Requests that the model's replicas take at once from this gateway.", slots, model)]
    for name, standing in admission.standing(key).items():
        labels = (*model, ("workload_class", name))
        for what, text, value in (
            ("queue_length", "Requests that wait for a slot.", standing.queued),
            ("slots_in_use", "Slots that the class holds.", standing.running),
            ("slots_guaranteed", "Slots that the class gets when all saturate the model.", standing.guaranteed),
            ("slots_borrowed", "Slots that the class holds beyond its guarantee: lent to it.", standing.borrowed),
        ):
            found.append(Sample(f"npufleet_gateway_{what}", text, value, labels))
    return found
