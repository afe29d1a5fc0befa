"""Requests to the Hugging Face Hub (``hf://``), read-only, through its maintained client.

    hf://datasets/OWNER/NAME/folder
    hf://datasets/OWNER/NAME@REVISION/folder

A revision is resolved to its commit once, so that files do not change while they are read. The Hub is asked once for
the download address of a file, and ranges are then read from there. It limits a user's requests over minutes and says
how long to wait.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors
from huggingface_hub.hf_api import RepoFile

from fastvid.errors import FastvidError, StorageError, UnavailableError, UsageError
from fastvid.storage.protocol import TRAFFIC, RemoteOptions, Version, replaced_error
from fastvid.storage.requests import Client, Failure, MissingIgnored

SCHEME: Final = "hf://"

_KINDS: Final = {"datasets": "dataset", "spaces": "space", "models": "model"}
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_RANGE_SECONDS: Final = 60.0
_LOG_IN: Final = "log in with `hf auth login`, or set HF_TOKEN, if it is private or gated"

T = TypeVar("T")

_utils: Any = import_module("huggingface_hub.utils")  # whose functions are public, but not exported to type checkers


def repository_root(url: str) -> str:
    """Return the start of an ``hf://`` URL: up to the repository's name and revision, without the folder."""
    parts = url.removeprefix(SCHEME).split("/")
    if len(parts) < 3 or parts[0] not in _KINDS or not all(parts[:3]):
        raise UsageError("URL names no repository", file=url, hint="write it like hf://datasets/OWNER/NAME/folder")
    return SCHEME + "/".join(parts[:3])


