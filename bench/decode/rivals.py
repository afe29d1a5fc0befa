"""Rival decoders, all with the same output: a clip's frames, cropped, as RGB uint8 in the worker's host buffer.

Each rival runs in its most favourable way: the axis order it decodes to, its own cropping if it has any, the MP4 from
memory or from a file. fastvid's time includes planning, reading and checksums.
"""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import av
import av.container
import numpy as np

from bench.common.linked import expose_ffmpeg, video_decoder
from fastvid.decode.request import ClipRequest
from fastvid.format.schema import PacketFlag
from fastvid.runtime.arrays import UInt8Array
from fastvid.tune.measure import Contender, Corpus


class OpenDecoders:
    """Decoders by sample. The least recently used is closed when there are too many."""

    def __init__(self, opened: Callable[[int], Any], most: int) -> None:
        self._opened, self._most = opened, most
        self._found: OrderedDict[int, Any] = OrderedDict()

    def __getitem__(self, sample: int) -> Any:
        if not self._most:
            return self._opened(sample)
        if sample in self._found:
            self._found.move_to_end(sample)
        else:
            self._found[sample] = self._opened(sample)
            if len(self._found) > self._most:
                self._found.popitem(last=False)
        return self._found[sample]


def cut(frames: UInt8Array, request: ClipRequest) -> UInt8Array:
    """Return the crop of frames [T, H, W, 3], as a view."""
    box = request.box
    return frames[:, box.y : box.y + box.height, box.x : box.x + box.width]


