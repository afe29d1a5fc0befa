"""Decode audio packets to the samples of a window, at any rate: the one file that decodes sound with PyAV.

Resampling is swresample's, with phases that are exact fractions: the filter is symmetric, so nothing is shifted, and
each sample depends only on the source within `FILTER_REACH`. A window starts where both rates have a sample at the same
time, so its samples have the same bits as in any other window of the same track.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import av
import numpy as np
from av.audio.codeccontext import AudioCodecContext
from av.codec.context import CodecContext
from av.filter import Graph

from fastvid.audio.packets import EncodedAudio, source_span
from fastvid.audio.window import AudioClip, AudioWindow
from fastvid.errors import DecodeError
from fastvid.runtime.arrays import Float32Array

_COOKIE_HEADER = (36).to_bytes(4, "big") + b"alac"
"""FFmpeg takes ALAC's magic cookie with its box header; the whole box has 36 bytes."""

_DTYPES: Final[dict[str, Any]] = {"fltp": np.float32, "s16p": np.int16, "s32p": np.int32}
"""Sample formats of FFmpeg's decoders of AAC and ALAC."""


def decode_audio(encoded: EncodedAudio | None, window: AudioWindow) -> AudioClip:
    """Decode, mix and resample a window."""
    first, count, rate = window.first, window.count, window.rate
    data = np.zeros((window.channels or 1, count), np.float32)
    mask = np.zeros(count, bool)
    clip = AudioClip(data, rate, first / rate, mask)
    if encoded is None or not encoded.packets or not count:
        return clip
    mask[_heard(encoded, window)] = True
    return AudioClip(_resample(_decode(encoded), encoded, window), rate, first / rate, mask)


def _heard(encoded: EncodedAudio, window: AudioWindow) -> slice:
    low = -(-encoded.start * window.rate // encoded.rate) - window.first
    high = -(-encoded.stop * window.rate // encoded.rate) - window.first
    return slice(max(0, low), max(0, high))


def _decode(encoded: EncodedAudio) -> list[tuple[int, list[Float32Array]]]:
    """Return the number of the first sample of each packet, and for each channel its samples, float32 [N]."""
    context = _open(encoded)
    starts, lengths = encoded.times.tolist(), np.diff(encoded.times).tolist()
    parts: list[tuple[int, list[Float32Array]]] = []
    try:
        for packet in [*map(av.Packet, encoded.packets), None]:
            for frame in context.decode(packet):
                if frame.is_corrupt or len(parts) == len(lengths):
                    raise DecodeError("audio decoder reports a corrupt or an additional frame")
                if frame.sample_rate != encoded.rate:
                    raise DecodeError(f"audio has {frame.sample_rate} Hz, its tables say {encoded.rate}")
                samples = _channels(frame, lengths[len(parts)])
                if parts and len(parts[0][1]) != len(samples):
                    raise DecodeError(f"audio changes from {len(parts[0][1])} to {len(samples)} channels")
                # The last packet may be longer than its time. If one is shorter, the track has a gap: silence.
                parts.append((starts[len(parts)], samples))
    except (av.FFmpegError, ValueError) as error:
        raise DecodeError(f"{encoded.codec} decoder: {error}") from error
    if len(parts) != len(lengths):
        raise DecodeError(f"{len(parts)} audio frames were decoded from {len(lengths)} packets")
    return parts


def _open(encoded: EncodedAudio) -> AudioCodecContext:
    """Open a decoder. Never reused: the noise of AAC depends on all that the decoder has decoded."""
    context = CodecContext.create(encoded.codec, "r")
    assert isinstance(context, AudioCodecContext)
    cookie = encoded.codec == "alac"
    context.extradata = _COOKIE_HEADER + encoded.extradata if cookie else encoded.extradata
    context.thread_count = 1
    return context


def _channels(frame: av.AudioFrame, most: int) -> list[Float32Array]:
    """Return at most the first `most` samples of each channel of a frame, float32 [N], full scale 1."""
    dtype = _DTYPES.get(frame.format.name)
    if dtype is None:
        raise DecodeError(f"audio decodes to {frame.format.name} samples, expected {', '.join(_DTYPES)}")
    count = min(frame.samples, most)
    # Not `to_ndarray`, which takes as long as a quarter of decoding AAC.
    planes: Any = frame.planes  # buffers, which the stubs omit
    samples = [np.frombuffer(plane, dtype, count) for plane in planes]
    if dtype is np.float32:
        return samples
    return [one.astype(np.float32) * np.float32(2.0 ** (1 - 8 * one.itemsize)) for one in samples]


def _mix(samples: Float32Array, channels: int | None) -> Float32Array:
    if channels is None or channels == len(samples):
        return samples
    mean: Float32Array = samples.mean(axis=0, keepdims=True, dtype=np.float32)
    return np.repeat(mean, channels, axis=0)


def _resample(
    parts: Sequence[tuple[int, Sequence[Float32Array]]], encoded: EncodedAudio, window: AudioWindow
) -> Float32Array:
    """Return a window of a track; what is not in `parts`, or not heard, is silent."""
    rate = encoded.rate
    first, end = source_span(window, rate)
    divisor = math.gcd(rate, window.rate)
    up, down = window.rate // divisor, rate // divisor
    first -= first % down  # here both rates have a sample
    source = np.zeros((len(parts[0][1]), end - first), np.float32)
    for begin, channels in parts:
        low, high = max(first, begin, encoded.start), min(end, begin + len(channels[0]), encoded.stop)
        if low < high:
            for target, samples in zip(source, channels, strict=True):
                target[low - first : high - first] = samples[low - begin : high - begin]
    source = _mix(source, window.channels)
    start = window.first - first // down * up
    if up != down:
        source = np.stack([_swresample(channel, rate, window.rate) for channel in source])
    found = source[:, start : start + window.count]
    if found.shape[1] != window.count:
        raise DecodeError(f"resampling yields {found.shape[1]} samples, expected {window.count}")
    return found


def _swresample(samples: Float32Array, rate: int, wanted: int) -> Float32Array:
    """Resample one channel."""
    graph = Graph()
    graph.threads = 1  # otherwise it starts a thread for every core
    source = graph.add("abuffer", f"sample_rate={rate}:sample_fmt=fltp:channel_layout=mono:time_base=1/{rate}")
    resampler, sink = graph.add("aresample", str(wanted)), graph.add("abuffersink")
    source.link_to(resampler)
    resampler.link_to(sink)
    graph.configure()
    frame = av.AudioFrame.from_ndarray(samples[None], "fltp", "mono")
    frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), 0
    source.push(frame)
    source.push(None)
    parts: list[Float32Array] = []
    while True:
        try:
            made: Any = sink.pull()
            parts.append(made.to_ndarray()[0])
        except (av.error.EOFError, av.error.BlockingIOError):
            return np.concatenate(parts) if parts else np.zeros(0, np.float32)
