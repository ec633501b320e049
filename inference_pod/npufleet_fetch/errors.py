"""Errors of fetching. A message is one line, names the field, the value and the remedy, and never holds a credential."""

from __future__ import annotations

from npufleet_api.fetching import FetchReason


class FetchError(Exception):
    """The model cannot be fetched; `reason` tells whose turn it is."""

    reason = FetchReason.UNAVAILABLE


class SourceNotFoundError(FetchError):
    """There is no such model, revision or file."""

    reason = FetchReason.NOT_FOUND


class SourceUnauthorizedError(FetchError):
    """The source asks for credentials, or does not take those at hand."""

    reason = FetchReason.UNAUTHORIZED


class SourceUnavailableError(FetchError):
    """The source does not answer, or not in time; tried again as often as is sensible."""

    reason = FetchReason.UNAVAILABLE


class SourceCorruptError(FetchError):
    """What came is not what the source, or the spec, says it is."""

    reason = FetchReason.CORRUPT


class SourceRefusedError(FetchError):
    """The source holds nothing that may be served, or leaves open what to serve."""

    reason = FetchReason.REFUSED


class CacheFullError(FetchError):
    """The disk, or the cache's limit, holds too little for the model."""

    reason = FetchReason.CACHE_FULL


class CacheUnavailableError(FetchError):
    """The cache cannot be written or read."""

    reason = FetchReason.CACHE_UNAVAILABLE


class TransientError(Exception):
    """One attempt failed in a way that another one may not. `retry_after_seconds`: what the source asked for."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NoRangesError(Exception):
    """The source sends whole files only."""
