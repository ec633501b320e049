"""`hf://`: the Hugging Face hub, or a mirror of it. The hub's own client says what is there; ranges are read over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import quote

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

from npufleet_fetch.errors import SourceNotFoundError, SourceRefusedError, SourceUnauthorizedError, TransientError
from npufleet_fetch.files import MAX_FILES, Listing, RemoteFile, checked_path
from npufleet_fetch.sources.http import describe, open_session, read_range, refusal

ENDPOINT = "https://huggingface.co"
LIST_SECONDS = 30.0


class HubSource:
    """One repository under one revision."""

    def __init__(self, repository: str, revision: str | None, endpoint: str | None, token: str) -> None:
        self._repository = repository
        self._asked = revision or "main"
        self._endpoint = (endpoint or ENDPOINT).rstrip("/")
        self._token = token
        self._commit = ""
        # False, not None: None would take a token from the environment or the home directory.
        self._api = HfApi(endpoint=self._endpoint, token=token or False)
        self._session = open_session({"Authorization": f"Bearer {token}"} if token else {})

    async def list(self) -> Listing:
        """See Source."""
        return await asyncio.to_thread(self._list)

    def _list(self) -> Listing:
        where = f"model.uri: hf://{self._repository} at {self._endpoint}"
        credentials = bool(self._token)
        try:
            info = self._api.model_info(self._repository, revision=self._asked, files_metadata=True, timeout=LIST_SECONDS)
        except GatedRepoError as error:
            remedy = "accept its terms with the token's account" if credentials else "accept its terms, and name a token in model.secretRef"
            raise SourceUnauthorizedError(f"{where} is gated: {remedy}") from error
        except RevisionNotFoundError as error:
            missing = f"has no revision {self._asked!r}: name a branch, tag or commit of it in model.revision"
            raise SourceNotFoundError(f"{where} {missing}") from error
        except RepositoryNotFoundError as error:
            if error.response.status_code in (401, 403) and credentials:
                raise refusal(error.response.status_code, where, credentials=True) from error
            hint = "" if credentials else ", or it is private: then name a token in model.secretRef"
            raise SourceNotFoundError(f"{where}: there is no such model{hint}") from error
        except HFValidationError as error:
            raise SourceRefusedError(f"{where} is not a name of a repository: write hf://ORG/NAME") from error
        except HfHubHTTPError as error:
            status, wait = error.response.status_code, error.response.headers.get("Retry-After")
            raise refusal(status, where, credentials=credentials, retry_after=wait) from error
        except (httpx2.HTTPError, OSError, ValueError) as error:
            raise TransientError(f"{where}: {describe(error)}") from error
        siblings = info.siblings or []
        if not info.sha or len(siblings) > MAX_FILES:
            raise SourceRefusedError(f"{where} has {len(siblings)} files or no commit: this is not a repository of a model")
        self._commit = info.sha
        return Listing(info.sha, tuple(self._file(sibling) for sibling in siblings if sibling.size is not None))

    @staticmethod
    def _file(sibling: object) -> RemoteFile:
        path, size = str(getattr(sibling, "rfilename", "")), int(getattr(sibling, "size", 0))
        lfs = getattr(sibling, "lfs", None)
        blob = str(getattr(sibling, "blob_id", "") or "")
        if lfs is not None:
            return RemoteFile(checked_path(path), int(lfs["size"]), sha256=str(lfs["sha256"]), version=blob)
        return RemoteFile(checked_path(path), size, git_sha1=blob, version=blob)

    def read(self, file: RemoteFile, start: int, end: int) -> AsyncIterator[bytes]:
        """See Source."""
        url = f"{self._endpoint}/{self._repository}/resolve/{self._commit}/{quote(file.path)}"
        return read_range(self._session, url, file, start, end, credentials=bool(self._token))

    async def close(self) -> None:
        """See Source."""
        await self._session.close()
