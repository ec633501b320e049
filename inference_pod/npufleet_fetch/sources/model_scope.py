"""`ms://`: ModelScope, over its HTTP API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Literal
from urllib.parse import quote, urlencode

import aiohttp
from pydantic import BaseModel, Field, StringConstraints, ValidationError

from npufleet_fetch.errors import SourceNotFoundError, SourceRefusedError, TransientError
from npufleet_fetch.files import MAX_FILES, Listing, RemoteFile, checked_path, content_name
from npufleet_fetch.sources.http import describe, open_session, read_range, refusal

ENDPOINT = "https://www.modelscope.cn"
MAX_ANSWER_BYTES = 32 << 20
MISSING_CODES = frozenset({404, 10010205001, 10010205002})


class _Entry(BaseModel):
    path: Annotated[str, StringConstraints(max_length=1024)] = Field(alias="Path")
    kind: Literal["blob", "tree"] = Field(alias="Type")
    size: int = Field(default=0, ge=0, alias="Size")
    sha256: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")] = Field(default="", alias="Sha256")
    revision: Annotated[str, StringConstraints(max_length=128)] = Field(default="", alias="Revision")


class _Files(BaseModel):
    files: list[_Entry] | None = Field(default=None, max_length=MAX_FILES, alias="Files")


class _Answer(BaseModel):
    code: int = Field(alias="Code")
    data: _Files | None = Field(default=None, alias="Data")
    message: str = Field(default="", alias="Message")


class ModelScopeSource:
    """One repository under one revision."""

    def __init__(self, repository: str, revision: str | None, endpoint: str | None, token: str) -> None:
        self._repository = repository
        self._revision = revision or "master"
        self._base = f"{(endpoint or ENDPOINT).rstrip('/')}/api/v1/models/{repository}/repo"
        self._credentials = bool(token)
        # Older deployments know the cookie only, newer ones the header; each ignores the other.
        self._session = open_session({"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"} if token else {})

    async def list(self) -> Listing:
        """See Source."""
        where = f"model.uri: ms://{self._repository}"
        query = urlencode({"Revision": self._revision, "Recursive": "True", "Root": ""})
        try:
            async with self._session.get(f"{self._base}/files?{query}") as answer:
                if answer.status != 200:
                    raise refusal(answer.status, where, credentials=self._credentials, retry_after=answer.headers.get("Retry-After"))
                raw = await answer.content.read(MAX_ANSWER_BYTES + 1)
                while len(raw) <= MAX_ANSWER_BYTES and (more := await answer.content.read(MAX_ANSWER_BYTES)):
                    raw += more
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TransientError(f"{where}: {describe(error)}") from error
        try:
            parsed = _Answer.model_validate_json(raw)
        except ValidationError as error:
            raise SourceRefusedError(f"{where}: its list of files is not one of ModelScope's: check model.endpoint") from error
        if parsed.code in MISSING_CODES:
            raise SourceNotFoundError(f"{where} has no revision {self._revision!r}, or is not there: correct model.uri or model.revision")
        if parsed.code != 200 or parsed.data is None:
            raise refusal(parsed.code if 400 <= parsed.code < 600 else 400, where, credentials=self._credentials)
        files = tuple(
            RemoteFile(checked_path(entry.path), entry.size, sha256=entry.sha256, version=entry.sha256 or entry.revision)
            for entry in parsed.data.files or []
            if entry.kind == "blob"
        )
        return Listing(content_name(files), files)

    def read(self, file: RemoteFile, start: int, end: int) -> AsyncIterator[bytes]:
        """See Source."""
        url = f"{self._base}?{urlencode({'Revision': self._revision, 'FilePath': file.path}, quote_via=quote)}"
        return read_range(self._session, url, file, start, end, credentials=self._credentials)

    async def close(self) -> None:
        """See Source."""
        await self._session.close()
