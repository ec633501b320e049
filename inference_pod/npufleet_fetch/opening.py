"""Opens the source that an address names."""

from __future__ import annotations

from pathlib import Path

from npufleet_api.fetching import FetchSettings
from npufleet_api.sources import BUCKETS, Scheme, parse_uri
from npufleet_fetch.credentials import read_keys, read_token
from npufleet_fetch.errors import SourceRefusedError
from npufleet_fetch.sources.base import Source


def open_source(settings: FetchSettings, revision: str, credentials: Path) -> Source:
    """The source of `settings.uri` at `revision`, or at the one of the settings where that is empty. Raises FetchError."""
    try:
        uri = parse_uri(settings.uri)
    except ValueError as error:
        raise SourceRefusedError(f"model.uri: {error}") from error
    if uri.scheme is Scheme.HUGGING_FACE:
        from npufleet_fetch.sources.hub import HubSource

        token = read_token(credentials, expected=settings.credentials)
        return HubSource(uri.location, revision or settings.revision, settings.endpoint, token)
    if uri.scheme is Scheme.MODEL_SCOPE:
        from npufleet_fetch.sources.model_scope import ModelScopeSource

        # A pin is a digest of the listing there, which the API does not know as a revision.
        return ModelScopeSource(uri.location, settings.revision, settings.endpoint, read_token(credentials, expected=settings.credentials))
    if uri.scheme in BUCKETS:
        from npufleet_fetch.sources.bucket import BucketSource

        keys = read_keys(credentials, expected=settings.credentials)
        return BucketSource(uri.scheme, uri.root, uri.path, settings.endpoint, settings.region, keys)
    raise SourceRefusedError(f"model.uri: {uri.scheme}:// is mounted, not fetched")
