"""Rival decoders, all with the same output: a clip's frames, cropped, as RGB uint8 in the worker's host buffer.

Each rival runs in its most favourable way: the axis order it decodes to, its own cropping if it has any, the MP4 from
memory or from a file. fastvid's time includes planning, reading and checksums.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from bench.decode.dali import WholeJob
from bench.decode.kept import OpenDecoders, cut, output_of
from bench.decode.rivals import PyAvFilesJob, SpdlJob
from bench.decode.torchcodec_jobs import BlocksJob, TorchcodecJob
from fastvid.runtime.arrays import UInt8Array
from fastvid.tune.measure import Contender, Corpus, FastvidRunner


class DecordJob:
    """decord with one reader per clip, as its users write it."""

    def __init__(self, corpus: Corpus, source: str, ffmpeg_threads: int, kept: int = 0) -> None:
        import decord

        self._requests = corpus.requests
        sources: Sequence[Any] = corpus.mp4s if source == "memory" else corpus.files
        read = partial(decord.VideoReader, ctx=decord.cpu(0), num_threads=ffmpeg_threads)
        self._readers = OpenDecoders(
            lambda sample: read(io.BytesIO(sources[sample]) if source == "memory" else sources[sample]), kept
        )
        self._out = output_of(self._requests[0])

    def __call__(self, task: int, /) -> UInt8Array:
        """Decode a clip to uint8 [T, H, W, 3]."""
        request = self._requests[task]
        frames = self._readers[request.sample].get_batch(request.frames.tolist()).asnumpy()
        self._out[...] = cut(frames, request)
        return self._out


KEPT: Final = 256
"""Decoders that rivals keep open, one per video, as Lance does; LeRobot keeps 100."""

# Values of each rival's settings; a sweep starts from the first value of each.
KNOBS: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "torchcodec": {
        "seek": ("approximate", "exact", "mappings"),
        "source": ("memory", "file"),
        "crop": ("slice", "decoder"),
        "ffmpeg_threads": (1, 2),
    },
    "torchcodec kept open": {
        "seek": ("mappings", "exact", "approximate"),
        "source": ("memory", "file"),
        "ffmpeg_threads": (1, 2),
    },
    "torchcodec blocks, our plan": {"source": ("memory", "file")},
    "decord": {"source": ("memory", "file"), "ffmpeg_threads": (1, 2)},
    "decord kept open": {"source": ("memory", "file"), "ffmpeg_threads": (1, 2)},
    "pyav": {"source": ("memory", "file"), "ffmpeg_threads": (1, 2)},
    "pyav kept open": {"source": ("memory", "file"), "ffmpeg_threads": (1, 2)},
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
    # A transform belongs to its decoder, so one that is kept cannot crop at another place for each clip.
    "torchcodec kept open": partial(TorchcodecJob, crop="slice", kept=KEPT),
    "torchcodec blocks, our plan": partial(BlocksJob, kept=KEPT),
    "decord": DecordJob,
    "decord kept open": partial(DecordJob, kept=KEPT),
    "pyav": PyAvFilesJob,
    "pyav kept open": partial(PyAvFilesJob, kept=KEPT),
    "spdl": SpdlJob,
    "spdl-yuv": partial(SpdlJob, crop="filter", pix_fmt="yuv420p"),
    "dali-cpu": partial(FastvidRunner, product="rgb", decoder="dali-cpu"),
    "dali-whole": WholeJob,
}


def library_of(name: str) -> str:
    """Return the library of a rival, as a key of `bench.common.newest.NEWEST`."""
    word = name.partition(" ")[0].partition("-")[0]
    return {"pyav": "av"}.get(word, word)


def rival(name: str, corpus: Corpus, settings: dict[str, Any], workers: int, processes: bool) -> Contender:
    """Return a rival with the given settings."""
    return Contender(name, settings, partial(_JOBS[name], corpus, **settings), workers, processes)
