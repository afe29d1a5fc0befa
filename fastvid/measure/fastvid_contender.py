"""fastvid's own decoder as a contender; its times include planning, reading and checksums."""

from __future__ import annotations

from functools import partial
from math import prod

import numpy as np

from fastvid.decode.backends import backend
from fastvid.decode.clips import PacketBuffer, read_clip, reader_of
from fastvid.decode.request import ClipRequest, DecoderOutput, EncodedClip, Planes, Rgb
from fastvid.load.workers.clip_worker import FETCH_CLIPS
from fastvid.load.workers.fetch import fetch
from fastvid.measure.clips import Corpus
from fastvid.measure.rounds import Contender
from fastvid.runtime.arrays import UInt8Array


class FastvidRunner:
    """Decodes clips with one of fastvid's back-ends on a CPU."""

    def __init__(self, corpus: Corpus, product: str, source: str, decoder: str = "pyav") -> None:
        self._requests, self._dataset = corpus.requests, corpus.dataset
        self._decoder = backend(decoder).open()
        shards, rows = self._dataset.locate(np.arange(len(self._dataset)))
        self._places = [
            (self._dataset.shard(int(shard)), int(row), self._dataset.key(number))
            for number, (shard, row) in enumerate(zip(shards, rows, strict=True))
        ]
        self._scratches = [PacketBuffer() for _ in range(FETCH_CLIPS)]
        self._read = [reader_of(data) for data in corpus.mp4s] if source == "memory" else None
        # Reused for every clip, like a loader's buffers.
        self._rgb = product == "rgb"
        sizes = [3 * len(r.frames) * r.size[0] * r.size[1] for r in self._requests]
        self._buffer = np.empty(max(sizes), np.uint8)

    def __call__(self, task: int, /) -> UInt8Array | None:
        """Return uint8 [T, H, W, 3], or None for planes."""
        return self.decode(self._requests[task])

    def run(self, tasks: range) -> None:
        """Fetch some clips, then decode them one by one, like a loader's thread."""
        scratches = zip(tasks, self._scratches, strict=False)
        for clip in [self._fetch(self._requests[task], scratch) for task, scratch in scratches]:
            self._decode(clip)

    def decode(self, request: ClipRequest) -> UInt8Array | None:
        """Return uint8 [T, H, W, 3], or None for planes."""
        return self._decode(self._fetch(request, self._scratches[0]))

    def _fetch(self, request: ClipRequest, scratch: PacketBuffer) -> EncodedClip:
        shard, row, key = self._places[request.sample]
        if self._read is None:
            return fetch(shard, row, request, key=key, scratch=scratch)[0]
        return read_clip(request, shard.info(row), shard.table(row), self._read[request.sample], scratch=scratch)

    def _decode(self, clip: EncodedClip) -> UInt8Array | None:
        out = self._output(clip.request)
        (error,) = self._decoder.decode([clip], [out])
        if error is not None:
            raise error
        return out.data.transpose(1, 2, 3, 0) if isinstance(out, Rgb) else None

    def _output(self, request: ClipRequest) -> DecoderOutput:
        count = len(request.frames)
        if self._rgb:
            shape = (3, count, *request.size)
            return Rgb(self._buffer[: prod(shape)].reshape(shape))
        return Planes.packed(self._buffer[: Planes.nbytes(count, request.box)], count, request.box)


def fastvid(corpus: Corpus, workers: int, *, product: str = "rgb", source: str = "disk") -> Contender:
    """Return fastvid as a contender, with one thread per worker."""
    settings = {"product": product, "source": source}
    return Contender("fastvid", settings, partial(FastvidRunner, corpus, **settings), workers, chunk=FETCH_CLIPS)
