"""The window of audio that belongs to a clip, in exact arithmetic.

Second zero is the first frame of the video. At rate r, sample n is the sound at n / r seconds, whatever the window; the
window from `start` to `stop` seconds contains the samples round(start * r) to round(stop * r) - 1, halves rounded up.
Windows that meet therefore share no sample and miss none.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from fastvid.errors import UsageError
from fastvid.runtime.arrays import BoolArray, Float32Array, IntArray
from fastvid.runtime.checks import check_integer

MOST_RATE: Final = 768_000
"""Highest sample rate, in samples per second: four times that of studio recordings."""


@dataclass(frozen=True)
class Audio:
    """The sound of a loader's clips: exactly the seconds of their frames.

    A clip sounds from the start of its first frame to the end of its last one, in the order of the video, whatever the
    order of its frames. It is resampled by FFmpeg's swresample: the same second of a video has the same samples in
    every clip, except for the noise that an AAC decoder makes where the encoder asks for any noise (PNS). Before the
    start and after the end of the track, and if a sample has none, it is silent and `Batch.audio_mask` is False.

    Args:
        rate: Samples per second, 1 to 768,000.
        mono: Whether to deliver the mean of all channels, else two: a single channel is repeated, and the mean of more
            than two is delivered twice.

    Raises:
        UsageError: If the rate is out of range.
    """

    rate: int
    mono: bool = True

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if not isinstance(self.mono, bool):
            raise UsageError(f"mono is {self.mono!r}, expected True or False")

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
    """Samples of a video's sound."""

    first: int
    count: int  # number of samples, S >= 0
    rate: int  # samples per second
    channels: int | None

    @classmethod
    def of(cls, start: Fraction, stop: Fraction, rate: int, channels: int | None) -> AudioWindow:
        """Return the window from `start` to `stop` seconds."""
        first = sample_at(start, rate)
        return cls(first, sample_at(stop, rate) - first, rate, channels)


@dataclass(frozen=True, slots=True, eq=False)
class AudioClip:
    """Decoded sound.

    Attributes:
        data: float32 [C, S], -1 to 1 for full scale; codecs with losses may exceed it.
        rate: Samples per second.
        start_seconds: Time of the first sample from the first frame of the video, in seconds.
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
    """Return the number of the sample nearest to a time; of two, the later one."""
    return (2 * seconds.numerator * rate + seconds.denominator) // (2 * seconds.denominator)


def check_rate(rate: object) -> int:
    """Return a sample rate after checking it."""
    return check_integer("rate", rate, 1, MOST_RATE)