class HubClient(Client):
    """Requests to one folder of a repository. Has the reading methods of `fastvid.storage.client.StoreClient`.

    `url`: ``hf://datasets/OWNER/NAME[@REVISION][/folder]``.
    """

    def __init__(self, url: str, options: RemoteOptions) -> None:
        super().__init__(url, options)
        root = repository_root(self.url)
        kind, owner, name = root.removeprefix(SCHEME).split("/")
        name, _, revision = name.partition("@")
        self._kind, self._repository, self._revision = _KINDS[kind], f"{owner}/{name}", revision or None
        self._folder = self.url.removeprefix(root).strip("/")
        self._endpoint = os.environ.get("HF_ENDPOINT")
        self._lock = threading.Lock()
        self._commit: str | None = None
        self._places: dict[str, tuple[str, Version]] = {}

    def _current(self, name: str) -> Version:
        return self._place(name)[1]

    def get_range(
        self, name: str, offset: int, length: int, version: Version | None
    ) -> tuple[memoryview, Version | None]:
        """Read a range of `name`, see `StoreClient.get_range`."""
        found = self._place(name)[1]
        if version is not None and not version.same(found):
            raise replaced_error(self.file(name))
        length = min(length, found.size - offset)
        return (self._read(name, offset, length) if length > 0 else memoryview(b"")), found

    def list(self, folder: str) -> list[tuple[str, Version]]:
        """List the names below `folder` ("" or whole path components) with their versions, in any order."""
        inside = "/".join(filter(None, (self._folder, folder.strip("/"))))
        prefix = len(self._folder) + 1 if self._folder else 0

        def call() -> list[tuple[str, Version]]:
            entries = huggingface_hub.HfApi(endpoint=self._endpoint).list_repo_tree(
                self._repository, inside or None, recursive=True, revision=self._resolved(), repo_type=self._kind
            )
            found = []
            for entry in entries:
                if isinstance(entry, RepoFile):
                    tag = entry.lfs.sha256 if entry.lfs else entry.blob_id
                    found.append((entry.path[prefix:], Version(tag, _EPOCH, entry.size)))
            return found

        with MissingIgnored():
            return self._call(folder, call)
        return []

    def _resolved(self) -> str:
        with self._lock:
            if self._commit is None:
                api = huggingface_hub.HfApi(endpoint=self._endpoint)
                info: Any = api.repo_info(self._repository, repo_type=self._kind, revision=self._revision)
                self._commit = str(info.sha)
            return self._commit

    def _place(self, name: str) -> tuple[str, Version]:
        """Return the download address of a file, and its version."""
        known = self._places.get(name)
        if known is not None:
            return known

        def call() -> tuple[str, Version]:
            path = "/".join(filter(None, (self._folder, name)))
            url = huggingface_hub.hf_hub_url(
                self._repository, path, repo_type=self._kind, revision=self._resolved(), endpoint=self._endpoint
            )
            found = huggingface_hub.get_hf_file_metadata(url, endpoint=self._endpoint)
            if found.size is None:
                raise StorageError("the Hub does not say how large the file is", file=self.file(name))
            return found.location, Version(found.etag, _EPOCH, found.size)

        place = self._call(name, call)
        with self._lock:
            return self._places.setdefault(name, place)

    def _read(self, name: str, offset: int, length: int) -> memoryview:
        def call() -> memoryview:
            location = self._place(name)[0]
            own = urlsplit(location).netloc == urlsplit(self._endpoint or constants.ENDPOINT).netloc
            headers = _utils.build_hf_headers() if own else {}
            headers["Range"] = f"bytes={offset}-{offset + length - 1}"
            response: Any = _utils.get_session().get(
                location, headers=headers, timeout=_RANGE_SECONDS, follow_redirects=True
            )
            if response.status_code in (401, 403) and not own:
                # The signature of the address has expired: ask the Hub for a new address.
                with self._lock:
                    self._places.pop(name, None)
                raise _ExpiredError("the address of the file has expired")
            response.raise_for_status()
            data = memoryview(response.content)
            if response.status_code != 206 and len(data) != length:
                raise StorageError("server does not support byte ranges", file=self.file(name))
            if len(data) != length:
                raise _ExpiredError("the response ended early")
            return TRAFFIC.received(data)

        return self._call(name, call)

    def _call(self, name: str, call: Callable[[], T]) -> T:
        def checked() -> T:
            try:
                return call()
            except hub_errors.EntryNotFoundError as error:
                raise FileNotFoundError(str(error)) from error

        return super()._call(name, checked)

    def _explain(self, error: Exception) -> Failure:
        status = _status(error)
        if isinstance(error, hub_errors.HfHubHTTPError) or status is not None:
            wait = _asked_wait(getattr(error, "response", None))
            transient = status is None or status >= 500 or status in (408, 425, 429)
            return Failure(_reason(error), transient=transient, refused=status in (429, 503), wait=wait)
        if isinstance(error, FileNotFoundError):
            return Failure(_reason(error))
        if isinstance(error, OSError) or type(error).__module__.startswith("httpx"):
            return Failure(_reason(error), transient=True)
        raise error

    def _translated(self, error: Exception, file: str, tries: int = 1, seconds: float = 0.0) -> FastvidError:
        text = _reason(error) + (f" ({tries} attempts in {seconds:.0f} s)" if tries > 1 else "")
        if isinstance(error, FileNotFoundError):
            return StorageError("file does not exist", file=file)
        if isinstance(error, hub_errors.RevisionNotFoundError):
            return StorageError(f"the repository has no revision {self._revision!r}", file=file)
        if isinstance(error, hub_errors.RepositoryNotFoundError):
            return StorageError("repository does not exist, or access is denied", file=file, hint=_LOG_IN)
        return UnavailableError(text, file=file, hint=_LOG_IN if _status(error) in (401, 403) else None)


class _ExpiredError(OSError):
    """A response after which the request is retried: an expired address or a truncated body."""


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _reason(error: Exception) -> str:
    status = _status(error)
    if status is not None:
        return f"the server responded {status}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _asked_wait(response: Any) -> float:
    """Return the seconds to wait that a response asks for; 0 if it asks for none."""
    if response is None:
        return 0.0
    text = str(response.headers.get("retry-after", ""))
    if text.isdigit():
        return float(text)
    found = _utils.parse_ratelimit_headers(response.headers)
    return float(found.reset_in_seconds) if found is not None and found.remaining == 0 else 0.0
