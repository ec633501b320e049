"""`s3://` and `obs://`: objects below a prefix of a bucket, over the S3 API."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import S3Store

from npufleet_api.sources import Scheme
from npufleet_fetch.credentials import KeyPair
from npufleet_fetch.errors import SourceCorruptError, SourceNotFoundError, SourceRefusedError, SourceUnauthorizedError, TransientError
from npufleet_fetch.files import MAX_FILES, Listing, RemoteFile, checked_path, content_name

CHUNK_BYTES = 1 << 20
SUMS_FILE = "SHA256SUMS"
MAX_SUMS_BYTES = 4 << 20
STATUS = re.compile(r"status (?:code )?(\d{3})|\b(\d{3}) [A-Z][a-z]+")
NO_RETRY: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=0)}
"""Attempts are the transfer's to count."""


class BucketSource:
    """The objects below one prefix. A file SHA256SUMS beside them, as sha256sum writes it, gives their checksums."""

    def __init__(self, scheme: Scheme, bucket: str, prefix: str, endpoint: str | None, region: str | None, keys: KeyPair | None) -> None:
        self._where = f"model.uri: {scheme}://{bucket}/{prefix}"
        self._prefix = prefix.strip("/")
        self._credentials = keys is not None
        address = endpoint or default_endpoint(scheme, region)
        bucket_in_host = scheme is Scheme.OBS and endpoint is None
        options: dict[str, Any] = {"region": region or "us-east-1", "virtual_hosted_style_request": bucket_in_host}
        if address is not None:
            options["endpoint"] = address.replace("://", f"://{bucket}.", 1) if bucket_in_host else address
        if keys is None:
            options["skip_signature"] = True
        else:
            options |= {"access_key_id": keys.access_key, "secret_access_key": keys.secret_key}
            if keys.session_token:
                options["session_token"] = keys.session_token
        client: Any = {
            "allow_http": address is not None and address.startswith("http://"),
            "timeout": timedelta(hours=24),
            "connect_timeout": timedelta(seconds=30),
            "read_timeout": timedelta(seconds=60),
        }
        self._store = S3Store(bucket, client_options=client, retry_config=NO_RETRY, **options)

    async def list(self) -> Listing:
        """See Source."""
        found: list[RemoteFile] = []
        base = f"{self._prefix}/" if self._prefix else ""
        try:
            async for batch in obstore.list(self._store, prefix=self._prefix or None):
                for item in batch:
                    path = item["path"].removeprefix(base)
                    if path and not path.endswith("/"):
                        found.append(RemoteFile(checked_path(path), int(item["size"]), version=item["e_tag"] or ""))
                if len(found) > MAX_FILES:
                    raise SourceRefusedError(f"{self._where} has more than {MAX_FILES} objects: name the model's own prefix")
            sums = await self._sums(found)
        except BaseError as error:
            raise self._meaning(error, self._where) from error
        if not found:
            raise SourceNotFoundError(f"{self._where}: nothing is there: correct the bucket or the path")
        files = tuple(replace(f, sha256=sums.get(f.path, "")) for f in found)
        return Listing(content_name(files), files)

    async def _sums(self, files: Sequence[RemoteFile]) -> dict[str, str]:
        sums = next((file for file in files if file.path == SUMS_FILE), None)
        if sums is None or sums.size > MAX_SUMS_BYTES:
            return {}
        raw = bytes(await (await obstore.get_async(self._store, self._key(SUMS_FILE))).bytes_async())
        lines = re.findall(r"^([0-9a-f]{64}) [ *](.+)$", raw.decode(errors="replace"), re.MULTILINE)
        return {path.removeprefix("./"): digest for digest, path in lines}

    async def read(self, file: RemoteFile, start: int, end: int) -> AsyncIterator[bytes]:
        """See Source."""
        options: Any = {"range": (start, end)}
        if file.version:
            options["if_match"] = file.version
        try:
            answer = await obstore.get_async(self._store, self._key(file.path), options=options)
            async for piece in answer.stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(piece)
        except BaseError as error:
            raise self._meaning(error, file.path) from error

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    def _meaning(self, error: BaseError, what: str) -> Exception:
        """What the client's error means. Its text is not passed on: it may quote a signed request."""
        status = _status(error)
        if isinstance(error, NotFoundError) or status == 404:
            return SourceNotFoundError(f"{what}: there is no such bucket or object: correct model.uri, model.endpoint or model.region")
        if isinstance(error, PreconditionError):
            return SourceCorruptError(f"{what} changed while it was read: upload models under a path of their own")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
            remedy = (
                "the keys in model.secretRef may not read it" if self._credentials else "name a Secret with its keys in model.secretRef"
            )
            return SourceUnauthorizedError(f"{what}: access is denied: {remedy}")
        return TransientError(f"{what}: {f'status {status}' if status else type(error).__name__}")

    async def close(self) -> None:
        """See Source."""


def _status(error: BaseError) -> int:
    """The status that the client's text names; 0 where it names none."""
    match = STATUS.search(str(error))
    return next((int(group) for group in match.groups() if group), 0) if match else 0


def default_endpoint(scheme: Scheme, region: str | None) -> str | None:
    """None leaves it to the client, which knows AWS. Raises SourceRefusedError."""
    if scheme is Scheme.S3:
        return None
    if region is None:
        raise SourceRefusedError("model.region: obs:// needs a region or an endpoint: set model.region or model.endpoint")
    return f"https://obs.{region}.myhuaweicloud.com"
