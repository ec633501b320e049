"""Models in buckets, through the real client and a server that checks its signatures."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from fetch.conftest import WEIGHTS, Fetch, small_model
from npufleet_api.sources import Scheme
from npufleet_fetch.errors import FetchError, SourceCorruptError, SourceNotFoundError, SourceUnauthorizedError, SourceUnavailableError
from npufleet_fetch.sources.bucket import default_endpoint
from support.bucket_server import Bucket, serve_bucket
from support.hub_server import Fault

KEYS = {"accessKeyId": "AKIAEXAMPLE", "secretAccessKey": "very/secret+key"}
FILES = {name: data for name, data in small_model().items() if "/" not in name}


@pytest.fixture
async def bucket() -> AsyncIterator[Bucket]:
    """A bucket with the model below `org/tiny`, and something else beside it."""
    objects = {f"org/tiny/{name}": data for name, data in FILES.items()} | {"org/tiny-2/model.safetensors": b"another model"}
    async with serve_bucket(Bucket(objects)) as serving:
        yield serving


@pytest.fixture
def from_bucket(fetch: Fetch, bucket: Bucket) -> Fetch:
    """Fetches from the bucket."""

    def run(pin: str = "", **changes: object):  # type: ignore[no-untyped-def]  # as `fetch`
        return fetch(pin, **{"uri": "s3://models/org/tiny", "endpoint": bucket.url, "region": "us-east-1", **changes})

    return run


def weights(tmp_path: Path) -> bytes:
    """What the engine finds."""
    return (tmp_path / "models" / "current" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("uri", ["s3://models/org/tiny", "obs://models/org/tiny/"])
async def test_a_model_is_fetched_whole_and_then_found_without_the_network(
    from_bucket: Fetch, bucket: Bucket, tmp_path: Path, uri: str
) -> None:
    outcome = await from_bucket(uri=uri)
    assert weights(tmp_path) == FILES[WEIGHTS]
    assert outcome.files == 4
    assert outcome.revision.startswith("content-")
    seen = len(bucket.requests)
    assert (await from_bucket(outcome.revision, uri=uri)).bytes_fetched == 0
    assert len(bucket.requests) == seen


async def test_requests_are_signed_with_the_keys_of_the_secret(
    from_bucket: Fetch, bucket: Bucket, secret: Callable[..., None], tmp_path: Path
) -> None:
    bucket.keys = (KEYS["accessKeyId"], KEYS["secretAccessKey"])
    secret(**KEYS)
    await from_bucket(credentials=True, scope="team")
    assert weights(tmp_path) == FILES[WEIGHTS]


async def test_checksums_beside_a_model_are_checked(from_bucket: Fetch, bucket: Bucket, tmp_path: Path) -> None:
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in FILES.items())
    bucket.objects["org/tiny/SHA256SUMS"] = sums.encode()
    await from_bucket()
    assert weights(tmp_path) == FILES[WEIGHTS]
    bucket.objects[f"org/tiny/{WEIGHTS}"] = FILES[WEIGHTS][:-1] + b"?"
    with pytest.raises(SourceCorruptError, match=r"model\.safetensors: SHA-256 is .* the source says"):
        await from_bucket(cache=tmp_path / "another")


@pytest.mark.parametrize(
    ("state", "changes", "kind", "words"),
    [
        ({}, {"uri": "s3://models/absent"}, SourceNotFoundError, r"s3://models/absent: nothing is there"),
        ({}, {"uri": "s3://other/org/tiny"}, SourceNotFoundError, r"no such bucket or object"),
        ({"keys": ("a", "b")}, {}, SourceUnauthorizedError, r"access is denied: name a Secret with its keys in model\.secretRef"),
        ({"keys": ("a", "b")}, {"credentials": True}, SourceUnauthorizedError, r"the keys in model\.secretRef may not read it"),
        ({"always": {"list": Fault(status=503)}}, {}, SourceUnavailableError, r"6 times in a row: check model\.endpoint"),
        ({"always": {f"org/tiny/{WEIGHTS}": Fault(status=500)}}, {}, SourceUnavailableError, r"model\.safetensors: .*6 times in a row"),
        ({"always": {f"org/tiny/{WEIGHTS}": Fault(status=403)}}, {}, SourceUnauthorizedError, r"model\.safetensors: access is denied"),
        (
            {"changed_after": {f"org/tiny/{WEIGHTS}": 2}},
            {"connections": 1},
            SourceCorruptError,
            r"changed while it was read",
        ),
    ],
)
async def test_each_failure_has_its_own_reason_and_remedy(
    from_bucket: Fetch,
    bucket: Bucket,
    secret: Callable[..., None],
    state: dict[str, object],
    changes: dict[str, object],
    kind: type[FetchError],
    words: str,
) -> None:
    secret(**KEYS)
    for name, value in state.items():
        setattr(bucket, name, value)
    with pytest.raises(kind, match=words) as caught:
        await from_bucket(**changes)
    assert type(caught.value) is kind
    assert KEYS["secretAccessKey"] not in str(caught.value)
    assert "Signature" not in str(caught.value)


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(break_after=200_000)], ids=["5xx", "reset"])
async def test_what_goes_wrong_for_a_while_ends_in_the_right_model(
    from_bucket: Fetch, bucket: Bucket, tmp_path: Path, fault: Fault
) -> None:
    bucket.faults[f"org/tiny/{WEIGHTS}"] = [fault, fault]
    await from_bucket()
    assert weights(tmp_path) == FILES[WEIGHTS]


async def test_a_secret_that_is_missing_is_told_in_one_line(from_bucket: Fetch) -> None:
    with pytest.raises(SourceUnauthorizedError, match=r"model\.secretRef: the Secret is missing, or has no entry accessKeyId: create it"):
        await from_bucket(credentials=True)


def test_obs_has_an_endpoint_for_each_region() -> None:
    assert default_endpoint(Scheme.OBS, "cn-north-4") == "https://obs.cn-north-4.myhuaweicloud.com"
    with pytest.raises(FetchError, match=r"model\.region: obs:// needs a region or an endpoint"):
        default_endpoint(Scheme.OBS, None)
