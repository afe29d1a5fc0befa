"""Why sources are rejected: codes that are stable across versions, and what each means.

The ledger stores the code and a message; reports group by the code.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

from fastvid.errors import SourceError

ENCODE_HINT: Final = "re-encode it with a profile: `fastvid shard --profile compact`"
"""The hint for a video whose packets cannot be used unchanged."""


class Reason(StrEnum):
    """A reason code; the ledger stores its value."""

    meaning: str  # in one line

    def __new__(cls, value: str, meaning: str = "") -> Reason:
        """Create a member of its value, with its meaning."""
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    # The file itself
    MISSING = "missing", "a link or the annotations name a file that does not exist"
    OUTSIDE = "outside", "a symbolic link that leads outside the source folder"
    UNREADABLE = "unreadable", "the disk does not deliver the file, even in a retry at the end"
    UNREACHABLE = "unreachable", "its server did not deliver the file; `fastvid add --retry-rejected` asks it again"
    CHANGED = "changed", "the file changed after the sources were listed, or while it was read"
    EMPTY = "empty", "the file is empty"
    BLOCKED = "blocked", "its bytes were taken down: their SHA-256 is on the dataset's block list"
    DUPLICATE_NAME = "duplicate-name", "a tar has two members of this name, and the first was taken"
    # Its content
    NOT_VIDEO = "not-video", "the first bytes are not those of an accepted video container"
    PLAYLIST = "playlist", "a playlist or script that refers to other files; such files are never opened"
    BROKEN_CONTAINER = "broken-container", "the container is recognised, but its header cannot be read"
    NO_VIDEO_STREAM = "no-video-stream", "the file has no video stream: only audio, text or a cover image"
    NO_DECODER = "no-decoder", "this build of ffmpeg has no decoder for the codec"
    NO_FRAMES = "no-frames", "no frame can be decoded"
    TRUNCATED = "truncated", "the data ends earlier than the header says"
    DAMAGED = "damaged", "the decoder reports errors, or returns fewer frames than there are packets"
    OUT_OF_RANGE = "out-of-range", "the clip's start or end is outside the video"
    # Limits of fastvid
    TOO_LARGE = "too-large", "a frame has more pixels than the limit"
    TOO_LONG = "too-long", "there are more frames than the limit"
    BAD_SHAPE = "bad-shape", "the picture is too long and thin for a side limit, or a single pixel wide or high"
    HDR = "hdr", "high dynamic range: encoding by an ffmpeg with zscale tone-maps it, --hdr keep leaves it as it is"
    # Processing
    TIMEOUT = "timeout", "it took longer than the limit, even in a retry by itself"
    MEMORY = "memory", "it needs more memory than the limit"
    NO_SPACE = "no-space", "the disk for temporary files was full; the file is not rejected, the job stops"
    CRASHED = "crashed", "the worker process died, even in two retries by itself"
    ENCODE_FAILED = "encode-failed", "ffmpeg failed for another reason; its message is in the ledger"
    VERIFY_FAILED = "verify-failed", "the encoded sample does not pass verification"
    NO_INDEX = "no-index", "its packets cannot be used unchanged; re-encode it with a profile"


def unusable(message: str) -> SourceError:
    """Return the error for a video whose packets cannot be used unchanged."""
    return SourceError(message, reason=Reason.NO_INDEX, hint=ENCODE_HINT)


NOTES: dict[str, str] = {
    "whole": "clips are right, but slow: decoding begins at the first packet; `fastvid shard` makes them fast",
    "from-key-frames": "clips are right, but fetch all packets since their key frame",
    "times-disordered": "the times of the container are out of order; frames are counted as they are shown",
    "times-missing": "the container has no times; its rate is used",
    "variable-rate": "frames last different times; nothing to do",
    "timing": "frames were not evenly spaced, and were made so",
    "size": "sides are no multiples of 16; nothing to do",
    "pixels": "another pixel format than that of profiles; nothing to do",
    "colour": "other colour tags than those of profiles, or none; nothing to do",
    "pixel-aspect": "pixels are not square; pictures are made so",
    "clip-cut-short": "the annotated clip begins before its video or ends after it; only what exists is in it",
    "edit-list": "frames that players hide are hidden",
    "kept-small": "smaller than the short side; --enlarge enlarges them",
    "enlarged": "smaller than the short side, and enlarged to it",
    "duplicate": "the same bytes as another source; --drop-duplicates hides them",
    "salvaged": "the longest run without damage was kept",
}
"""What warnings of the ledger mean, by their first words; a warning that is not listed explains itself."""


def explain_note(note: str) -> str:
    """Return a warning of the ledger, followed by its meaning in parentheses if it has one in NOTES."""
    name = next((name for name in NOTES if re.match(rf"{name}(-|: |$)", note)), None)
    return note if name is None else f"{note} ({NOTES[name]})"
