"""What a model's status tells of its files: what was fetched, how long that took, and how far running fetches are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from npufleet_api.fetching import FetchProgress
from npufleet_api.model import Download, SourceStatus
from npufleet_operator.core.measured import round_figure
from npufleet_operator.core.objects.source import asked, is_fetched
from npufleet_operator.core.observed import ModelView, PodView


def source_status(model: ModelView, pods: Sequence[PodView], fetches: Mapping[str, FetchProgress]) -> SourceStatus | None:
    """None for a model whose files are not fetched. What was learned stays until the spec asks for something else."""
    spec, before = model.spec, model.status.source
    if spec is None:
        return before
    if not is_fetched(spec):
        return None
    wanted = asked(spec)
    if before is None or before.asked != wanted:
        before = SourceStatus(asked=wanted)
    mine = sorted((pod for pod in pods if pod.source_asked == wanted), key=lambda pod: (pod.created, pod.name))
    ended = [pod.fetch for pod in mine if pod.fetch is not None and pod.fetch.reason is None]
    status = before.model_copy(update={"download": _download([fetches[pod.uid] for pod in pods if pod.uid in fetches])})
    for outcome in ended:
        seconds = max(1, round_figure(outcome.seconds))
        status = status.model_copy(
            update={
                # The first replica's word holds: what the others fetch is pinned to it.
                "revision": status.revision or outcome.revision,
                "digest": status.digest or outcome.digest,
                "bytes": outcome.bytes,
                "files": outcome.files,
                "fetch_seconds" if outcome.bytes_fetched else "cached_seconds": seconds,
            }
        )
    return status


def _download(running: Sequence[FetchProgress]) -> Download | None:
    """The one that has most left to do stands for all."""
    if not running:
        return None
    last = max(running, key=lambda p: (p.bytes_total - p.bytes_done, p.phase))
    return Download(
        phase=last.phase.value,
        pods=len(running),
        bytes_done=last.bytes_done,
        bytes_total=last.bytes_total,
        bytes_per_second=round_figure(last.bytes_per_second),
        seconds_left=None if last.seconds_left is None else round_figure(last.seconds_left),
    )
