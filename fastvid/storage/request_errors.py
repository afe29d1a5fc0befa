"""Extract the HTTP status, the cause and a hint from obstore's error texts, and translate its errors."""

from __future__ import annotations

import re
from typing import Final

from obstore.exceptions import (
    BaseError,
    GenericError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from fastvid.errors import FastvidError, StorageError, UnavailableError, UsageError
from fastvid.storage.attempts import Failure
from fastvid.storage.protocol import replaced_error

_DEBUG: Final = "\n\nDebug source"
_METADATA_HOST: Final = "169.254.169.254"  # serves a machine's credentials on AWS and Google Cloud

_TRANSIENT_STATUS: Final = frozenset({408, 425, 429})
"""Status codes below 500 that mean "not now" (RFC 9110, RFC 8470, RFC 6585)."""


_REFUSED: Final = frozenset({429, 503})
"""Status codes that mean "too many requests" (RFC 6585; S3 says "503 Slow Down")."""


def http_status(error: Exception) -> int | None:
    """Return the HTTP status of the response, or None without a response."""
    match = re.search(r"non-2xx status code: (\d{3})", str(error))
    return int(match[1]) if match else None


def explain(error: Exception) -> Failure:
    """Return what a failed request says."""
    if not isinstance(error, BaseError | OSError | ValueError):
        raise error
    transient = isinstance(error, GenericError) and is_transient(error)
    return Failure(reason(error), transient=transient, refused=http_status(error) in _REFUSED)


def is_transient(error: Exception) -> bool:
    """Return whether a retry of the request may succeed."""
    code = http_status(error)
    if code is not None:
        return code >= 500 or code in _TRANSIENT_STATUS
    return "redirect without LOCATION" not in str(error)


def reason(error: Exception) -> str:
    """Return the cause of a failed request on one line, without addresses."""
    head, _, debug = str(error).partition(_DEBUG)
    response = re.search(r"status code: (\d{3} ?[A-Za-z -]*)", head)
    if response:
        code = re.search(r"<Code>(\w+)</Code>", head)
        return f"the server responded {response[1].strip()}" + (f", {code[1]}" if code else "")
    if "TimedOut" in debug or "kind: Timeout" in debug:
        return "the request timed out"
    if "IncompleteBody" in debug:
        return "the response ended early"
    detail = re.findall(r'(?:message|error): "([^"]+)"', debug)
    return detail[-1] if detail else head.rpartition(": ")[2].strip() or type(error).__name__


def hint(error: Exception) -> str | None:
    """Return how the user can fix the cause, or None if unknown."""
    text = str(error)
    if _METADATA_HOST in text:
        return (
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for gs:// GOOGLE_APPLICATION_CREDENTIALS, or "
            "AWS_SKIP_SIGNATURE=true for a public bucket: no credentials were found"
        )
    if "redirect without LOCATION" in text:
        return "set AWS_REGION: the bucket is in another region"
    if http_status(error) in (401, 403):
        return "check the credentials in the environment; without permission to list, missing files are denied, too"
    return None


def translated(error: Exception, file: str, tries: int = 1, seconds: float = 0.0) -> FastvidError:
    """Return the error that describes a failed request."""
    if isinstance(error, FileNotFoundError):
        what = "bucket" if "NoSuchBucket" in str(error) else "file"
        return StorageError(f"{what} does not exist", file=file)
    if isinstance(error, PreconditionError):
        return replaced_error(file)
    if isinstance(error, NotSupportedError):
        return StorageError(
            "server does not support byte ranges", file=file, hint="use a server that does, such as nginx"
        )
    if isinstance(error, ValueError):
        return UsageError(f"invalid file name: {reason(error)}", file=file)
    text = reason(error)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        text = f"access denied: {text}"
    if tries > 1:
        text += f" ({tries} attempts in {seconds:.0f} s)"
    too_short = http_status(error) == 416  # the file ends before the range
    return (StorageError if too_short else UnavailableError)(text, hint=hint(error), file=file)