def output_of(request: ClipRequest, *, planes: bool = False) -> UInt8Array:
    """Allocate RGB [T, H, W, 3], or YUV [T, H * 3 / 2, W], for clips of the same shape as this one."""
    box = request.box
    shape = (box.height * 3 // 2, box.width) if planes else (box.height, box.width, 3)
    return np.empty((len(request.frames), *shape), np.uint8)


class PyAvFilesJob:
    """PyAV on whole files: seek to the preceding key frame, then decode up to each wanted frame."""

    def __init__(self, corpus: Corpus, source: str, ffmpeg_threads: int, kept: int = 0) -> None:
        self._requests = corpus.requests
        sources: Sequence[Any] = corpus.mp4s if source == "memory" else corpus.files

        def opened(sample: int) -> av.container.InputContainer:
            container = av.open(io.BytesIO(sources[sample]) if source == "memory" else sources[sample])
            container.streams.video[0].codec_context.thread_count = ffmpeg_threads
            return container

        self._containers = OpenDecoders(opened, kept)
        self._out = output_of(self._requests[0])

    def __call__(self, task: int, /) -> UInt8Array:
        """Decode a clip to uint8 [T, H, W, 3]."""
        request = self._requests[task]
        container = self._containers[request.sample]
        stream = container.streams.video[0]
        assert stream.average_rate is not None
        assert stream.time_base is not None
        ticks = 1 / (stream.average_rate * stream.time_base)
        start = stream.start_time or 0
        decoded = container.decode(stream)
        now, picture = -1, None
        for place, frame in enumerate(request.frames.tolist()):
            # Seek only if the frame is far ahead; where the next key frame is, is unknown without an index.
            if now < 0 or frame - now > 32 or frame < now:
                container.seek(round(start + frame * ticks), stream=stream, backward=True)
                decoded, now = container.decode(stream), -1
            while now < frame or picture is None:
                picture = next(decoded)
                assert picture.pts is not None
                now = round((picture.pts - start) / ticks)
            self._out[place] = cut(picture.to_ndarray(format="rgb24")[None], request)[0]
        return self._out


def spdl_io() -> Any:
    """Return `spdl.io`, which ships without FFmpeg and uses the system's or PyAV's."""
    expose_ffmpeg()
    import spdl.io

    return spdl.io


class SpdlJob:
    """SPDL: demux, decode the wanted frames, convert."""

    def __init__(self, corpus: Corpus, source: str, crop: str, pix_fmt: str = "rgb24") -> None:
        self._io = spdl_io()
        self._requests, self._filtered, self._pix_fmt = corpus.requests, crop == "filter", pix_fmt
        self._sources: Sequence[Any] = corpus.mp4s if source == "memory" else corpus.files
        self._out = output_of(self._requests[0], planes=pix_fmt != "rgb24")

    def __call__(self, task: int, /) -> UInt8Array:
        """Decode a clip to RGB [T, H, W, 3], or to YUV [T, H * 3 / 2, W] in FFmpeg's layout."""
        request, spdl = self._requests[task], self._io
        box = request.box
        steps = [f"crop={box.width}:{box.height}:{box.x}:{box.y}"] if self._filtered else []
        steps.append(f"format=pix_fmts={self._pix_fmt}")
        packets = spdl.demux_video(self._sources[request.sample])
        # SPDL rejects repeated frames, which dense sampling produces in short videos.
        wanted, places = np.unique(request.frames, return_inverse=True)
        frames = spdl.sample_decode_video(packets, wanted.tolist(), filter_desc=",".join(steps))
        pictures = np.asarray(spdl.to_numpy(spdl.convert_frames(frames)))
        if self._filtered:
            self._out[...] = pictures.reshape(-1, *self._out.shape[1:])[places]
        else:
            self._out[...] = cut(pictures, request)[places]
        return self._out


class TorchcodecJob:
    """torchcodec's ``VideoDecoder``.

    `source`: "memory" for bytes, "file" for a path.
    """

    def __init__(self, corpus: Corpus, source: str, seek: str, crop: str, ffmpeg_threads: int, kept: int = 0) -> None:
        import torch

        decoder = video_decoder()
        torch.set_num_threads(1)
        self._requests = corpus.requests
        self._crop = _crop_transform() if crop == "decoder" else None
        sources: Sequence[Any] = corpus.mp4s if source == "memory" else corpus.files
        opened = partial(decoder, dimension_order="NHWC", num_ffmpeg_threads=ffmpeg_threads)
        mappings = [_mappings(data) for data in corpus.mp4s] if seek == "mappings" else None

        def options(sample: int) -> dict[str, Any]:
            return {"custom_frame_mappings": mappings[sample]} if mappings else {"seek_mode": seek}

        self._open = lambda sample, **more: opened(sources[sample], **options(sample), **more)
        self._decoders = OpenDecoders(self._open, kept)
        self._out = output_of(self._requests[0])

    def __call__(self, task: int, /) -> UInt8Array:
        """Decode a clip to uint8 [T, H, W, 3]."""
        request = self._requests[task]
        if self._crop:
            decoder = self._open(request.sample, transforms=[self._crop(request)])
            self._out[...] = decoder.get_frames_at(request.frames.tolist()).data.numpy()
        else:
            frames = self._decoders[request.sample].get_frames_at(request.frames.tolist()).data.numpy()
            self._out[...] = cut(frames, request)
        return self._out


class BlocksJob:
    """torchcodec's blocks with fastvid's plan: of a kept demuxer's packets only the planned ones are decoded."""

    def __init__(self, corpus: Corpus, source: str, kept: int) -> None:
        import torch

        video_decoder()
        torch.set_num_threads(1)
        from torchcodec.decoders import ColorConverter, Demuxer

        self._requests = corpus.requests
        self._tables = [corpus.dataset[sample].table for sample in range(len(corpus.dataset))]
        sources: Sequence[Any] = corpus.mp4s if source == "memory" else corpus.files

        def opened(sample: int) -> tuple[Any, Any, Any]:
            demuxer = Demuxer(sources[sample])
            index = demuxer.streams[0].scan()
            return demuxer, demuxer.streams[0].make_decoder(), index.pts_seconds + index.duration_seconds / 4

        self._open = OpenDecoders(opened, kept)
        self._converter = ColorConverter()
        self._out = output_of(self._requests[0])

    def __call__(self, task: int, /) -> UInt8Array:
        """Decode a clip to uint8 [T, H, W, 3]."""
        request = self._requests[task]
        demuxer, decoder, seconds = self._open[request.sample]
        table = self._tables[request.sample]
        plan = table.plan(request.frames)
        records = table.records[plan.packets]
        places: dict[int, list[int]] = {}
        for place, frame in enumerate(request.frames.tolist()):
            places.setdefault(frame, []).append(place)
        # Frames come out in display order between two key frames.
        keys = np.flatnonzero(records["flags"] & PacketFlag.KEY).tolist()
        for first, last in zip(keys, [*keys[1:], len(records)], strict=True):
            group = records["frame"][first:last].tolist()
            demuxer.seek(float(seconds[group[0]]))
            decoder.reset()
            frames: list[Any] = []
            at = int(plan.packets[first]) - 1
            for packet in plan.packets[first:last].tolist():
                for _ in range(packet - at - 1):
                    next(demuxer)
                frames += decoder.decode(next(demuxer))
                at = packet
            for shown, frame in zip(sorted(group), [*frames, *decoder.drain()], strict=True):
                for place in places.get(shown, ()):
                    picture = self._converter.convert(frame).data.numpy().transpose(1, 2, 0)
                    self._out[place] = cut(picture[None], request)[0]
        return self._out


def _crop_transform() -> Any:
    """Return a transform of torchcodec that crops at a given place; its own crop in the centre or at random."""
    from torchcodec.transforms import DecoderTransform

    class Crop(DecoderTransform):  # type: ignore[misc]
        def __init__(self, request: ClipRequest) -> None:
            self.box = request.box

        def _make_transform_spec(self, input_dims: tuple[int | None, int | None]) -> str:
            del input_dims
            return f"crop, {self.box.height}, {self.box.width}, {self.box.x}, {self.box.y}"

        def _get_output_dims(self) -> tuple[int | None, int | None]:
            return self.box.height, self.box.width

    return Crop


def _mappings(data: bytes) -> str:
    """Return torchcodec's frame index of an MP4, made as its documentation describes."""
    with av.open(io.BytesIO(data), "r") as container:
        packets = [p for p in container.demux(container.streams.video[0]) if p.pts is not None]
    frames = [{"pts": p.pts, "duration": p.duration, "key_frame": int(p.is_keyframe)} for p in packets]
    return json.dumps({"frames": sorted(frames, key=lambda frame: frame["pts"])})


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
}


def library_of(name: str) -> str:
    """Return the library of a rival, as a key of `bench.common.newest.NEWEST`."""
    word = name.partition(" ")[0].partition("-")[0]
    return {"pyav": "av"}.get(word, word)


def rival(name: str, corpus: Corpus, settings: dict[str, Any], workers: int, processes: bool) -> Contender:
    """Return a rival with the given settings."""
    return Contender(name, settings, partial(_JOBS[name], corpus, **settings), workers, processes)
