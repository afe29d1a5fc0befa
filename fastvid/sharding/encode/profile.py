"""The class of profiles: the parameters with which samples are encoded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Final

from fastvid.errors import UsageError
from fastvid.media.ffmpeg import FfmpegBuild
from fastvid.media.timing import MAX_RATE, FrameTiming


@dataclass(frozen=True, slots=True)
class Profile:
    """Parameters with which samples are encoded.

    Attributes:
        name: Its name.
        codec: "h264", "hevc", "vp9" or "mjpeg"; "copy" does not encode and ignores the fields below.
        gop: Frames from one key frame to the next.
        bframes: Non-reference frames between two reference frames.
        crf: Constant quality of the encoder; lower is better and larger. For MJPEG its ``qscale``, 2 to 31.
        preset: x264's or x265's preset, or libvpx's ``cpu-used``; empty if the encoder has none.
        short_side: Shorter side in pixels, a multiple of `multiple`.
        multiple: Width and height in pixels are multiples of it.
        fps: Frames per second as a fraction such as "30000/1001"; empty for the source's own rate.
    """

    name: str
    codec: str
    gop: int
    bframes: int
    crf: int
    preset: str
    short_side: int = 256
    multiple: int = 16
    fps: str = ""

    def __post_init__(self) -> None:
        if self.codec == _COPY:
            return
        if self.codec not in _ENCODERS:
            raise UsageError(
                f"unknown codec {self.codec!r} of profile {self.name!r}",
                hint="use one of h264, hevc, vp9, mjpeg, copy",
            )
        if self.gop < 1 or not 0 <= self.bframes < self.gop:
            raise UsageError(
                f"a gop of {self.gop} with {self.bframes} B-frames is invalid", hint="choose 0 <= bframes < gop"
            )
        if self.multiple < 2 or self.short_side < self.multiple or self.short_side % self.multiple:
            raise UsageError(f"short side {self.short_side} is not a multiple of {self.multiple}")
        if self.codec == "mjpeg" and not _QSCALE[0] <= self.crf <= _QSCALE[1]:
            raise UsageError(f"quality {self.crf} of profile {self.name!r} is outside {_QSCALE[0]} to {_QSCALE[1]}")
        if self.fps:
            _check_rate(self.fps)

    @property
    def copies(self) -> bool:
        """Whether it does not encode: the source's file or its packets are copied into the shards."""
        return self.codec == _COPY

    @property
    def full_range(self) -> bool:
        """Whether luma ranges from 0 to 255, as always in JPEG (JFIF 1.02), which has no field for it."""
        return self.codec == "mjpeg"

    @property
    def encoder(self) -> str:
        """ffmpeg's name of the encoder; empty for "copy"."""
        return _ENCODERS.get(self.codec, "")

    def runs_on(self, build: FfmpegBuild) -> bool:
        """Return whether a build of ffmpeg has the encoder of this profile."""
        return self.copies or self.encoder in build.encoders

    def changed(
        self,
        *,
        short_side: int | None = None,
        crf: int | None = None,
        gop: int | None = None,
        fps: str | None = None,
    ) -> Profile:
        """Return this profile with other parameters; None keeps a parameter.

        Raises:
            UsageError: If the parameters are inconsistent, or the profile does not encode.
        """
        changes = {"short_side": short_side, "crf": crf, "gop": gop, "fps": fps}
        given = [name for name, value in changes.items() if value is not None]
        if not given:
            return self
        if self.copies:
            raise UsageError(f"profile {self.name!r} does not encode: {given[0]} has no effect on it")
        values = asdict(self) | {name: value for name, value in changes.items() if value is not None}
        return Profile(**values | {"bframes": min(self.bframes, values["gop"] - 1)})

    def to_json(self) -> dict[str, Any]:
        """Return all parameters, as a dataset records them."""
        return asdict(self)


def written_timing(timing: FrameTiming, profile: Profile) -> FrameTiming:
    """Return the rate and frame count that a profile writes: the source's unless it sets a rate."""
    if not profile.fps:
        return timing
    rate = Fraction(profile.fps)
    return replace(timing, rate=rate, input_rate=None, frames=max(1, round(timing.frames * rate / timing.rate)))


_COPY: Final = "copy"


_ENCODERS: Final = {"h264": "libx264", "hevc": "libx265", "vp9": "libvpx-vp9", "mjpeg": "mjpeg"}


_QSCALE: Final = (2, 31)  # of FFmpeg's MJPEG encoder


def _check_rate(text: str) -> None:
    try:
        rate = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(
            f"frame rate {text!r} is not a number", hint="use a number such as 25 or 30000/1001"
        ) from error
    if not 0 < rate <= MAX_RATE:
        raise UsageError(f"frame rate is {text}, expected more than 0 and at most {MAX_RATE}")
