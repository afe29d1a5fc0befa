"""More rival decoders: PyAV as its users write it, and SPDL with RGB or YUV output."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import av
import av.container
import numpy as np

from bench.common.linked import expose_ffmpeg
from bench.decode.kept import OpenDecoders, cut, output_of
from fastvid.runtime.arrays import UInt8Array
from fastvid.tune.measure import Corpus


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
