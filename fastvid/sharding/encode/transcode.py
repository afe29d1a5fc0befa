"""Runs ffmpeg on one source within resource limits, detects damage from its log, and checks what it wrote.

ffmpeg exits with 0 even if frames are lost, concealed or decoded from encrypted data. So a source is rejected if
ffmpeg's demuxer or video decoder reports any error, or if a frame is marked as corrupt. Errors of other streams'
decoders are ignored. Not all damage is detected: decoders of HEVC, VP9 and MJPEG decode most flipped bits without an
error.

Each encoded sample is decoded once, from memory, and checked against the guarantees of the format. The flow of a sample
is estimated from the encoded sample and encoded at the same quality, with one frame in memory at a time; it takes about
as many bytes. One level of flow is 0.16 pixels by default. Flow takes longer than RGB with DIS, and far longer with
TV-L1.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import IO, Any, Final

import numpy as np

from fastvid.errors import FormatError, SourceError
from fastvid.format.mp4 import index_mp4, read_track
from fastvid.format.packets import PacketTable, StreamInfo
from fastvid.format.schema import PacketFlag, StreamFlag
from fastvid.media.checks import Finding, Promised, check_stream
from fastvid.media.container import open_demuxer, video_stream
from fastvid.media.ffmpeg import (
    STATISTICS,
    Limits,
    confine_child,
    contents,
    environment,
    no_space,
    temporary_file,
)
from fastvid.media.probe import OpenSource, SourceInfo
from fastvid.media.reasons import Reason
from fastvid.media.timing import tagged
from fastvid.runtime.arrays import UInt8Array, UInt32Array
from fastvid.runtime.processes import how_it_ended
from fastvid.sharding.encode.flow import FlowSettings, estimate_flow
from fastvid.sharding.encode.profiles import (
    QUIET,
    DecodeWindow,
    Profile,
    Settings,
    build_check,
    build_command,
    output_options,
    written_timing,
)
from fastvid.sharding.encode.tiles import plane_of, write_tiles


def verify(
    data: bytes,
    profile: Profile,
    *,
    frames: tuple[int, int],
    rate: Fraction,
    size: tuple[int, int] | None = None,
    full_range: bool | None = None,
    on_frame: Callable[[int, Any], None] | None = None,
) -> StreamInfo:
    """Decode every frame of an encoded sample; check what the job asked for, then what the format promises.

    `frames`: minimum and maximum number of frames. `rate`: required frames per second. `size`: required width and
    height in pixels; by default those that the profile writes for RGB. `full_range`: whether its luma must range
    from 0 to 255; by default as the profile writes RGB.
    """
    try:
        info, records = index_mp4(data, conforms=True)
        PacketTable(records)
        track = read_track(memoryview(data))
    except FormatError as error:
        raise _failure(f"the packet index cannot be built: {error.message}") from error
    full = profile.full_range if full_range is None else full_range
    stream = Promised(track, replace(info, fps=rate), full, profile.multiple)
    wrong = chain(_structure(info, records["flags"], profile, frames, size), check_stream(data, stream, on_frame))
    for _, message in wrong:
        raise _failure(message)
    return info


def _structure(
    info: StreamInfo, flags: UInt32Array, profile: Profile, frames: tuple[int, int], size: tuple[int, int] | None
) -> Iterator[Finding]:
    """Yield what differs from the structure that the profile writes."""
    count, keys = info.num_frames, np.count_nonzero(flags & PacketFlag.KEY)
    if info.flags & StreamFlag.WHOLE:
        yield "index", "its packets cannot be decoded selectively"
    if not frames[0] <= count <= frames[1]:
        yield "index", f"{count} frames, expected {frames[0]} to {frames[1]}"
    if keys != -(-count // profile.gop):
        yield "index", f"{keys} key frames in {count} frames, expected one in {profile.gop}"
    if profile.bframes and count > 2 and not (flags & PacketFlag.DROPPABLE).any():
        yield "index", "every frame is a reference frame"
    if size is not None and (info.width, info.height) != size:
        yield "shape", f"{info.width}x{info.height} pixels, expected {size[0]}x{size[1]}"
    if size is None and profile.short_side and min(info.width, info.height) != profile.short_side:
        yield "shape", f"{info.width}x{info.height} pixels, expected {profile.short_side} on the shorter side"


def _failure(message: str) -> SourceError:
    return SourceError(f"the encoded sample is wrong: {message}", reason=Reason.VERIFY_FAILED)


# Limits on the stored log: for damaged streams ffmpeg prints endlessly.
_MAX_LOG_LINES: Final = 200
_MAX_LINE_BYTES: Final = 2000
# How log lines end when a disk or quota is full.
_FULL: Final = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
# Limits on the excerpt of the log in an error message.
_EXCERPT_LINES: Final = 3
_EXCERPT_CHARS: Final = 200


_PREFIX: Final = re.compile(r"^((?:\[[^\]]*\] )*)\[(error|fatal|panic|warning)\] (.*)$")
# Warnings that mean lost picture data, as worded by FFmpeg 5 to 9.
_CORRUPT: Final = re.compile(r"corrupt (decoded frame|input packet)")
# A component's name in brackets: "[h264 @ 0x55...]", "[dec:h264 @ ...]", "[vist#0:0/h264 @ ...]".
_COMPONENT: Final = re.compile(r"\[(?:[^\]@]*[:/])?([\w,.-]+)(?: @ [^\]]*)?\]")
# MPEG-4 may decode one frame more or fewer: a placeholder at the end is not always displayed.
_MPEG4_SLACK: Final = 1


def transcode(
    settings: Settings,
    source: OpenSource,
    info: SourceInfo,
    parts: Sequence[tuple[int, int] | None],
    window: DecodeWindow,
    patience: float = 1.0,
) -> list[bytes]:
    """Encode a source, or parts of it, in one pass; return the MP4s.

    `parts`: frames of each MP4, see `build_command`. `window`: what to decode. `patience`: factor of the time limit.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(temporary_file()) for _ in parts]
        targets = [(f"file:/dev/fd/{file.fileno()}", part) for file, part in zip(files, parts, strict=True)]
        command = build_command(settings, info, source.url, targets, window)
        descriptors = [source.descriptor, *(file.fileno() for file in files)]
        log = run_ffmpeg(command, descriptors, patience * decode_seconds(settings, info), settings.limits)
        _check_log(log, info, whole=all(part is None for part in parts))
        rate = written_timing(info.timing, settings.profile).rate
        return [_sample(file.fileno(), settings.profile, rate) for file in files]


