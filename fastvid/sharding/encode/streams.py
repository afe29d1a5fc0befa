"""The streams that a job writes in addition to RGB: audio and optical flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, get_args

from fastvid.errors import JobError, UsageError
from fastvid.sharding.encode.flow import FlowSettings, flow_settings

Audio = Literal["drop", "copy", "aac"]

_NAMES: Final = ("rgb", "flow")
_KNOWN: Final = ", ".join(_NAMES)


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of a job's samples."""

    audio: Audio = "drop"
    flow: FlowSettings | None = None

    def __post_init__(self) -> None:
        if self.audio not in get_args(Audio):
            raise UsageError(f"unknown audio mode {self.audio!r}", hint=f"use one of {', '.join(get_args(Audio))}")

    @property
    def video(self) -> tuple[str, ...]:
        """Names of the video streams of every sample."""
        return ("rgb", "flow") if self.flow else ("rgb",)

    def to_json(self) -> dict[str, Any]:
        """Return what differs from a dataset with only RGB; empty for such a dataset."""
        record: dict[str, Any] = {} if self.audio == "drop" else {"audio": self.audio}
        return record | ({"flow": asdict(self.flow)} if self.flow else {})

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Streams:
        """Create it from `to_json`'s result."""
        flow = record.get("flow")
        return cls(record.get("audio", "drop"), FlowSettings(**flow) if flow else None)


PICTURES: Final = Streams()
"""Only RGB."""


def same_streams(record: Mapping[str, Any], *, allow_encoder_change: bool = False) -> Streams:
    """Return the streams of an existing dataset, to add samples to it."""
    streams = Streams.from_json(record)
    if streams.flow is None:
        return streams
    here = flow_settings(streams.flow.method, streams.flow.bound)
    mine = replace(streams.flow, opencv=here.opencv, machine=here.machine)
    if mine != streams.flow and not allow_encoder_change:
        raise JobError(
            f"the dataset's flow was computed by OpenCV {streams.flow.opencv} on {streams.flow.machine},"
            f" but this machine has {here.opencv} on {here.machine}",
            hint="install that version, or allow this one with --allow-encoder-change",
        )
    return replace(streams, flow=mine)


def choose_streams(
    streams: Sequence[str] | str = ("rgb",), *, audio: str = "drop", method: str = "dis", bound: float | None = None
) -> Streams:
    """Return the streams that a user selected, with this machine's OpenCV.

    `bound`: largest stored flow in pixels per frame; None for the default of `fastvid.format.flow`.
    """
    names = streams.split(",") if isinstance(streams, str) else list(streams)
    unknown = [name for name in names if name not in _NAMES]
    if unknown or len(set(names)) != len(names) or "rgb" not in names:
        raise UsageError(f"invalid streams {','.join(names)!r}", hint=f"use rgb, or rgb,flow; known are {_KNOWN}")
    flow = None
    if "flow" in names:
        flow = flow_settings(method, bound)
    checked: Any = audio
    return Streams(checked, flow)
