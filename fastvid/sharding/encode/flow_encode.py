"""Make the flow stream of an encoded RGB stream: decode, estimate, encode and verify.

One frame is in memory at a time. Flow is encoded at the same quality as RGB, and takes about as many bytes; one level
is 0.16 pixels. With DIS it takes longer than RGB, with TV-L1 far longer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Final

import numpy as np

from fastvid.errors import SourceError
from fastvid.media.colour_tags import tagged
from fastvid.media.demuxer import open_demuxer
from fastvid.media.ffmpeg import FfmpegBuild
from fastvid.media.limits import Limits
from fastvid.media.reasons import Reason
from fastvid.runtime.arrays import UInt8Array
from fastvid.sharding.encode.check_encoded import Verified, verify
from fastvid.sharding.encode.flow import FlowSettings, estimate_flow
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.profiles import output_options
from fastvid.sharding.encode.transcode import read_back, run_ffmpeg

# Wall time per frame and megapixel: far more than one core needs for DIS.
_SECONDS_PER_MEGAPIXEL: Final = {"dis": 2.0, "tvl1": 180.0}
# Allowed change of a frame's mean level by encoding. A wrong range, matrix or size changes it more.
_MEAN_LEVELS: Final = 3.0


def flow_seconds(settings: FlowSettings, limits: Limits, *, frames: int, pixels: int) -> float:
    """Return the wall-time limit for the flow of a sample, in seconds."""
    seconds = _SECONDS_PER_MEGAPIXEL[settings.method] * frames * max(pixels / 1e6, 0.25)
    return min(limits.max_seconds, limits.seconds + seconds)


def encode_flow(
    build: FfmpegBuild,
    profile: Profile,
    settings: FlowSettings,
    video: bytes,
    shape: Verified,
    rate: Fraction,
    limits: Limits,
    *,
    patience: float = 1.0,
) -> bytes:
    """Encode the flow stream of an encoded sample, in the same profile.

    `rate`: frames per second. Returns an MP4 with the same number of frames and width, and twice the height.
    """
    seconds = patience * flow_seconds(settings, limits, frames=shape.num_frames, pixels=shape.width * shape.height)
    size = (shape.width, 2 * shape.height)
    means: list[float] = []

    def pictures() -> Iterator[bytes]:
        chroma = bytes([128]) * (size[0] * size[1] // 2)
        for levels in estimate_flow(_luma(video), settings):
            means.append(float(levels.mean()))
            yield levels.tobytes()
            yield chroma

    with tempfile.TemporaryFile(prefix="fastvid-") as file:
        command = _command(build, profile, size, rate, shape.num_frames, f"file:/dev/fd/{file.fileno()}")
        log = run_ffmpeg(command, [file.fileno()], seconds, limits, stdin=pictures())
        if log.status:
            last = "; ".join(log.last)
            raise SourceError(f"ffmpeg exited with {log.status} on flow: {last}", reason=Reason.ENCODE_FAILED)
        data = read_back(file)
    decoded: list[float] = []
    count = (shape.num_frames, shape.num_frames)

    def note_mean(_: int, frame: Any) -> None:
        decoded.append(_mean(frame))

    verify(data, profile, frames=count, rate=rate, size=size, full_range=True, on_frame=note_mean)
    worst = max((abs(a - b) for a, b in zip(means, decoded, strict=True)), default=0.0)
    if worst > _MEAN_LEVELS:
        raise SourceError(
            f"the encoded flow is wrong: the mean of a frame differs by {worst:.1f} levels from the estimated flow",
            reason=Reason.VERIFY_FAILED,
        )
    return data


def _command(
    build: FfmpegBuild, profile: Profile, size: tuple[int, int], rate: Fraction, frames: int, target: str
) -> list[str]:
    pix_fmt = "yuvj420p" if profile.full_range else "yuv420p"
    command = [build.path, "-nostdin", "-hide_banner", "-nostats", "-loglevel", "level+verbose", "-y"]
    command += ["-f", "rawvideo", "-pixel_format", pix_fmt, "-video_size", f"{size[0]}x{size[1]}"]
    command += ["-framerate", str(rate), "-threads", "1", "-i", "pipe:0", "-map", "0:v:0"]
    # Tagged full range on both sides, so that no build of ffmpeg inserts a conversion.
    command += ["-filter:v", f"{tagged(full_range=True)},setsar=1"]
    for name, value in output_options(profile, size, frames=frames, full_range=True).items():
        command += [f"-{name}", str(value)]
    return [*command, target]


def _luma(video: bytes) -> Iterator[UInt8Array]:
    """Yield the luma of every frame, uint8 [H, W]."""
    with open_demuxer(video, "mov") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for frame in container.decode(stream):
            yield _plane(frame).copy()


def _plane(frame: Any) -> UInt8Array:
    plane: Any = frame.planes[0]  # supports the buffer protocol, but PyAV's stubs do not say so
    return np.ndarray((frame.height, frame.width), np.uint8, plane, 0, (plane.line_size, 1))


def _mean(frame: Any) -> float:
    return float(_plane(frame).mean())
