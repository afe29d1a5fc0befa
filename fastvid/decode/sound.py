"""The sound of a clip: its exact window in time, the packets that decode it, and its samples at any rate.

Second zero is the first frame of the video. At rate r, sample n is the sound at n / r seconds, whatever the window; the
window from `start` to `stop` seconds contains the samples round(start * r) to round(stop * r) - 1, halves rounded up.
Adjacent windows therefore share no sample and miss none.

Only the packets of a window are read and checked, before anything is decoded. Resampling is that of swresample, with
phases that are exact fractions: the filter is symmetric, so nothing is shifted in time, and each sample depends only on
source samples within `FILTER_REACH`. Resampling starts where both rates have a sample at the same time, so a sample has
the same bits in every window of the same track.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import av
import numpy as np
from av.audio.codeccontext import AudioCodecContext
from av.codec.context import CodecContext
from av.filter import Graph

from fastvid.decode.clips import reading
from fastvid.errors import DecodeError
from fastvid.format.mp4 import AudioTrack, find_moov, read_sound_track
from fastvid.format.shard import BlockReader, Shard
from fastvid.runtime.arrays import BoolArray, Float32Array, IntArray
from fastvid.runtime.values import check_integer, check_switches

MOST_RATE: Final = 768_000
"""Highest sample rate, in samples per second: four times that of studio recordings."""


@dataclass(frozen=True)
class Audio:
    """The sound of a loader's clips: exactly the seconds of their frames.

    A clip sounds from the start of its first frame to the end of its last one, in the order of the video, whatever the
    order of its frames. It is resampled by FFmpeg's swresample: the same second of a video has the same samples in
    every clip, except where AAC replaces parts of the sound by noise (PNS), which its decoder draws at random. Before
    the start and after the end of the track, and if a sample has none, it is silent and `Batch.audio_mask` is False.

    Args:
        rate: Samples per second, 1 to 768,000.
        mono: Whether to deliver one channel, the mean of all. Otherwise two are delivered: a single channel is
            repeated, and the mean of more than two is delivered twice.

    Raises:
        UsageError: If the rate is out of range.
    """

    rate: int
    mono: bool = True

    def __post_init__(self) -> None:
        check_rate(self.rate)
        check_switches(mono=self.mono)

    @property
    def channels(self) -> int:
        """Channels of the delivered sound, 1 or 2."""
        return 1 if self.mono else 2

    def window(self, frames: IntArray, fps: Fraction) -> AudioWindow:
        """Return the window of a clip.

        Args:
            frames: Frames of the clip, int64 [T].
            fps: Frames per second of the video, exact.
        """
        return AudioWindow.of(
            Fraction(int(frames.min())) / fps, Fraction(int(frames.max()) + 1) / fps, self.rate, self.channels
        )


@dataclass(frozen=True, slots=True)
class AudioWindow:
    """A range of samples of a video's sound, at the delivered rate."""

    first: int  # number of the first sample; sample 0 is at the first frame of the video
    count: int  # number of samples, S >= 0
    rate: int  # samples per second
    channels: int | None  # to deliver; None for those of the track

    @classmethod
    def of(cls, start: Fraction, stop: Fraction, rate: int, channels: int | None) -> AudioWindow:
        """Return the window from `start` to `stop`, in seconds from the first frame of the video."""
        first = sample_at(start, rate)
        return cls(first, sample_at(stop, rate) - first, rate, channels)


@dataclass(frozen=True, slots=True, eq=False)
class AudioClip:
    """Decoded sound.

    Attributes:
        data: float32 [C, S], -1 to 1 for full scale; codecs with losses may exceed it.
        rate: Samples per second.
        start_seconds: Time of the first sample, in seconds from the first frame of the video.
        mask: bool [S], False where the video has no sound: before the start and after the end of its track.
    """

    data: Float32Array
    rate: int
    start_seconds: float
    mask: BoolArray

    def __repr__(self) -> str:
        channels, samples = self.data.shape
        return f"AudioClip({channels} x {samples} samples at {self.rate} Hz from {self.start_seconds:.3f} s)"


