"""What a job writes beside the picture: sound, and optical flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, get_args

from fastvid.errors import JobError, UsageError
from fastvid.format.schema import VIDEO_STREAMS
from fastvid.sharding.encode.flow import FlowSettings, flow_settings

Audio = Literal["drop", "copy", "aac"]

_WORDS: Final = ", ".join(VIDEO_STREAMS)


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of a job's samples.

    Attributes:
        audio: "drop", "copy" or "aac", see `fastvid.sharding.encode.audio`.
        flow: How optical flow is made; None for none.
    """

    audio: Audio = "drop"
    flow: FlowSettings | None = None

    def __post_init__(self) -> None:
        if self.audio not in get_args(Audio):
            raise UsageError(f"audio {self.audio!r} is not known", hint=f"known are {', '.join(get_args(Audio))}")

    @property
    def video(self) -> tuple[str, ...]:
        """Names of the video streams of every sample."""
        return ("rgb", "flow") if self.flow else ("rgb",)

    def to_json(self) -> dict[str, Any]:
        """What is not as in a plain dataset of pictures; empty for one."""
        record: dict[str, Any] = {} if self.audio == "drop" else {"audio": self.audio}
        return record | ({"flow": asdict(self.flow)} if self.flow else {})

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Streams:
        """From `to_json`'s result."""
        flow = record.get("flow")
        return cls(record.get("audio", "drop"), FlowSettings(**flow) if flow else None)


PICTURES: Final = Streams()
"""Nothing but pictures."""


def same_streams(record: Mapping[str, Any], *, other_build: bool = False) -> Streams:
    """The streams that a dataset was made with, for more samples of it.

    Args:
        record: A generation's `extras`.
        other_build: Allow another OpenCV, or another kind of machine; the JSON of each sample says which made its flow.

    Raises:
        MissingDependency: There is no OpenCV that computes its flow.
        JobError: OpenCV here is another one.
    """
    streams = Streams.from_json(record)
    if streams.flow is None:
        return streams
    here = flow_settings(streams.flow.method, streams.flow.bound)
    mine = replace(streams.flow, opencv=here.opencv, machine=here.machine)
    if mine != streams.flow and not other_build:
        raise JobError(
            f"the dataset's flow was computed by OpenCV {streams.flow.opencv} on {streams.flow.machine},"
            f" here is {here.opencv} on {here.machine}",
            hint="install that version, or allow this one with --other-build",
        )
    return replace(streams, flow=mine)


def choose_streams(
    streams: Sequence[str] | str = ("rgb",), *, audio: str = "drop", method: str = "dis", bound: float | None = None
) -> Streams:
    """The streams that a user asked for, with the OpenCV of this machine.

    Args:
        streams: Names, or one text with commas such as "rgb,flow".
        audio: "drop", "copy" or "aac".
        method: Of flow, "dis" or "tvl1".
        bound: Of flow, in pixels a frame; the default of `fastvid.format.flow` when None.

    Raises:
        UsageError: A name is not known, or "rgb" is not among the streams.
        MissingDependency: Flow is asked for, and there is no OpenCV that computes it.
    """
    names = streams.split(",") if isinstance(streams, str) else list(streams)
    unknown = [name for name in names if name not in VIDEO_STREAMS]
    if unknown or len(set(names)) != len(names) or "rgb" not in names:
        raise UsageError(f"streams are {','.join(names)!r}", hint=f"rgb, or rgb,flow; known are {_WORDS}")
    flow = None
    if "flow" in names:
        flow = flow_settings(method, bound)
    checked: Any = audio
    return Streams(checked, flow)
