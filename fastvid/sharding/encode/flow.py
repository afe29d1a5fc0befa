"""The streams that a job writes besides RGB, which are audio and optical flow; and the estimation of flow by OpenCV.

The same frames have the same flow on every x86-64 machine with the same OpenCV. For this, OpenCV runs in one thread,
because DIS splits the image into one independent stripe per thread, and without code that it selects by CPU model. All
parameters are recorded.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, get_args

import numpy as np

from fastvid.errors import JobError, MissingDependency, UsageError
from fastvid.format.planes import BOUND, to_levels
from fastvid.runtime.arrays import Float32Array, UInt8Array
from fastvid.runtime.values import check_choice, check_kind

Estimate = Callable[[UInt8Array, UInt8Array], Float32Array]

_HINT: Final = "pip install 'fastvid-toolkit[flow]'"
# OpenCV's defaults of the preset and of the constructor, spelled out so that they are recorded with the data.
_PARAMETERS: Final[dict[str, dict[str, float]]] = {
    # cv::DISOpticalFlow::PRESET_MEDIUM: its finest scale is one level finer than PRESET_FAST's and keeps small motions.
    "dis": {
        "FinestScale": 1,
        "PatchSize": 8,
        "PatchStride": 3,
        "GradientDescentIterations": 25,
        "VariationalRefinementIterations": 5,
    },
    # cv::optflow::DualTVL1OpticalFlow
    "tvl1": {
        "Tau": 0.25,
        "Lambda": 0.15,
        "Theta": 0.3,
        "ScalesNumber": 5,
        "WarpingsNumber": 5,
        "Epsilon": 0.01,
        "InnerIterations": 30,
        "OuterIterations": 10,
        "ScaleStep": 0.8,
        "MedianFiltering": 5,
    },
}


Method = Literal["dis", "tvl1"]


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """How optical flow is estimated and stored."""

    method: Method
    bound: float  # largest motion that can be stored, in pixels per frame of the encoded video; larger ones are clipped
    parameters: Mapping[str, float]
    opencv: str
    machine: str

    def __post_init__(self) -> None:
        check_choice("unknown flow method {}", self.method, get_args(Method))
        if not 0 < self.bound <= 1024:
            raise UsageError(f"flow bound is {self.bound}, expected more than 0 and at most 1024 pixels per frame")


def flow_settings(method: str, bound: float | None = None) -> FlowSettings:
    """Return the settings of a method with this machine's OpenCV."""
    checked: Any = method
    cv2 = _opencv("")
    chosen = FlowSettings(
        checked, BOUND if bound is None else bound, _PARAMETERS.get(method, {}), cv2.__version__, platform.machine()
    )
    _opencv(method)
    return chosen


def estimate_flow(frames: Iterable[UInt8Array], settings: FlowSettings) -> Iterator[UInt8Array]:
    """Yield the flow from each frame to the next; for the last frame, the flow of the frame before again.

    `frames`: luma, uint8 [H, W] each, in display order. Yields uint8 [2H, W] for every frame, both components of the
    flow one above the other, see `fastvid.format.planes`.
    """
    cv2 = _opencv(settings.method)
    estimate = _estimator(cv2, settings)
    before: UInt8Array | None = None
    levels: UInt8Array | None = None
    for frame in frames:
        if before is not None:
            with _reproducible(cv2):
                flow = estimate(before, frame)
            levels = to_levels(flow, settings.bound)
            yield levels
        before = frame
    if before is not None:
        yield to_levels(np.zeros((*before.shape, 2), np.float32), settings.bound) if levels is None else levels


def _estimator(cv2: Any, settings: FlowSettings) -> Estimate:
    if settings.method == "dis":
        engine = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    else:
        engine = cv2.optflow.DualTVL1OpticalFlow_create()
    for name, value in settings.parameters.items():
        getattr(engine, f"set{name}")(int(value) if value == int(value) else value)
    return lambda first, second: np.asarray(engine.calc(first, second, None), np.float32)


def _opencv(method: str) -> Any:
    try:
        import cv2
    except ImportError as error:
        raise MissingDependency(f"optical flow needs OpenCV: {error}", hint=_HINT) from error
    if method == "tvl1" and not hasattr(getattr(cv2, "optflow", None), "DualTVL1OpticalFlow_create"):
        raise MissingDependency(f"OpenCV {cv2.__version__} on this machine was built without TV-L1", hint=_HINT)
    return cv2


@contextlib.contextmanager
def _reproducible(cv2: Any) -> Iterator[None]:
    """Within the context, run OpenCV in one thread and without code that depends on the CPU model."""
    threads, optimized = cv2.getNumThreads(), cv2.useOptimized()
    cv2.setNumThreads(1)
    cv2.setUseOptimized(False)
    try:
        yield
    finally:
        cv2.setUseOptimized(optimized)
        cv2.setNumThreads(threads)


Audio = Literal["drop", "copy", "aac"]

_NAMES: Final = ("rgb", "flow")
_KNOWN: Final = ", ".join(_NAMES)


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of a job's samples."""

    audio: Audio = "drop"
    flow: FlowSettings | None = None

    def __post_init__(self) -> None:
        check_choice("unknown audio mode {}", self.audio, get_args(Audio))

    @property
    def video(self) -> tuple[str, ...]:
        """Names of the video streams of every sample."""
        return ("rgb", "flow") if self.flow else ("rgb",)

    def to_json(self) -> dict[str, Any]:
        """Return the audio mode and the flow settings as JSON; empty if there is only RGB."""
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

    `bound`: largest stored flow in pixels per frame; None for the default of `fastvid.format.planes`.
    """
    check_kind("streams", streams, str, Sequence, use="rgb, or rgb,flow")
    names = streams.split(",") if isinstance(streams, str) else list(streams)
    unknown = [name for name in names if name not in _NAMES]
    if unknown or len(set(names)) != len(names) or "rgb" not in names:
        raise UsageError(f"invalid streams {','.join(names)!r}", hint=f"use rgb, or rgb,flow; known are {_KNOWN}")
    checked: Any = audio
    return Streams(checked, flow_settings(method, bound) if "flow" in names else None)