def sample_at(seconds: Fraction, rate: int) -> int:
    """Return the number of the sample nearest to a time; halfway between two, the later one."""
    return (2 * seconds.numerator * rate + seconds.denominator) // (2 * seconds.denominator)


def check_rate(rate: object) -> int:
    """Return a sample rate after checking it."""
    return check_integer("rate", rate, 1, MOST_RATE)


FILTER_REACH: Final = 32
"""A resampled sample depends on this many samples on each side, counted at the lower of the two rates. swresample's
filter has 32 taps at the lower rate (its option `filter_size`), widened by its cutoff of 0.97, half on each side."""

_LOW_COMPLEXITY: Final = 2  # audio object type AAC LC (ISO/IEC 14496-3, table 1.17)
_AAC_SAMPLES: Final = 1024  # of a packet of AAC LC, per channel
# Sampling frequencies by index (ISO/IEC 14496-3, table 1.18).
_AAC_RATES: Final = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedAudio:
    """The packets that decode a window of sound; their checksums have been verified."""

    codec: str
    rate: int  # samples per second of the track
    channels: int
    extradata: bytes
    packets: tuple[bytes, ...]  # bytes of each packet
    # start of each packet and end of the last one, in samples from the first frame of the video, int64 [P + 1].
    times: IntArray
    start: int  # first sample of the track, in samples from the first frame of the video
    stop: int  # one past its last sample
    bytes_read: int = 0  # bytes read from the shard
    requests: int = 0


def fetch_audio(shard: Shard, row: int, window: AudioWindow, *, key: str) -> EncodedAudio | None:
    """Read and check the packets of a sample's sound in a window; None if the sample has no audio."""
    with reading(shard.stem, key):
        reader = shard.audio(row)
        return None if reader is None else read_packets(reader, load_track(reader), window)


def read_packets(reader: BlockReader, track: AudioTrack, window: AudioWindow) -> EncodedAudio:
    """Read the packets of a window, and the packets before it that the decoder needs."""
    info = track.info
    rate = info.sample_rate
    zero = track.start - sample_of(track.delay, rate)  # the track's sample at the time of the first frame
    begin, end = source_span(window, rate)
    begin, end = max(begin + zero, track.start), min(end + zero, track.stop)
    first = last = 0
    if begin < end:
        first = max(0, int(np.searchsorted(track.times, begin, "right")) - 1)
        last = min(len(track.sizes), int(np.searchsorted(track.times, end, "left")))
        first = max(0, first - _preroll(track)) if first < last else last
    packets: list[bytes] = []
    if first < last:
        offsets, sizes = track.offsets[first:last], track.sizes[first:last]
        base = int(offsets.min())
        data = reader.bytes(base, int((offsets + sizes).max()) - base)
        packets = [
            bytes(data[at : at + size]) for at, size in zip((offsets - base).tolist(), sizes.tolist(), strict=True)
        ]
    return EncodedAudio(
        codec=info.codec,
        rate=rate,
        channels=info.channels,
        extradata=info.extradata,
        packets=tuple(packets),
        times=track.times[first : last + 1] - zero,
        start=track.start - zero,
        stop=track.stop - zero,
        bytes_read=reader.bytes_read,
        requests=reader.requests,
    )


