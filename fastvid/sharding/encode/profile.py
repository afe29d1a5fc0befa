"""What a profile is: the parameters by which samples are encoded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Final

from fastvid.errors import UsageError
from fastvid.media.ffmpeg import FfmpegBuild
from fastvid.media.timing import MAX_RATE


@dataclass(frozen=True, slots=True)
class Profile:
    """How samples are encoded.

    Attributes:
        name: What users call it.
        codec: "h264", "hevc", "vp9" or "mjpeg"; "copy" encodes nothing, and the other fields then mean nothing.
        gop: Frames from one key frame to the next.
        bframes: Frames that nothing refers to between two reference frames.
        crf: Constant quality of the encoder; lower is better and larger. For MJPEG its ``qscale``, 2 to 31.
        preset: x264's or x265's preset, or libvpx's ``cpu-used``; empty where there is none.
        short_side: Pixels of the shorter side, a multiple of `multiple`.
        multiple: Both sides are multiples of it, in pixels.
        fps: Frames a second as a fraction such as "30000/1001"; empty for the source's own rate.
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
                f"codec {self.codec!r} of profile {self.name!r} is not known", hint="h264, hevc, vp9, mjpeg, copy"
            )
        if self.gop < 1 or not 0 <= self.bframes < self.gop:
            raise UsageError(f"gop {self.gop} with {self.bframes} B-frames cannot be", hint="0 <= bframes < gop")
        if self.multiple < 2 or self.short_side < self.multiple or self.short_side % self.multiple:
            raise UsageError(f"short side {self.short_side} is no multiple of {self.multiple}")
        if self.codec == "mjpeg" and not _QSCALE[0] <= self.crf <= _QSCALE[1]:
            raise UsageError(f"quality {self.crf} of profile {self.name!r} is outside {_QSCALE[0]} to {_QSCALE[1]}")
        if self.fps:
            _check_rate(self.fps)

    @property
    def copies(self) -> bool:
        """Whether it encodes nothing: sources go into the shards as they are, or their packets do."""
        return self.codec == _COPY

    @property
    def full_range(self) -> bool:
        """Whether luma runs from 0 to 255: in JPEG by definition (JFIF 1.02), which has no field to say otherwise."""
        return self.codec == "mjpeg"

    @property
    def encoder(self) -> str:
        """ffmpeg's name of the encoder; empty where there is none."""
        return _ENCODERS.get(self.codec, "")

    def runs_on(self, build: FfmpegBuild) -> bool:
        """Whether a build of ffmpeg has the encoder that it takes."""
        return self.copies or self.encoder in build.encoders

    def changed(
        self,
        *,
        short_side: int | None = None,
        crf: int | None = None,
        gop: int | None = None,
        fps: str | None = None,
    ) -> Profile:
        """This profile with other parameters; None keeps one.

        Raises:
            UsageError: The parameters do not fit each other, or nothing is encoded.
        """
        changes = {"short_side": short_side, "crf": crf, "gop": gop, "fps": fps}
        given = [name for name, value in changes.items() if value is not None]
        if not given:
            return self
        if self.copies:
            raise UsageError(f"profile {self.name!r} encodes nothing: {given[0]} has no meaning with it")
        values = asdict(self) | {name: value for name, value in changes.items() if value is not None}
        return Profile(**values | {"bframes": min(self.bframes, values["gop"] - 1)})

    def to_json(self) -> dict[str, Any]:
        """All parameters, as a dataset records them."""
        return asdict(self)


_COPY: Final = "copy"


_ENCODERS: Final = {"h264": "libx264", "hevc": "libx265", "vp9": "libvpx-vp9", "mjpeg": "mjpeg"}


_QSCALE: Final = (2, 31)  # of FFmpeg's MJPEG encoder


def _check_rate(text: str) -> None:
    try:
        rate = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(f"frame rate {text!r} is no number", hint="such as 25 or 30000/1001") from error
    if not 0 < rate <= MAX_RATE:
        raise UsageError(f"frame rate {text} is not above 0 and at most {MAX_RATE}")
