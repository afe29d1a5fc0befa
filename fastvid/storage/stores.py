"""Opens stores through obstore, by URL."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import GCSStore, HTTPStore, S3Store

from fastvid.errors import UsageError
from fastvid.storage import request_errors

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

Store = S3Store | GCSStore | HTTPStore


def open_store(url: str, client: ClientConfig, retry: RetryConfig, query: str) -> Store:
    """Open the store of a folder."""
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        # URLs appear in messages and logs, so they must not contain secrets.
        raise UsageError(
            "storage URL contains a user, a query or a fragment",
            file=f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}",
            hint="pass credentials through environment variables",
        )
    if not parts.netloc:
        raise UsageError("storage URL has no bucket or host", file=url)
    prefix = parts.path.strip("/") or None
    try:
        if parts.scheme == "s3":
            return S3Store(parts.netloc, prefix=prefix, client_options=client, retry_config=retry)
        if parts.scheme == "gs":
            return GCSStore(parts.netloc, prefix=prefix, client_options=client, retry_config=retry)
        return HTTPStore.from_url(f"{url}/?{query}" if query else url, client_options=client, retry_config=retry)
    except (BaseError, OSError, ValueError) as error:
        raise UsageError(f"cannot open the storage: {request_errors.reason(error)}", file=url) from error
