"""Write files of a sample: a clip as an MP4, a frame as PNG or JPEG, the sound as stored."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any, Final, cast

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.codec.context import CodecContext
from av.video.frame import VideoFrame

from fastvid.audio.window import AudioClip
from fastvid.decode.access.indices import frames_at
from fastvid.decode.access.video import Video
from fastvid.errors import DecodeError, UsageError
from fastvid.report.markup import png
from fastvid.runtime.arrays import IntArray, UInt8Array

_CHUNK: Final = 32  # frames in memory at a time
# x264's guide calls 17 or 18 visually lossless; 12 leaves room for the conversion from RGB.
_X264: Final = {"crf": "12", "preset": "medium", "threads": "1"}
_AAC_BITS: Final = 160_000  # per second and channel; FFmpeg's guide calls 128k for two channels good
_LAYOUTS: Final = {1: "mono", 2: "stereo", 3: "3.0", 4: "4.0", 5: "5.0", 6: "5.1", 8: "7.1"}
_BT709: Final = 1  # AVColorSpace and AVColorPrimaries in libavutil/pixfmt.h


def clip_frames(video: Video, start: float, stop: float) -> IntArray:
    """Return the frames shown from `start` seconds until before `stop`, int64 [T]; `stop` may be the video's end."""
    if not start < stop or stop > float(video.duration):
        raise UsageError(
            f"seconds {start:.6g} to {stop:.6g} are no part of the video",
            key=video.key,
            hint=f"give START:STOP between 0 and {float(video.duration):.6g}",
        )
    first = int(frames_at(video.info, [start])[0])
    whole = stop == float(video.duration)
    last = video.num_frames - 1 if whole else int(frames_at(video.info, [np.nextafter(stop, 0)])[0])
    return np.arange(first, max(first, last) + 1, dtype=np.int64)


def encode_clip(video: Video, frames: IntArray) -> bytes:
    """Encode consecutive frames again as an H.264 MP4 at the video's frame rate, visually lossless.

    The sound of exactly their seconds, if there is any, is encoded again as AAC.
    """
    target = io.BytesIO()
    sound = video.audio(float(frames[0] / video.fps), float((frames[-1] + 1) / video.fps))
    if sound.data.shape[0] not in _LAYOUTS:
        sound = video.audio(float(frames[0] / video.fps), float((frames[-1] + 1) / video.fps), mono=True)
    with av.open(target, "w", format="mp4") as container:
        try:
            stream = cast(Any, container.add_stream("libx264", rate=video.fps))
        except ValueError as error:
            raise DecodeError(
                "this build of FFmpeg has no libx264", key=video.key, hint="install PyAV from PyPI"
            ) from error
        even = video.width % 2 == 0 and video.height % 2 == 0
        stream.width, stream.height, stream.pix_fmt = video.width, video.height, "yuv420p" if even else "yuv444p"
        stream.options = _X264
        stream.codec_context.time_base = 1 / video.fps
        stream.codec_context.colorspace = stream.codec_context.color_primaries = _BT709
        stream.codec_context.color_trc = stream.codec_context.color_range = 1  # BT.709, limited range
        track = _add_track(container, sound) if sound.mask.any() else None
        for begin in range(0, len(frames), _CHUNK):
            pictures = video.frames(frames[begin : begin + _CHUNK]).data
            for number, picture in enumerate(pictures, begin):
                frame = VideoFrame.from_ndarray(picture, format="rgb24").reformat(
                    format=stream.pix_fmt, dst_colorspace="ITU709", dst_color_range="MPEG", threads=1
                )
                frame.pts, frame.time_base = number, 1 / video.fps
                container.mux(stream.encode(frame))
            if track is not None:
                # Sound lies beside its pictures, so that players need not seek.
                first, last = (int(at / video.fps * sound.rate) for at in (begin, begin + len(pictures)))
                _mux_sound(container, track, sound, first, last if begin + _CHUNK < len(frames) else None)
        for one in (stream, track):
            if one is not None:
                container.mux(one.encode(None))
    return target.getvalue()


def _add_track(container: Any, sound: AudioClip) -> Any:
    channels = sound.data.shape[0]
    track = container.add_stream("aac", rate=sound.rate, layout=_LAYOUTS[channels])
    track.bit_rate = _AAC_BITS * channels
    return track


def _mux_sound(container: Any, track: Any, sound: AudioClip, first: int, last: int | None) -> None:
    samples = np.ascontiguousarray(sound.data[:, first:last])
    if samples.shape[1]:
        frame = AudioFrame.from_ndarray(samples, format="fltp", layout=_LAYOUTS[len(samples)])
        frame.sample_rate, frame.pts, frame.time_base = sound.rate, first, Fraction(1, sound.rate)
        container.mux(track.encode(frame))


def encode_still(rgb: UInt8Array, suffix: str) -> bytes:
    """Encode a picture, uint8 [H, W, 3], as ``.png`` or ``.jpg``."""
    if suffix == ".png":
        return png(rgb)
    if suffix not in (".jpg", ".jpeg"):
        raise UsageError(f"cannot write a picture as {suffix or 'a file without a suffix'}", hint="use .png or .jpg")
    context = CodecContext.create("mjpeg", "w")
    context.height, context.width = rgb.shape[:2]
    context.pix_fmt, context.time_base, context.options = "yuvj444p", Fraction(1, 25), {"qmin": "2", "qmax": "2"}
    frame = VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24").reformat(format="yuvj444p", threads=1)
    return b"".join(bytes(packet) for packet in (*context.encode(frame), *context.encode(None)))
