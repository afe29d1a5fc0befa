"""Runs ffmpeg on one source, inside limits, and reads its verdict from what it prints.

ffmpeg exits with 0 when frames are lost, concealed or made of encrypted garbage. So every error that its demuxer or
video decoder reports is a rejection, and so is every frame that it marks as corrupt. Complaints of decoders of other
streams do not count. None of this sees all damage: decoders of HEVC, VP9 and MJPEG take most flipped bits for a
picture.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Final

from fastvid.errors import SourceError
from fastvid.media.ffmpeg import STATISTICS, FfmpegBuild, environment
from fastvid.media.limits import Limits, confine_child
from fastvid.media.probe import OpenSource, SourceInfo
from fastvid.media.reasons import Reason
from fastvid.media.temporary import no_space, temporary_file
from fastvid.runtime.children import how_it_ended
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.profiles import build_check, build_command

# Damaged streams make ffmpeg print without end.
_KEPT_LINES: Final = 200
_LINE_BYTES: Final = 2000
# What it says, at the end of a line, of a file that it cannot write.
_FULL: Final = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
# What a message repeats of it.
_SAID_LINES: Final = 3
_SAID_BYTES: Final = 200


_PREFIX: Final = re.compile(r"^((?:\[[^\]]*\] )*)\[(error|fatal|panic|warning)\] (.*)$")
# Warnings that mean lost picture data, in the words of FFmpeg 5 to 9.
_CORRUPT: Final = re.compile(r"corrupt (decoded frame|input packet)")
# A part that is named in brackets: "[h264 @ 0x55...]", "[dec:h264 @ ...]", "[vist#0:0/h264 @ ...]".
_PART: Final = re.compile(r"\[(?:[^\]@]*[:/])?([\w,.-]+)(?: @ [^\]]*)?\]")
# One MPEG-4 picture more or less: a last placeholder is sometimes shown, sometimes not.
_MPEG4_SLACK: Final = 1


@dataclass(frozen=True, slots=True)
class Transcoded:
    """What one run of ffmpeg gave.

    Attributes:
        videos: An MP4 for each part asked for.
        decoded: Frames that the source's decoder gave.
        seconds: Wall time of ffmpeg.
    """

    videos: tuple[bytes, ...]
    decoded: int
    seconds: float


def transcode(
    build: FfmpegBuild,
    profile: Profile,
    source: OpenSource,
    info: SourceInfo,
    parts: Sequence[tuple[int, int] | None],
    limits: Limits,
    *,
    patience: float = 1.0,
) -> Transcoded:
    """Encodes a source, or parts of it, in one pass.

    Args:
        build: The ffmpeg to run.
        profile: How to encode.
        source: The open source.
        info: What `probe` found.
        parts: Frames of each MP4, see `build_command`.
        limits: What the source may cost.
        patience: Factor on the time limit.

    Raises:
        SourceError: ffmpeg fails, takes too long or too much, or reports damage; whatever it wrote is dropped.
    """
    seconds = patience * limits.transcode_seconds(frames=info.timing.shown, pixels=info.width * info.height)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(temporary_file()) for _ in parts]
        targets = [(f"file:/dev/fd/{file.fileno()}", part) for file, part in zip(files, parts, strict=True)]
        command = build_command(build, profile, info, source.url, targets, limits)
        started = time.monotonic()
        log = run_ffmpeg(command, [source.descriptor, *(file.fileno() for file in files)], seconds, limits)
        took = time.monotonic() - started
        decoded = _judge(log, info, whole=all(part is None for part in parts))
        return Transcoded(tuple(read_back(file) for file in files), decoded, took)


def play_through(
    build: FfmpegBuild, source: OpenSource, info: SourceInfo, limits: Limits, *, patience: float = 1.0
) -> int:
    """Decodes a source and writes nothing: holds against it what `transcode` does. Returns the number of frames.

    Raises:
        SourceError: ffmpeg fails, takes too long or too much, or reports damage.
    """
    seconds = patience * limits.transcode_seconds(frames=info.timing.shown, pixels=info.width * info.height)
    log = run_ffmpeg(build_check(build, info, source.url, limits), [source.descriptor], seconds, limits)
    return _judge(log, info, whole=True)


class FfmpegLog:
    """What ffmpeg printed: the first complaints, the statistics, and how it ended.

    Attributes:
        lines: The first lines with a level.
        last: The last ones.
        statistics: Packets and frames of the video stream, when it was decoded.
        status: Its exit status.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.last: deque[str] = deque(maxlen=5)
        self.statistics: tuple[int, int] | None = None
        self.status = 0

    def read(self, stream: IO[bytes]) -> None:
        """Takes everything from a pipe, until it ends."""
        while line := stream.readline(_LINE_BYTES):
            text = line.decode("utf-8", "replace").strip()
            found = STATISTICS.search(text)
            if found:
                self.statistics = int(found[1]), int(found[2])
            elif _PREFIX.match(text):
                self.last.append(text)
                if len(self.lines) < _KEPT_LINES:
                    self.lines.append(text)


