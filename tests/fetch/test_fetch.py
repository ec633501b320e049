"""A model of a hub ends in the cache as it is at its source, or in a reason with a remedy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from fetch.conftest import WEIGHTS, Fetch, small_model
from npufleet_fetch.errors import (
    FetchError,
    SourceCorruptError,
    SourceNotFoundError,
    SourceRefusedError,
    SourceUnauthorizedError,
    SourceUnavailableError,
)
from npufleet_fetch.meter import Meter
from support.hub_server import Fault, Hub

NEEDED = {"LICENSE", "config.json", "tokenizer.json", WEIGHTS}
BOTH_HUBS = pytest.mark.parametrize("uri", ["hf://org/tiny", "ms://org/tiny"])


def current(tmp_path: Path) -> dict[str, bytes]:
    """What the engine finds."""
    folder = tmp_path / "models" / "current"
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")}


@BOTH_HUBS
async def test_a_model_is_fetched_whole_and_only_what_an_engine_needs(fetch: Fetch, hub: Hub, tmp_path: Path, uri: str) -> None:
    outcome = await fetch(uri=uri)
    assert current(tmp_path) == {name: hub.files[name] for name in NEEDED}
    assert outcome.reason is None
    assert outcome.files == len(NEEDED)
    assert outcome.bytes == outcome.bytes_fetched == sum(len(hub.files[name]) for name in NEEDED)
    if uri.startswith("hf"):
        assert outcome.revision == hub.commit


@BOTH_HUBS
async def test_a_pinned_revision_in_the_cache_costs_no_network(fetch: Fetch, hub: Hub, tmp_path: Path, uri: str) -> None:
    first = await fetch(uri=uri)
    seen = len(hub.requests)
    again = await fetch(first.revision, uri=uri)
    assert len(hub.requests) == seen
    assert (again.revision, again.digest, again.bytes, again.bytes_fetched) == (first.revision, first.digest, first.bytes, 0)


async def test_a_commit_in_the_cache_costs_no_network_without_a_pin(fetch: Fetch, hub: Hub) -> None:
    await fetch(revision=hub.commit)
    seen = len(hub.requests)
    assert (await fetch(revision=hub.commit)).bytes_fetched == 0
    assert len(hub.requests) == seen


async def test_large_files_come_in_parallel_ranges(fetch: Fetch, hub: Hub) -> None:
    await fetch()
    assert sum(WEIGHTS in line and line.startswith("cdn") for line in hub.requests) == 4


async def test_a_new_commit_takes_unchanged_files_from_the_old_one(fetch: Fetch, hub: Hub, tmp_path: Path) -> None:
    await fetch()
    changed = {**small_model(), "config.json": b'{"new": true}'}
    hub.commit_files("b" * 40, changed)
    hub.requests.clear()
    outcome = await fetch()
    assert outcome.revision == "b" * 40
    assert not any(WEIGHTS in line for line in hub.requests)
    assert current(tmp_path) == {name: changed[name] for name in NEEDED}


async def test_a_replica_fetches_what_the_first_one_did_although_the_branch_has_moved(fetch: Fetch, hub: Hub, tmp_path: Path) -> None:
    hub.commit_files("b" * 40, small_model(1))
    outcome = await fetch("a" * 40)
    assert outcome.revision == "a" * 40
    assert current(tmp_path)[WEIGHTS] == small_model(0)[WEIGHTS]


async def test_a_source_without_commits_that_has_changed_since_the_first_replica_is_refused(fetch: Fetch, hub: Hub) -> None:
    with pytest.raises(SourceCorruptError, match=r"has changed since the first replica .* change model\.uri or model\.revision"):
        await fetch("content-0", uri="ms://org/tiny")


async def test_a_token_reaches_the_hub_and_not_the_host_that_it_redirects_to(
    fetch: Fetch, hub: Hub, secret: Callable[..., None], tmp_path: Path
) -> None:
    hub.token = "hf_very_secret"
    secret(token="hf_very_secret\n")
    for uri in ("hf://org/tiny", "ms://org/tiny"):
        await fetch(uri=uri, credentials=True, scope="team")
        assert current(tmp_path)[WEIGHTS] == hub.files[WEIGHTS]
    assert hub.leaked == []


@pytest.mark.parametrize(
    ("hub_state", "changes", "kind", "words"),
    [
        ({}, {"revision": "no-such"}, SourceNotFoundError, r"no revision 'no-such'.*in model\.revision"),
        ({}, {"uri": "hf://org/absent"}, SourceNotFoundError, r"hf://org/absent .*no such model, or it is private.*model\.secretRef"),
        ({"token": "x"}, {}, SourceNotFoundError, r"or it is private: then name a token in model\.secretRef"),
        ({"token": "x", "gated": True}, {}, SourceUnauthorizedError, r"gated: accept its terms, and name a token in model\.secretRef"),
        (
            {"token": "x"},
            {"credentials": True},
            SourceUnauthorizedError,
            r"status 403: the credentials in model\.secretRef are not accepted",
        ),
        ({"always": {"list": Fault(status=500)}}, {}, SourceUnavailableError, r"status 500, 6 times in a row: check model\.endpoint"),
        ({"always": {"list": Fault(status=429)}}, {}, SourceUnavailableError, r"status 429, 6 times"),
        ({"always": {WEIGHTS: Fault(status=403)}}, {}, SourceUnauthorizedError, r"model\.safetensors: status 403: it asks for credentials"),
        ({"always": {WEIGHTS: Fault(status=404)}}, {}, SourceNotFoundError, r"model\.safetensors: status 404"),
        ({"always": {WEIGHTS: Fault(status=503)}}, {}, SourceUnavailableError, r"model\.safetensors: status 503, 6 times"),
        ({"always": {WEIGHTS: Fault(break_after=0)}}, {}, SourceUnavailableError, r"model\.safetensors: .*6 times in a row"),
        ({"always": {WEIGHTS: Fault(corrupt=True)}}, {}, SourceCorruptError, r"model\.safetensors: SHA-256 is .* the source says"),
        ({"always": {"config.json": Fault(corrupt=True)}}, {}, SourceCorruptError, r"config\.json: git SHA-1 is .* the source says"),
        ({"wrong_sha256": {WEIGHTS}}, {}, SourceCorruptError, r"SHA-256 is .* upload the file again"),
        ({"wrong_size": {WEIGHTS: 4 << 20}}, {}, SourceCorruptError, r"ended after \d+ of \d+ bytes, 6 times"),
        ({"always": {WEIGHTS: Fault(short_by=5)}}, {}, SourceCorruptError, None),
        ({}, {"digest": "sha256:" + "0" * 64}, SourceCorruptError, r"model\.digest: the files' digest is sha256:\w{64}, the spec pins"),
        ({}, {"files": ["*.gguf"]}, SourceRefusedError, r"no safetensors and no GGUF.*model\.files"),
        ({}, {"uri": "ms://org/absent"}, SourceNotFoundError, r"ms://org/absent"),
        ({}, {"uri": "ms://org/tiny", "revision": "no-such"}, SourceNotFoundError, r"no revision 'no-such'"),
        ({"token": "x"}, {"uri": "ms://org/tiny"}, SourceUnauthorizedError, r"status 401: it asks for credentials.*model\.secretRef"),
        ({"always": {"list": Fault(status=502)}}, {"uri": "ms://org/tiny"}, SourceUnavailableError, r"status 502, 6 times"),
    ],
)
async def test_each_failure_has_its_own_reason_and_remedy(
    fetch: Fetch,
    hub: Hub,
    secret: Callable[..., None],
    tmp_path: Path,
    hub_state: dict[str, object],
    changes: dict[str, object],
    kind: type[FetchError],
    words: str | None,
) -> None:
    secret(token="hf_not_the_right_one")
    for name, value in hub_state.items():
        setattr(hub, name, value)
    with pytest.raises(kind, match=words) as caught:
        await fetch(**changes)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert "hf_not" not in str(caught.value)
    assert "Signature" not in str(caught.value)
    assert not (tmp_path / "models" / "current").exists(), "a model that is not whole must never be seen"


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(status=503), Fault(status=500)],
        [Fault(status=429, headers={"Retry-After": "3"})],
        [Fault(break_after=300_000), Fault(break_after=100)],
        [Fault(corrupt=True)],
        [Fault(short_by=1000)],
        [Fault(ignore_range=True), Fault(ignore_range=True), Fault(ignore_range=True), Fault(ignore_range=True)],
        [Fault(chunk_delay_seconds=0.001)],
    ],
    ids=["5xx", "429", "reset", "corrupt", "short", "no ranges", "slow"],
)
@BOTH_HUBS
async def test_what_goes_wrong_for_a_while_ends_in_the_right_model(
    fetch: Fetch, hub: Hub, tmp_path: Path, faults: list[Fault], uri: str
) -> None:
    hub.faults[WEIGHTS] = list(faults)
    await fetch(uri=uri)
    assert current(tmp_path) == {name: hub.files[name] for name in NEEDED}


async def test_a_source_that_never_sends_ranges_is_read_whole(fetch: Fetch, hub: Hub, tmp_path: Path) -> None:
    hub.always[WEIGHTS] = Fault(ignore_range=True)
    await fetch()
    assert current(tmp_path)[WEIGHTS] == hub.files[WEIGHTS]


async def test_a_source_that_never_sends_ranges_begins_anew_after_a_reset(fetch: Fetch, hub: Hub, tmp_path: Path) -> None:
    hub.always[WEIGHTS] = Fault(ignore_range=True)
    hub.faults[WEIGHTS] = [Fault(ignore_range=True), Fault(ignore_range=True, break_after=300_000)]
    await fetch(connections=1)
    assert current(tmp_path)[WEIGHTS] == hub.files[WEIGHTS]


async def test_a_fetch_that_was_cut_off_goes_on_where_it_was(fetch: Fetch, hub: Hub, tmp_path: Path) -> None:
    never = asyncio.Event()
    hub.faults[WEIGHTS] = [Fault(), Fault(), Fault(hold=never)]
    meter = Meter()
    task = asyncio.create_task(fetch(meter=meter, connections=1))
    await hub.held.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    never.set()
    hub.requests.clear()
    outcome = await fetch(connections=1)
    assert sum(WEIGHTS in line and line.startswith("cdn") for line in hub.requests) == 2
    assert outcome.bytes_fetched < outcome.bytes
    assert current(tmp_path)[WEIGHTS] == hub.files[WEIGHTS]


async def test_two_pods_of_a_node_fetch_a_model_once(fetch: Fetch, hub: Hub) -> None:
    first, second = await asyncio.gather(fetch(), fetch())
    assert sum(WEIGHTS in line and line.startswith("cdn") for line in hub.requests) == 4
    assert sorted([first.bytes_fetched, second.bytes_fetched])[0] == 0


async def test_progress_counts_to_the_whole(fetch: Fetch, hub: Hub) -> None:
    meter = Meter()
    outcome = await fetch(meter=meter)
    told = meter.progress()
    assert (told.phase, told.bytes_done, told.bytes_total) == ("Done", outcome.bytes, outcome.bytes)
