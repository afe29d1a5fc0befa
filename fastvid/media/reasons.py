"""Why sources are rejected: codes that are stable across versions, and what each means.

The ledger stores the code and a message; reports group by the code.
"""

from __future__ import annotations

import re
from enum import StrEnum


class Reason(StrEnum):
    """A reason code; the ledger stores its value."""

    # The file itself
    MISSING = "missing"
    OUTSIDE = "outside"
    UNREADABLE = "unreadable"
    UNREACHABLE = "unreachable"
    CHANGED = "changed"
    EMPTY = "empty"
    BLOCKED = "blocked"
    DUPLICATE_NAME = "duplicate-name"
    # Its content
    NOT_VIDEO = "not-video"
    PLAYLIST = "playlist"
    BROKEN_CONTAINER = "broken-container"
    NO_VIDEO_STREAM = "no-video-stream"
    NO_DECODER = "no-decoder"
    NO_FRAMES = "no-frames"
    TRUNCATED = "truncated"
    DAMAGED = "damaged"
    OUT_OF_RANGE = "out-of-range"
    # Limits of fastvid
    TOO_LARGE = "too-large"
    TOO_LONG = "too-long"
    BAD_SHAPE = "bad-shape"
    HDR = "hdr"
    # Processing
    TIMEOUT = "timeout"
    MEMORY = "memory"
    NO_SPACE = "no-space"
    CRASHED = "crashed"
    ENCODE_FAILED = "encode-failed"
    VERIFY_FAILED = "verify-failed"
    NO_INDEX = "no-index"


MEANING: dict[Reason, str] = {
    Reason.MISSING: "a link or the annotations name a file that does not exist",
    Reason.OUTSIDE: "a symbolic link that leads outside the source folder",
    Reason.UNREADABLE: "the disk does not deliver the file, even in a retry at the end",
    Reason.UNREACHABLE: "its server does not deliver the file, even in a retry at the end",
    Reason.CHANGED: "the file changed after the sources were listed, or while it was read",
    Reason.EMPTY: "the file is empty",
    Reason.BLOCKED: "its bytes were taken down: their SHA-256 is on the dataset's block list",
    Reason.DUPLICATE_NAME: "a tar has two members of this name, and the first was taken",
    Reason.NOT_VIDEO: "the first bytes are not those of an accepted video container",
    Reason.PLAYLIST: "a playlist or script that refers to other files; such files are never opened",
    Reason.BROKEN_CONTAINER: "the container is recognised, but its header cannot be read",
    Reason.NO_VIDEO_STREAM: "the file has no video stream: only audio, text or a cover image",
    Reason.NO_DECODER: "this build of ffmpeg has no decoder for the codec",
    Reason.NO_FRAMES: "no frame can be decoded",
    Reason.TRUNCATED: "the data ends earlier than the header says",
    Reason.DAMAGED: "the decoder reports errors, or returns fewer frames than there are packets",
    Reason.OUT_OF_RANGE: "the clip's start or end is outside the video",
    Reason.TOO_LARGE: "a frame has more pixels than the limit",
    Reason.TOO_LONG: "there are more frames than the limit",
    Reason.BAD_SHAPE: "the picture is too long and thin for a side limit, or a single pixel wide or high",
    Reason.HDR: "high dynamic range: encoding by an ffmpeg with zscale tone-maps it, --hdr keep leaves it as it is",
    Reason.TIMEOUT: "it took longer than the limit, even in a retry by itself",
    Reason.MEMORY: "it needs more memory than the limit",
    Reason.NO_SPACE: "the disk for temporary files was full; the file is not rejected, the job stops",
    Reason.CRASHED: "the worker process died, even in two retries by itself",
    Reason.ENCODE_FAILED: "ffmpeg failed for another reason; its message is in the ledger",
    Reason.VERIFY_FAILED: "the encoded sample does not pass verification",
    Reason.NO_INDEX: "its packets cannot be used unchanged; re-encode it with a profile",
}
"""A one-line explanation of each reason."""

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
    "edit-list": "frames that players hide are hidden",
    "kept-small": "smaller than the short side; --enlarge enlarges them",
    "enlarged": "smaller than the short side, and enlarged to it",
    "duplicate": "the same bytes as another source; --drop-duplicates hides them",
    "salvaged": "the longest run without damage was kept",
}
"""What the warnings of the ledger mean that do not say it themselves, by their first words."""


def explain_note(note: str) -> str:
    """Return a warning of the ledger with what it means."""
    name = next((name for name in NOTES if re.match(rf"{name}(-|: |$)", note)), None)
    return note if name is None else f"{note} ({NOTES[name]})"