def source_span(window: AudioWindow, rate: int) -> tuple[int, int]:
    """Return the samples [begin, end) of a track that the window's samples depend on.

    `rate`: samples per second of the track.
    """
    if rate == window.rate:
        return window.first, window.first + window.count
    reach = -(-FILTER_REACH * max(rate, window.rate) // window.rate)
    begin = window.first * rate // window.rate - reach
    return begin, (window.first + window.count) * rate // window.rate + 1 + reach


def sample_of(delay: Fraction, rate: int) -> int:
    """Return a delay in seconds as a number of samples, rounded to the nearest."""
    return int(delay * rate + Fraction(1, 2))


def _preroll(track: AudioTrack) -> int:
    """Return how many packets before the first wanted one the decoder needs.

    Packets of AAC LC overlap the packet before, and those of ALAC are independent. Other kinds of AAC predict from all
    packets before, so they are decoded from the start.
    """
    info = track.info
    if info.codec == "alac":
        return 0
    # AudioSpecificConfig (ISO/IEC 14496-3, 1.6.2.1): 5 bits object type, 4 bits sampling frequency index.
    setup = int.from_bytes(info.extradata[:2].ljust(2, b"\0"), "big")
    index = setup >> 7 & 15
    plain = (
        setup >> 11 == _LOW_COMPLEXITY
        and (index >= len(_AAC_RATES) or _AAC_RATES[index] == info.sample_rate)
        and 2 * info.num_samples < 3 * _AAC_SAMPLES * info.num_packets  # with SBR a packet has 2,048 samples
    )
    return 1 if plain else len(track.sizes)


_COOKIE_HEADER = (36).to_bytes(4, "big") + b"alac"
"""FFmpeg expects ALAC's magic cookie with its box header; the whole box has 36 bytes."""

_DTYPES: Final[dict[str, Any]] = {"fltp": np.float32, "s16p": np.int16, "s32p": np.int32}
"""Sample formats of FFmpeg's decoders of AAC and ALAC."""


def decode_audio(encoded: EncodedAudio | None, window: AudioWindow) -> AudioClip:
    """Decode, mix and resample a window of sound; silence if nothing is `encoded`."""
    first, count, rate = window.first, window.count, window.rate
    data = np.zeros((window.channels or 1, count), np.float32)
    mask = np.zeros(count, bool)
    clip = AudioClip(data, rate, first / rate, mask)
    if encoded is None or not encoded.packets or not count:
        return clip
    mask[_heard(encoded, window)] = True
    # The filter rings on past the ends of the track.
    return AudioClip(_resample(_decode(encoded), encoded, window) * mask, rate, first / rate, mask)


def _heard(encoded: EncodedAudio, window: AudioWindow) -> slice:
    low = -(-encoded.start * window.rate // encoded.rate) - window.first
    high = -(-encoded.stop * window.rate // encoded.rate) - window.first
    return slice(max(0, low), max(0, high))


def _decode(encoded: EncodedAudio) -> list[tuple[int, list[Float32Array]]]:
    """Return for each packet the number of its first sample, and the samples of each channel, float32 [N]."""
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
                # The last packet may reach past the end of the track. What a packet with fewer samples lacks is silent.
                parts.append((starts[len(parts)], samples))
    except (av.FFmpegError, ValueError) as error:
        raise DecodeError(f"{encoded.codec} decoder: {error}") from error
    if len(parts) != len(lengths):
        raise DecodeError(f"{len(parts)} audio frames were decoded from {len(lengths)} packets")
    return parts


def _open(encoded: EncodedAudio) -> AudioCodecContext:
    """Open a decoder, to be used once: the noise of AAC depends on everything that the decoder has decoded before."""
    context = CodecContext.create(encoded.codec, "r")
    assert isinstance(context, AudioCodecContext)
    cookie = encoded.codec == "alac"
    context.extradata = _COOKIE_HEADER + encoded.extradata if cookie else encoded.extradata
    context.thread_count = 1
    return context


def _channels(frame: av.AudioFrame, most: int) -> list[Float32Array]:
    """Return at most the first `most` samples of each channel of a frame, float32 [N], -1 to 1 for full scale."""
    dtype = _DTYPES.get(frame.format.name)
    if dtype is None:
        raise DecodeError(f"audio decodes to {frame.format.name} samples, expected {', '.join(_DTYPES)}")
    count = min(frame.samples, most)
    # Avoid `to_ndarray`: it takes a quarter of the time of decoding AAC.
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
    """Return a window of a track, float32 [C, S]; samples outside of `parts` or of the track are silent."""
    rate = encoded.rate
    first, end = source_span(window, rate)
    divisor = math.gcd(rate, window.rate)
    up, down = window.rate // divisor, rate // divisor
    first -= first % down  # at this sample, both rates have one at the same time
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
    """Resample one channel, float32 [N], from `rate` to `wanted` samples per second."""
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


def load_track(reader: BlockReader) -> AudioTrack:
    """Read the audio track of an M4A; only the tables are read, not the packets."""
    size = reader.size
    return read_sound_track(find_moov(lambda at, count: reader.bytes(at, min(count, size - at)), size), size)
