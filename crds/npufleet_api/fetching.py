"""What operator, fetch container and engine agree on: how a model is fetched, how far it is, and how it ended."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from npufleet_api.schema import ApiModel, Digest
from npufleet_api.settings import Name, SettingsModel

FETCH_CONTAINER = "fetch"
FETCH_SETTINGS_FILE = "fetch.yaml"
FETCH_PATH = "/fetch"
"""On the admin port, while the fetch container runs."""
CACHE_DIR = "/model-cache"
CREDENTIALS_DIR = "/etc/npufleet-source"
CURRENT_LINK = "current"
"""Name, in MODEL_DIR, of the link to the model's published files."""
SOURCE_REVISION_ANNOTATION = "npufleet.dev/source-revision"
"""On a pod: the revision that the model's first replica resolved, so that all replicas serve the same files."""
SOURCE_ASKED_ANNOTATION = "npufleet.dev/source-asked"
"""On a pod: the address and revision that it was told to fetch."""
SOURCE_REVISION_ENV = "NPUFLEET_SOURCE_REVISION"
IN_USE_FILE = ".in-use"
"""In a published model: whoever holds a shared lock on it uses the model."""

Figure = Annotated[int, Field(ge=0, le=2**62)]


class FetchReason(StrEnum):
    """Why a model could not be fetched. Also reasons of the AscendModel's conditions."""

    NOT_FOUND = "SourceNotFound"
    UNAUTHORIZED = "SourceUnauthorized"
    UNAVAILABLE = "SourceUnavailable"
    CORRUPT = "SourceCorrupt"
    REFUSED = "SourceRefused"
    CACHE_FULL = "CacheFull"
    CACHE_UNAVAILABLE = "CacheUnavailable"


class FetchPhase(StrEnum):
    """What the fetch container does."""

    LISTING = "Listing"
    WAITING = "Waiting"
    """Another pod of the node fetches the same model."""
    DOWNLOADING = "Downloading"
    CHECKING = "Checking"
    DONE = "Done"


class FetchSettings(SettingsModel):
    """`fetch.yaml`: what to fetch and where to put it. Credentials are files in CREDENTIALS_DIR and never in here."""

    uri: Name
    revision: Name | None = None
    endpoint: Name | None = None
    region: Name | None = None
    files: list[Name] = Field(default=[], max_length=16, description="Globs of the weights that are wanted; empty chooses.")
    digest: Digest | None = Field(default=None, description="Digest that the fetched files must have.")
    allow_pickle: bool = False
    scope: str = Field(default="", max_length=253, description="Who may use the cached files; empty: everyone.")
    credentials: bool = Field(default=False, description="Whether a Secret with credentials is expected.")
    size_limit_mi: int | None = Field(default=None, ge=1, le=2**40, description="Most that the cache may hold.")
    connections: int = Field(default=8, ge=1, le=64)
    part_mi: int = Field(default=128, ge=1, le=4096, description="MiB of one range.")


class FetchProgress(ApiModel):
    """Answer of `GET /fetch`."""

    phase: FetchPhase = FetchPhase.LISTING
    bytes_done: Figure = 0
    bytes_total: Figure = 0
    bytes_per_second: Figure = 0
    seconds_left: Figure | None = None


class FetchOutcome(ApiModel):
    """The fetch container's termination message: `reason` and `message` where it failed, else what was fetched."""

    reason: FetchReason | None = None
    message: Annotated[str, StringConstraints(max_length=2048)] = ""
    revision: Annotated[str, StringConstraints(max_length=128)] = ""
    """What the asked revision was resolved to."""
    digest: Annotated[str, StringConstraints(max_length=71)] = ""
    files: Figure = 0
    bytes: Figure = 0
    bytes_fetched: Figure = 0
    """Of `bytes`, what came over the network; 0 is a cache hit."""
    seconds: Annotated[float, Field(ge=0, le=10**9, allow_inf_nan=False)] = 0