def _sample(descriptor: int, profile: Profile, rate: Fraction) -> bytes:
    """Return the MP4 of a sample: what ffmpeg wrote to a file, or for tiles an MP4 of JPEGs made from it."""
    return write_tiles(descriptor, rate, profile.crf) if profile.is_tiled else contents(descriptor)


def decode_fully(settings: Settings, source: OpenSource, info: SourceInfo, patience: float = 1.0) -> None:
    """Decode a source without writing anything, and check it like `transcode`."""
    command, seconds = build_check(settings, info, source.url), patience * decode_seconds(settings, info)
    _check_log(run_ffmpeg(command, [source.descriptor], seconds, settings.limits), info, whole=True)


def decode_seconds(settings: Settings, info: SourceInfo) -> float:
    """Return the time limit of one decode of a source, in seconds."""
    return settings.limits.transcode_seconds(frames=info.timing.shown, pixels=info.width * info.height)


class FfmpegLog:
    """The log of one run of ffmpeg, its statistics and exit status.

    `statistics`: number of packets and frames of the video stream, if it was decoded.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.last: deque[str] = deque(maxlen=5)
        self.statistics: tuple[int, int] | None = None
        self.status = 0

    def read(self, stream: IO[bytes]) -> None:
        """Read a pipe until it closes."""
        while line := stream.readline(_MAX_LINE_BYTES):
            text = line.decode("utf-8", "replace").strip()
            found = STATISTICS.search(text)
            if found:
                self.statistics = int(found[1]), int(found[2])
            elif _PREFIX.match(text):
                self.last.append(text)
                if len(self.lines) < _MAX_LOG_LINES:
                    self.lines.append(text)


def run_ffmpeg(
    command: Sequence[str],
    descriptors: Sequence[int],
    seconds: float,
    limits: Limits,
    *,
    stdin: Iterable[bytes] | None = None,
) -> FfmpegLog:
    """Run ffmpeg within resource limits."""
    log = FfmpegLog()
    # ffmpeg stays in this process's group, so that killing the group also kills ffmpeg.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=tuple(descriptors),
        env=environment(),
    )
    assert process.stderr is not None
    reader = threading.Thread(target=log.read, args=(process.stderr,), daemon=True)
    deadline = time.monotonic() + seconds
    # If ffmpeg stops reading, writing to it would block forever; Popen.wait with a timeout would poll.
    killer = threading.Timer(seconds, process.kill)
    try:
        reader.start()
        killer.start()
        with contextlib.suppress(ProcessLookupError):
            # Allow twice the wall time, so that for a single thread the wall-time limit applies first.
            confine_child(process.pid, limits, cpu_seconds=2 * seconds)
        if stdin is not None and process.stdin is not None:
            # If the program exits early, its log says why.
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                for data in stdin:
                    pipe.write(data)
        reader.join()
        log.status = process.wait()
        if log.status == -signal.SIGKILL and time.monotonic() >= deadline:
            raise SourceError(f"ffmpeg took longer than {seconds:.0f} s", reason=Reason.TIMEOUT, transient=True)
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        reader.join()
        process.stderr.close()
    if any(line.endswith(_FULL) for line in log.lines):
        raise no_space()
    return log


_UNREFERENCED: Final = "mmco: unref short failure"


def _check_log(log: FfmpegLog, info: SourceInfo, *, whole: bool) -> None:
    """Raise a SourceError if ffmpeg reported a problem."""
    complaints = [text for line in log.lines if (text := _video_error(line, info.others)) is not None]
    said = "; ".join(list(dict.fromkeys(complaints or log.last))[:_EXCERPT_LINES])[:_EXCERPT_CHARS]
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
            hint="set FASTVID_FFMPEG to a newer ffmpeg",
        )
    packets, decoded = log.statistics or (0, 0)
    if log.status and not complaints:
        raise SourceError(f"ffmpeg exited with {log.status}: {said}", reason=Reason.ENCODE_FAILED)
    if not decoded:
        raise SourceError(f"no frame decodes from {packets} packets: {said}", reason=Reason.NO_FRAMES)
    # In a cut MP4, the edit list hides pictures without references; ignore the errors that their decoding reports.
    hides = info.container == "mov" and info.timing.shown <= decoded < packets
    if complaints and not (hides and set(complaints) == {_UNREFERENCED}):
        # Counts are meaningless for parts: ffmpeg decodes some frames after the end, depending on its threads.
        what = f"{decoded} frames decode from {packets} packets, with errors" if whole else "frames decode with errors"
        raise SourceError(f"{what}: {said}", reason=Reason.DAMAGED)
    slack = _MPEG4_SLACK if "mpeg4" in info.codec else 0
    if whole and decoded < info.timing.shown - slack:
        raise SourceError(f"only {decoded} of {info.timing.shown} frames decode", reason=Reason.DAMAGED)


def _video_error(line: str, others: frozenset[str]) -> str | None:
    """Return the message of a log line that reports damaged video; None for other lines."""
    matched = _PREFIX.match(line)
    if matched is None:
        return None
    parts, level, text = matched.groups()
    named = {name for part in _COMPONENT.findall(parts) for name in part.split(",")}
    if named & others:
        return None
    if level == "warning" and not _CORRUPT.search(text):
        return None
    return text


# Limits of the wall time in seconds per frame and megapixel, far above what one core needs.
_SECONDS_PER_MEGAPIXEL: Final = {"dis": 2.0, "tvl1": 180.0}
# Largest allowed change of a frame's mean level by encoding. A wrong range, matrix or size changes it more.
_MEAN_LEVELS: Final = 3.0


def flow_seconds(settings: Settings, how: FlowSettings, shape: StreamInfo) -> float:
    """Return the wall-time limit for the flow of a sample, in seconds."""
    megapixels = max(shape.width * shape.height / 1e6, 0.25)
    seconds = _SECONDS_PER_MEGAPIXEL[how.method] * shape.num_frames * megapixels
    return min(settings.limits.max_seconds, settings.limits.seconds + seconds)


def encode_flow(
    settings: Settings, how: FlowSettings, video: bytes, shape: StreamInfo, rate: Fraction, patience: float = 1.0
) -> bytes:
    """Encode the flow stream of an encoded sample, in the same profile.

    `rate`: frames per second. Returns an MP4 with the same number of frames and width, and twice the height.
    """
    profile, seconds = settings.profile, patience * flow_seconds(settings, how, shape)
    size = (shape.width, 2 * shape.height)
    means: list[float] = []

    def pictures() -> Iterator[bytes]:
        chroma = bytes([128]) * (size[0] * size[1] // 2)
        for levels in estimate_flow(_luma(video), how):
            means.append(float(levels.mean()))
            yield levels.tobytes()
            yield chroma

    with tempfile.TemporaryFile(prefix="fastvid-") as file:
        command = _flow_command(settings, size, rate, shape.num_frames, f"file:/dev/fd/{file.fileno()}")
        log = run_ffmpeg(command, [file.fileno()], seconds, settings.limits, stdin=pictures())
        if log.status:
            last = "; ".join(log.last)
            raise SourceError(
                f"ffmpeg exited with {log.status} while it encoded optical flow: {last}", reason=Reason.ENCODE_FAILED
            )
        data = _sample(file.fileno(), profile, rate)
    decoded: list[float] = []
    check = partial(verify, data, profile, frames=(shape.num_frames,) * 2, rate=rate, size=size, full_range=True)
    check(on_frame=lambda _, frame: decoded.append(float(plane_of(frame, 0).mean())))
    worst = max((abs(a - b) for a, b in zip(means, decoded, strict=True)), default=0.0)
    if worst > _MEAN_LEVELS:
        raise SourceError(
            f"the encoded flow is wrong: the mean of a frame differs by {worst:.1f} levels from the estimated flow",
            reason=Reason.VERIFY_FAILED,
        )
    return data


def _flow_command(settings: Settings, size: tuple[int, int], rate: Fraction, frames: int, target: str) -> list[str]:
    profile = settings.profile
    command = [
        settings.build.path,
        *QUIET,
        "-f",
        "rawvideo",
        "-pixel_format",
        profile.pix_fmt,
        "-video_size",
        f"{size[0]}x{size[1]}",
    ]
    command += ["-framerate", str(rate), "-threads", "1", "-i", "pipe:0", "-map", "0:v:0"]
    # Tag input and output as full range, so that no build of ffmpeg inserts a conversion.
    command += ["-filter:v", f"{tagged(full_range=True)},setsar=1"]
    for name, value in output_options(profile, size, frames=frames, full_range=True).items():
        command += [f"-{name}", str(value)]
    return [*command, target]


def _luma(video: bytes) -> Iterator[UInt8Array]:
    """Yield the luma of every frame, uint8 [H, W]."""
    with open_demuxer(video, "mov") as container:
        for frame in container.decode(video_stream(container)):
            yield plane_of(frame, 0).copy()
