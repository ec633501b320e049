"""What the metrics page reads from the gateway's state at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from npufleet_gateway.accounting import Accounting
from npufleet_gateway.metrics import Sample
from npufleet_gateway.reflector import Reflector
from npufleet_gateway.routing import ReplicaState
from npufleet_gateway.view import ClusterView


def samples(
    view: ClusterView, reflectors: Iterable[Reflector], accounting: Accounting, view_age_seconds: float | None, *, ready: bool
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
        in_flight = accounting.summary(route.model.key).in_flight
        found.append(Sample("npufleet_gateway_in_flight", "Requests in flight.", in_flight, model))
    return found
