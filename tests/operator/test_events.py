"""Events: counted up when they repeat, bounded by subject, and never a reason to fail."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from npufleet_operator.shell.events import BURST, REFILL_SECONDS, EventRecorder, Subject
from support.kube_server import kube_server

NOISY, QUIET = (Subject("AscendModel", "team", name, f"uid-{name}") for name in ("noisy", "quiet"))


async def test_a_noisy_subject_is_bounded_and_silences_no_other() -> None:
    now = [datetime(2026, 1, 1, tzinfo=UTC)]
    async with kube_server() as (server, client):
        recorder = EventRecorder(client, lambda: now[0])
        for number in range(BURST + 10):
            await recorder.record(NOISY, "ScaledUp", f"starts {number}")
        assert len(server.objects) == BURST
        await recorder.record(QUIET, "ScaledUp", "starts 0")
        assert len(server.objects) == BURST + 1
        now[0] += timedelta(seconds=REFILL_SECONDS)
        await recorder.record(NOISY, "ScaledUp", "starts again")
        assert len(server.objects) == BURST + 2


async def test_what_happens_again_is_counted_up() -> None:
    async with kube_server() as (server, client):
        recorder = EventRecorder(client, lambda: datetime(2026, 1, 1, tzinfo=UTC))
        for _ in range(3):
            await recorder.record(QUIET, "ScaledUp", "starts 0", warning=True)
        (event,) = server.objects.values()
        assert (event["count"], event["type"], event["involvedObject"]["uid"]) == (3, "Warning", "uid-quiet")


async def test_an_event_that_cannot_be_written_is_dropped() -> None:
    async with kube_server() as (server, client):
        server.fail[("PATCH", "/")] = 403
        await EventRecorder(client, lambda: datetime(2026, 1, 1, tzinfo=UTC)).record(QUIET, "ScaledUp", "starts 0")
        assert server.objects == {}
