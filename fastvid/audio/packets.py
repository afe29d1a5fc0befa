"""Read the packets of a window of audio, and nothing else, before anything is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np

from fastvid.audio.window import AudioWindow
from fastvid.errors import FastvidError
from fastvid.format.mp4.audio import AudioTrack, load_track
from fastvid.format.shard import Shard
from fastvid.format.stream_reader import BlockReader
from fastvid.runtime.arrays import IntArray

FILTER_REACH: Final = 32
"""Samples of the lower of both rates that a resampled sample depends on, before and after it. swresample's filter has
32 taps at the lower rate (its option `filter_size`), widened by its cutoff of 0.97; half of them are on each side."""

_LOW_COMPLEXITY: Final = 2  # audio object type AAC LC (ISO/IEC 14496-3, table 1.17)
_AAC_SAMPLES: Final = 1024
# Sampling frequencies by index (ISO/IEC 14496-3, table 1.18).
_AAC_RATES: Final = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedAudio:
    """The packets that decode a window; their checksums have been verified."""

    codec: str
    rate: int  # samples per second of the track
    channels: int
    extradata: bytes
    packets: tuple[bytes, ...]  # bytes of each packet
    # start of each packet and end of the last one, in samples from the first frame of the video, int64 [P + 1].
    times: IntArray
    start: int
    stop: int
    bytes_read: int = 0  # bytes read from the shard
    requests: int = 0


def fetch_audio(shard: Shard, row: int, window: AudioWindow, *, key: str) -> EncodedAudio | None:
    """Read and check the packets of a window of a sample; None if the sample has no audio."""
    try:
        reader = shard.audio(row)
        return None if reader is None else read_packets(reader, load_track(reader), window)
    except FastvidError as error:
        error.at_sample(shard.stem, key)
        raise


def read_packets(reader: BlockReader, track: AudioTrack, window: AudioWindow) -> EncodedAudio:
    """Read the packets of a window, and those before it that the decoder needs."""
    info = track.info
    rate = info.sample_rate
    zero = track.start - sample_of(track.delay, rate)  # the sample of the track at second zero
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
    """Return a delay in samples, rounded to the nearest."""
    return int(delay * rate + Fraction(1, 2))


def _preroll(track: AudioTrack) -> int:
    """Return how many packets before the first wanted one the decoder needs.

    A packet of AAC LC overlaps the one before it, and ALAC's are independent. Other kinds of AAC predict from all that
    precedes, so they are decoded from the start.
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
        and 2 * info.num_samples < 3 * _AAC_SAMPLES * info.num_packets  # with SBR a packet has 2,048
    )
    return 1 if plain else len(track.sizes)
