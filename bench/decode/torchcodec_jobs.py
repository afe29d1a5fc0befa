"""torchcodec as a rival: a decoder for each clip, decoders that are kept open, and its blocks with fastvid's plan."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import av
import numpy as np

from bench.common.linked import video_decoder
from bench.decode.kept import OpenDecoders, cut, output_of
from fastvid.decode.request import ClipRequest
from fastvid.format.schema import PacketFlag
from fastvid.runtime.arrays import UInt8Array
from fastvid.tune.measure import Corpus


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
