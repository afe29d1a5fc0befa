"""DALI decoding whole videos on a CPU, without fastvid's plan.

``fn.readers.video`` needs a GPU; on a CPU DALI decodes videos from memory by ``fn.decoders.video``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.decode.kept import output_of
from fastvid.runtime.arrays import UInt8Array
from fastvid.tune.measure import Corpus


class WholeJob:
    """DALI on whole videos: a pipeline that stays open and decodes one clip per run.

    `frames`: "wanted" to pass the operator the list of frames, each once and in order; "all" to decode the whole
    video and then select the wanted frames.
    """

    def __init__(self, corpus: Corpus, frames: str, index: bool) -> None:
        import nvidia.dali.fn
        import nvidia.dali.pipeline
        import nvidia.dali.types

        fn: Any = nvidia.dali.fn
        types: Any = nvidia.dali.types
        build: Any = nvidia.dali.pipeline.Pipeline
        self._requests, self._wanted = corpus.requests, frames == "wanted"
        self._videos = [np.frombuffer(data, np.uint8) for data in corpus.mp4s]
        self._pipeline = build(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1, set_affinity=False)
        with self._pipeline:
            options: dict[str, Any] = {}
            if self._wanted:
                options["frames"] = fn.external_source(name="frames", dtype=types.INT32, ndim=1)
            video = fn.external_source(name="video", dtype=types.UINT8, ndim=1)
            pictures = fn.decoders.video(video, device="cpu", pad_mode="none", build_index=index, **options)
            corner = fn.external_source(name="corner", dtype=types.FLOAT, ndim=1)
            box = corpus.requests[0].box
            extent = (float(box.height), float(box.width))  # must have the corner's type
            cut = fn.slice(pictures, corner, extent, axes=(1, 2), normalized_anchor=False, normalized_shape=False)
            self._pipeline.set_outputs(cut)
        self._pipeline.build()
        self._out = output_of(self._requests[0])

    def __call__(self, task: int, /) -> UInt8Array:
        """Decode a clip to uint8 [T, H, W, 3]."""
        request = self._requests[task]
        places = request.frames
        if self._wanted:
            # DALI would seek and decode again for a repeated frame.
            frames, places = np.unique(places, return_inverse=True)
            self._pipeline.feed_input("frames", [frames.astype(np.int32)])
        self._pipeline.feed_input("video", [self._videos[request.sample]])
        self._pipeline.feed_input("corner", [np.array((request.box.y, request.box.x), np.float32)])
        (cut,) = self._pipeline.run()
        self._out[...] = np.asarray(cut.at(0))[places]
        return self._out
