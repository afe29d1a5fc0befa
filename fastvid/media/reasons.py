"""Why a source did not become a sample: codes that stay the same over versions, with one line each.

The ledger holds the code and a message; reports group by the code.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """A reason code; its value is what the ledger stores."""

    # The file itself
    MISSING = "missing"
    OUTSIDE = "outside"
    UNREADABLE = "unreadable"
    UNREACHABLE = "unreachable"
    CHANGED = "changed"
    EMPTY = "empty"
    # What it holds
    NOT_VIDEO = "not-video"
    PLAYLIST = "playlist"
    BROKEN_CONTAINER = "broken-container"
    NO_VIDEO_STREAM = "no-video-stream"
    NO_DECODER = "no-decoder"
    NO_FRAMES = "no-frames"
    TRUNCATED = "truncated"
    DAMAGED = "damaged"
    OUT_OF_RANGE = "out-of-range"
    # What fastvid can take
    TOO_LARGE = "too-large"
    TOO_LONG = "too-long"
    BAD_SHAPE = "bad-shape"
    HDR = "hdr"
    # What happened on the way
    TIMEOUT = "timeout"
    MEMORY = "memory"
    NO_SPACE = "no-space"
    CRASHED = "crashed"
    ENCODE_FAILED = "encode-failed"
    VERIFY_FAILED = "verify-failed"
    NO_INDEX = "no-index"


MEANING: dict[Reason, str] = {
    Reason.MISSING: "the annotations name a file that is not there",
    Reason.OUTSIDE: "a symbolic link that leads out of the source folder",
    Reason.UNREADABLE: "the file cannot be opened or read",
    Reason.UNREACHABLE: "its server does not give the file, also when asked again at the end",
    Reason.CHANGED: "the file is another one than when the sources were listed, or changed while it was read",
    Reason.EMPTY: "the file has no bytes",
    Reason.NOT_VIDEO: "the first bytes belong to no video container that is accepted",
    Reason.PLAYLIST: "a playlist or script that points to other files; such files are never opened",
    Reason.BROKEN_CONTAINER: "the container is known, but its header cannot be read",
    Reason.NO_VIDEO_STREAM: "there is no moving picture inside: only audio, text or a cover image",
    Reason.NO_DECODER: "this build of ffmpeg has no decoder for the codec",
    Reason.NO_FRAMES: "no frame can be decoded",
    Reason.TRUNCATED: "the data ends before the header says",
    Reason.DAMAGED: "the decoder reports errors, or gives fewer frames than there are packets",
    Reason.OUT_OF_RANGE: "the clip's start or end lies outside the video",
    Reason.TOO_LARGE: "a frame has more pixels than the limit",
    Reason.TOO_LONG: "there are more frames than the limit",
    Reason.BAD_SHAPE: "the picture is too long and thin for a side limit, or a single pixel wide or high",
    Reason.HDR: "high dynamic range, and this build of ffmpeg cannot tone-map it (no zscale filter)",
    Reason.TIMEOUT: "it took longer than the limit, also when tried again alone",
    Reason.MEMORY: "it needs more memory than the limit",
    Reason.NO_SPACE: "the disk for temporary files was full; no verdict on the file, so the job stops",
    Reason.CRASHED: "the process that worked on it died, also when tried again alone",
    Reason.ENCODE_FAILED: "ffmpeg failed for another reason; its message is in the ledger",
    Reason.VERIFY_FAILED: "what was written does not pass verification",
    Reason.NO_INDEX: "its packets cannot be taken as they are; a profile that encodes takes it",
}
"""One line for people on each reason."""