def run_ffmpeg(
    command: Sequence[str],
    descriptors: Sequence[int],
    seconds: float,
    limits: Limits,
    *,
    feed: Iterable[bytes] | None = None,
) -> FfmpegLog:
    """Runs ffmpeg inside limits.

    Args:
        command: The program and its arguments.
        descriptors: Open files that it inherits.
        seconds: Wall time it may take.
        limits: For its memory and its output.
        feed: What it reads from its standard input; made while it runs.

    Raises:
        SourceError: It takes too long, or there is no room for what it writes. How it ended otherwise is in the log.
    """
    log = FfmpegLog()
    # ffmpeg stays in this process's group: whoever kills the group leaves nothing running.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if feed is None else subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=tuple(descriptors),
        env=environment(),
    )
    assert process.stderr is not None
    reader = threading.Thread(target=log.read, args=(process.stderr,), daemon=True)
    deadline = time.monotonic() + seconds
    # A program that no longer reads would hold the writer for ever.
    late = threading.Timer(seconds, process.kill)
    try:
        reader.start()
        with contextlib.suppress(ProcessLookupError):
            # Twice the wall time: with one thread, the clock on the wall strikes first.
            confine_child(process.pid, limits, cpu_seconds=2 * seconds)
        if feed is not None and process.stdin is not None:
            late.start()
            _feed(process.stdin, feed)
        # Its messages end when it ends; waiting for the process itself, with a limit, is looking and sleeping in turn.
        reader.join(max(0.0, deadline - time.monotonic()))
        log.status = process.wait(timeout=max(0.0, deadline - time.monotonic()))
        if log.status == -signal.SIGKILL and time.monotonic() >= deadline:
            raise _too_slow(seconds)
    except subprocess.TimeoutExpired as error:
        raise _too_slow(seconds) from error
    finally:
        late.cancel()
        process.kill()
        process.wait()
        reader.join()
        process.stderr.close()
    if any(line.endswith(_FULL) for line in log.lines):
        raise no_space()
    return log


def _feed(pipe: IO[bytes], feed: Iterable[bytes]) -> None:
    # A program that ends early says why in its log.
    with contextlib.suppress(BrokenPipeError), pipe:
        for data in feed:
            pipe.write(data)


def _too_slow(seconds: float) -> SourceError:
    return SourceError(f"ffmpeg took longer than {seconds:.0f} s", reason=Reason.TIMEOUT, transient=True)


def _judge(log: FfmpegLog, info: SourceInfo, *, whole: bool) -> int:
    """The number of decoded frames, when ffmpeg was content.

    Raises:
        SourceError: It was not.
    """
    complaints = [text for line in log.lines if (text := _complaint(line, info.others)) is not None]
    said = "; ".join(list(dict.fromkeys(complaints or log.last))[:_SAID_LINES])[:_SAID_BYTES]
    if log.status < 0:
        if -log.status == signal.SIGXCPU:
            raise SourceError("ffmpeg used too much CPU time", reason=Reason.TIMEOUT, transient=True)
        if -log.status == signal.SIGXFSZ:
            raise SourceError("the encoded sample exceeds the size limit", reason=Reason.TOO_LONG)
        raise SourceError(f"ffmpeg {how_it_ended(log.status)}: {said}", reason=Reason.CRASHED, transient=True)
    if "Cannot allocate memory" in said:
        raise SourceError(f"ffmpeg ran out of memory: {said}", reason=Reason.MEMORY)
    if re.search(r"Decoder \(codec .*\) not found|Decoding requested, but no decoder found", said):
        raise SourceError(
            f"this ffmpeg has no decoder for {info.codec}",
            reason=Reason.NO_DECODER,
            hint="name a newer ffmpeg in FASTVID_FFMPEG",
        )
    packets, decoded = log.statistics or (0, 0)
    if log.status and not complaints:
        raise SourceError(f"ffmpeg exits with {log.status}: {said}", reason=Reason.ENCODE_FAILED)
    if not decoded:
        raise SourceError(f"no frame of {packets} packets decodes: {said}", reason=Reason.NO_FRAMES)
    if complaints:
        raise SourceError(f"{decoded} frames of {packets} packets decode, with errors: {said}", reason=Reason.DAMAGED)
    slack = _MPEG4_SLACK if "mpeg4" in info.codec else 0
    if whole and decoded < info.timing.shown - slack:
        raise SourceError(f"{decoded} of {info.timing.shown} frames decode", reason=Reason.DAMAGED)
    return decoded


def _complaint(line: str, others: frozenset[str]) -> str | None:
    """What a line says against the picture; None when it says nothing against it."""
    matched = _PREFIX.match(line)
    if matched is None:
        return None
    parts, level, text = matched.groups()
    named = {name for part in _PART.findall(parts) for name in part.split(",")}
    if named & others:
        return None
    if level == "warning" and not _CORRUPT.search(text):
        return None
    return text


def read_back(file: IO[bytes]) -> bytes:
    """All bytes of a file that another process has written.

    Args:
        file: Open here; its own position does not count.
    """
    # ffmpeg wrote through its own descriptor of the same file.
    size = os.fstat(file.fileno()).st_size
    data = bytearray(size)
    view, position = memoryview(data), 0
    while position < size:
        got = os.preadv(file.fileno(), [view[position:]], position)
        if not got:
            break
        position += got
    return bytes(data)
