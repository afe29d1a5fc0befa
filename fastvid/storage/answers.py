"""What failed requests say: the text of the library's errors, read for a status and a reason."""

from __future__ import annotations

import re
from typing import Final

_DEBUG: Final = "\n\nDebug source"
_METADATA_HOST: Final = "169.254.169.254"  # where AWS and Google hand out a machine's credentials

_PASSING_STATUS: Final = frozenset({408, 425, 429})
"""Answers below 500 that mean "not now" (RFC 9110, RFC 8470, RFC 6585)."""


def status(error: Exception) -> int | None:
    """The HTTP status that the server answered with, None when there was no such answer."""
    found = re.search(r"non-2xx status code: (\d{3})", str(error))
    return int(found[1]) if found else None


def passing(error: Exception) -> bool:
    """Whether the request may succeed when it is made again."""
    code = status(error)
    if code is not None:
        return code >= 500 or code in _PASSING_STATUS
    return "redirect without LOCATION" not in str(error)


def reason(error: Exception) -> str:
    """What went wrong, on one line without addresses."""
    head, _, debug = str(error).partition(_DEBUG)
    answered = re.search(r"status code: (\d{3} ?[A-Za-z -]*)", head)
    if answered:
        code = re.search(r"<Code>(\w+)</Code>", head)
        return f"the server answered {answered[1].strip()}" + (f", {code[1]}" if code else "")
    if "TimedOut" in debug or "kind: Timeout" in debug:
        return "no answer in time"
    if "IncompleteBody" in debug:
        return "the answer ended early"
    detail = re.findall(r'(?:message|error): "([^"]+)"', debug)
    return detail[-1] if detail else head.rpartition(": ")[2].strip() or type(error).__name__


def hint(error: Exception) -> str | None:
    """What the user can do about it."""
    text = str(error)
    if _METADATA_HOST in text:
        return (
            "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for gs:// "
            "GOOGLE_APPLICATION_CREDENTIALS, or AWS_SKIP_SIGNATURE=true for a public bucket"
        )
    if "redirect without LOCATION" in text:
        return "the bucket lies in another region: set AWS_REGION"
    if status(error) in (401, 403):
        return "check the credentials in the environment; a store that may not list answers so for missing files, too"
    return None
