"""Rival decoders, all with the same output: a clip's frames, cropped, as RGB uint8 in the worker's host buffer.

Each rival runs in its most favourable way: the axis order it decodes to, its own cropping if it has any, the MP4 from
memory or from a file. fastvid's time includes planning, reading and checksums.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import av
import numpy as np

from bench.decode.dali import WholeJob
from bench.decode.rivals import PyAvFilesJob, SpdlJob
from fastvid.decode.request import ClipRequest
from fastvid.measure.clips import CROP, Corpus
from fastvid.measure.fastvid_contender import FastvidRunner
from fastvid.measure.rounds import Contender
from fastvid.runtime.arrays import UInt8Array


class TorchcodecJob:
    """torchcodec with one decoder per clip, as its users write it.

    Args:
        corpus: The clips.
        source: "memory" for bytes, "file" for a path.
        seek: "exact", "approximate", or "mappings" for a precomputed frame index.
        crop: "slice", or "decoder" for a torchcodec transform.
        ffmpeg_threads: FFmpeg threads per decoder.
    """

    def __init__(self, corpus: Corpus, source: str, seek: str, crop: str, ffmpeg_threads: int) -> None:
        import torch

        from fastvid.decode.torchcodec import VideoDecoder

        torch.set_num_threads(1)
        # Must follow the import of fastvid.decode.torchcodec, which locates FFmpeg for torchcodec.
        from torchcodec.transforms import DecoderTransform

        class Crop(DecoderTransform):  # type: ignore[misc]
            """Crop at a given position; torchcodec's own transforms crop in the centre or at random."""

            def __init__(self, request: ClipRequest) -> None:
                self.box = request.box

            def _make_transform_spec(self, input_dims: tuple[int | None, int | None]) -> str:
                del input_dims
                return f"crop, {self.box.height}, {self.box.width}, {self.box.x}, {self.box.y}"

            def _get_output_dims(self) -> tuple[int | None, int | None]:
                return self.box.height, self.box.width

        self._requests = corpus.requests
        self._sources: Sequence[Any] = corpus.mp4s if source == "memory" else corpus.files
        self._crop = Crop if crop == "decoder" else None
        self._open = partial(VideoDecoder, dimension_order="NHWC", num_ffmpeg_threads=ffmpeg_threads)
        self._mappings = [_mappings(data) for data in corpus.mp4s] if seek == "mappings" else None
        self._seek = seek
        self._out = np.empty((len(self._requests[0].frames), CROP, CROP, 3), np.uint8)

    def __call__(self, task: int, /) -> UInt8Array:
        """Decode a clip to uint8 [T, H, W, 3]."""
        request = self._requests[task]
        options: dict[str, Any] = {"transforms": [self._crop(request)]} if self._crop else {}
        if self._mappings:
            options["custom_frame_mappings"] = self._mappings[request.sample]
        else:
            options["seek_mode"] = self._seek
        frames = self._open(self._sources[request.sample], **options).get_frames_at(request.frames.tolist())
        self._out[...] = frames.data.numpy() if self._crop else _cut(frames.data.numpy(), request)
        return self._out


class DecordJob:
    """decord with one reader per clip, as its users write it.

    Args:
        corpus: The clips.
        source: "memory" or "file".
        ffmpeg_threads: FFmpeg threads per reader.
    """

    def __init__(self, corpus: Corpus, source: str, ffmpeg_threads: int) -> None:
        import decord

        self._requests = corpus.requests
        self._sources: Sequence[Any] = corpus.mp4s if source == "memory" else corpus.files
        self._open = partial(decord.VideoReader, ctx=decord.cpu(0), num_threads=ffmpeg_threads)
        self._out = np.empty((len(self._requests[0].frames), CROP, CROP, 3), np.uint8)

    def __call__(self, task: int, /) -> UInt8Array:
        """Decode a clip to uint8 [T, H, W, 3]."""
        request = self._requests[task]
        source = self._sources[request.sample]
        frames = (
            self._open(io.BytesIO(source) if isinstance(source, bytes) else source)
            .get_batch(request.frames.tolist())
            .asnumpy()
        )
        self._out[...] = _cut(frames, request)
        return self._out


# Values of each rival's settings; a sweep starts from the first value of each.
KNOBS: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "torchcodec": {
        "seek": ("approximate", "exact", "mappings"),
        "source": ("memory", "file"),
        "crop": ("slice", "decoder"),
        "ffmpeg_threads": (1, 2),
    },
    "decord": {"source": ("memory", "file"), "ffmpeg_threads": (1, 2)},
    "pyav": {"source": ("memory", "file"), "ffmpeg_threads": (1, 2)},
    "spdl": {"source": ("memory", "file"), "crop": ("filter", "slice")},
    # A different output: YUV for a GPU to convert. Compare it with fastvid's planes.
    "spdl-yuv": {"source": ("memory", "file")},
}

# DALI on codecs that it decodes on a CPU: planned packets, and whole videos as its users pass them.
DALI_KNOBS: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "dali-cpu": {"source": ("memory",)},
    "dali-whole": {"frames": ("wanted", "all"), "index": (True, False)},
}

_JOBS: Final[Mapping[str, Callable[..., Any]]] = {
    "torchcodec": TorchcodecJob,
    "decord": DecordJob,
    "pyav": PyAvFilesJob,
    "spdl": SpdlJob,
    "spdl-yuv": partial(SpdlJob, crop="filter", pix_fmt="yuv420p"),
    "dali-cpu": partial(FastvidRunner, product="rgb", decoder="dali-cpu"),
    "dali-whole": WholeJob,
}


def rival(name: str, corpus: Corpus, settings: dict[str, Any], workers: int, processes: bool) -> Contender:
    """Return a rival with the given settings."""
    return Contender(name, settings, partial(_JOBS[name], corpus, **settings), workers, processes)


def _cut(frames: UInt8Array, request: ClipRequest) -> UInt8Array:
    box = request.box
    return frames[:, box.y : box.y + box.height, box.x : box.x + box.width]


def _mappings(data: bytes) -> str:
    """Return torchcodec's frame index of an MP4, made as its documentation describes."""
    with av.open(io.BytesIO(data), "r") as container:
        packets = [p for p in container.demux(container.streams.video[0]) if p.pts is not None]
    frames = [{"pts": p.pts, "duration": p.duration, "key_frame": int(p.is_keyframe)} for p in packets]
    return json.dumps({"frames": sorted(frames, key=lambda frame: frame["pts"])})
