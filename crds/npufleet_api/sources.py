"""Where a model's files come from: the address as a typed value, shared by whoever accepts it and whoever fetches it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

HUB_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
URI_RULES = {
    "hf": rf"^hf://{HUB_NAME}(/{HUB_NAME})?$",
    "ms": rf"^ms://{HUB_NAME}/{HUB_NAME}$",
    "s3": r"^s3://[a-z0-9][a-z0-9.-]*[a-z0-9](/[^/\s]+)*/?$",
    "obs": r"^obs://[a-z0-9][a-z0-9.-]*[a-z0-9](/[^/\s]+)*/?$",
    "oci": r"^oci://[A-Za-z0-9][A-Za-z0-9._:-]*(/[a-z0-9][a-z0-9._-]*)+(:[A-Za-z0-9_][A-Za-z0-9._-]*)?(@sha256:[0-9a-f]{64})?$",
    "pvc": r"^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/\s]+)*/?$",
}
"""Form of an address, by scheme. RE2 as well as Python reads them."""

COMMIT = re.compile(r"^[0-9a-f]{40}$")


class Scheme(StrEnum):
    """Kinds of sources."""

    HUGGING_FACE = "hf"
    MODEL_SCOPE = "ms"
    S3 = "s3"
    OBS = "obs"
    OCI = "oci"
    VOLUME = "pvc"


FETCHED = frozenset({Scheme.HUGGING_FACE, Scheme.MODEL_SCOPE, Scheme.S3, Scheme.OBS})
"""Sources whose files are downloaded into a cache; the others are mounted."""
HUBS = frozenset({Scheme.HUGGING_FACE, Scheme.MODEL_SCOPE})
BUCKETS = frozenset({Scheme.S3, Scheme.OBS})


@dataclass(frozen=True, slots=True)
class ModelUri:
    """A parsed address: hf and ms have a repository, s3 and obs a bucket and a prefix, pvc a claim and a path, oci an image."""

    scheme: Scheme
    location: str
    """What follows the scheme, without a slash at its end."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.location}"

    @property
    def root(self) -> str:
        """Bucket or claim."""
        return self.location.partition("/")[0]

    @property
    def path(self) -> str:
        """What is below the bucket or claim; empty for all of it."""
        return self.location.partition("/")[2]

    @property
    def fetched(self) -> bool:
        """Whether the files are downloaded before the engine starts."""
        return self.scheme in FETCHED


@lru_cache(maxsize=4096)
def parse_uri(text: str) -> ModelUri:
    """The address `text`. Raises ValueError with the form that is expected."""
    scheme, separator, location = text.partition("://")
    rule = URI_RULES.get(scheme)
    if not separator or rule is None:
        raise ValueError(f"{text!r} has an unknown scheme: write hf://ORG/NAME, ms://ORG/NAME, s3://BUCKET/PATH, obs://BUCKET/PATH, "
                         "oci://IMAGE or pvc://CLAIM/PATH")  # fmt: skip
    if not re.fullmatch(rule.removeprefix("^").removesuffix("$"), text):
        forms = {"hf": "hf://ORG/NAME", "ms": "ms://ORG/NAME", "oci": "oci://REGISTRY/NAME:TAG", "pvc": "pvc://CLAIM/PATH"}
        raise ValueError(f"{text!r} is not an address of its kind: write {forms.get(scheme, f'{scheme}://BUCKET/PATH')}")
    if ".." in location.split("/"):
        raise ValueError(f"{text!r} has a .. in its path: write the path from the root without it")
    return ModelUri(Scheme(scheme), location.rstrip("/"))


def known_uri(text: str) -> ModelUri | None:
    """The address `text`; None where it is none."""
    try:
        return parse_uri(text)
    except ValueError:
        return None


def is_pinned(uri: ModelUri, revision: str | None, digest: str | None) -> bool:
    """Whether what is fetched can never change under the same spec: a commit of a hub, an image's digest, or a digest of the content."""
    if digest is not None:
        return True
    if uri.scheme is Scheme.OCI:
        return "@sha256:" in uri.location
    return uri.scheme in HUBS and revision is not None and COMMIT.fullmatch(revision) is not None


def is_allowed(uri: ModelUri, patterns: Sequence[str]) -> bool:
    """Whether a pool's list of sources has the address; an empty list has all. `*` stands for any text, slashes included."""
    return not patterns or any(fnmatch.fnmatchcase(str(uri), pattern) for pattern in patterns)
