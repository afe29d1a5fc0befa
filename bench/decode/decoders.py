"""Decoders by the same measure: a clip's frames, cropped, as RGB uint8 on the host, written into the worker's buffer.

Each rival gets what suits it best: the order of axes it decodes to, its own cropping if it has any, its MP4 from memory
or from a file. fastvid gets a clip from the same place: packets of an MP4 in memory, or of the tar on disk; planning,
reading and checksums are inside its time.
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
    """torchcodec, a decoder for each clip as its users make one.

    Args:
        corpus: The clips.
        source: "memory" for bytes, "file" for a path.
        seek: "exact", "approximate", or "mappings" for a frame index that was computed before.
        crop: "slice", or "decoder" for its own transform.
        ffmpeg_threads: Of each decoder.
    """

    def __init__(self, corpus: Corpus, source: str, seek: str, crop: str, ffmpeg_threads: int) -> None:
        import torch

        from fastvid.decode.torchcodec import VideoDecoder

        torch.set_num_threads(1)
        # Only now, for the line above has found an FFmpeg for it.
        from torchcodec.transforms import DecoderTransform

        class Crop(DecoderTransform):  # type: ignore[misc]
            """A crop at a given place; torchcodec's own classes crop in the middle or at random."""

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
        """Returns [T, H, W, 3]."""
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
    """decord, a reader for each clip as its users make one.

    Args:
        corpus: The clips.
        source: "memory" or "file".
        ffmpeg_threads: Of each reader.
    """

    def __init__(self, corpus: Corpus, source: str, ffmpeg_threads: int) -> None:
        import decord

        self._requests = corpus.requests
        self._sources: Sequence[Any] = corpus.mp4s if source == "memory" else corpus.files
        self._open = partial(decord.VideoReader, ctx=decord.cpu(0), num_threads=ffmpeg_threads)
        self._out = np.empty((len(self._requests[0].frames), CROP, CROP, 3), np.uint8)

    def __call__(self, task: int, /) -> UInt8Array:
        """Returns [T, H, W, 3]."""
        request = self._requests[task]
        source = self._sources[request.sample]
        frames = (
            self._open(io.BytesIO(source) if isinstance(source, bytes) else source)
            .get_batch(request.frames.tolist())
            .asnumpy()
        )
        self._out[...] = _cut(frames, request)
        return self._out


# Knobs of each rival with their values; the first of each is where its sweep begins.
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
    # Another product: YUV, for a device to convert. To be compared with fastvid's planes.
    "spdl-yuv": {"source": ("memory", "file")},
}

# DALI by itself, on what it decodes on a CPU: planned packets, and whole videos as its users give them.
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
    """A rival with the given settings."""
    return Contender(name, settings, partial(_JOBS[name], corpus, **settings), workers, processes)


def _cut(frames: UInt8Array, request: ClipRequest) -> UInt8Array:
    box = request.box
    return frames[:, box.y : box.y + box.height, box.x : box.x + box.width]


def _mappings(data: bytes) -> str:
    """torchcodec's frame index of an MP4, as its documentation has users make it."""
    with av.open(io.BytesIO(data), "r") as container:
        packets = [p for p in container.demux(container.streams.video[0]) if p.pts is not None]
    frames = [{"pts": p.pts, "duration": p.duration, "key_frame": int(p.is_keyframe)} for p in packets]
    return json.dumps({"frames": sorted(frames, key=lambda frame: frame["pts"])})
