"""The DALI back-end: decodes planned packets, wrapped in minimal MP4s, with ``fn.decoders.video``.

On a GPU each decoder has its own DALI pipeline, which keeps one NVDEC engine busy, so there are as many decoders as
engines (`fastvid.decode.nvdec`). The same graph runs on a CPU, where DALI 2.4 decodes VP8, VP9 and MJPEG; H.264 and
HEVC need the GPU. DALI's operators crop, resize, flip and lay out in the same pipeline.

Colours: DALI always converts with BT.601, so streams with other coefficients are rejected. It interpolates chroma:
compared with the reference in `fastvid.decode.pixels` it is 2 levels off on average and at most 13 on a texture of
smooth colours, more at sharp edges between colours.

An undecodable sample invalidates its pipeline. The pipeline is then rebuilt (1 to 7 ms on a CPU, 50 to 70 ms more for
each NVDEC decoder) and the batch repeated sample by sample, so that only the bad sample fails.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import nvidia.dali.fn
import nvidia.dali.pipeline
import nvidia.dali.types

from fastvid.decode import nvdec
from fastvid.decode.container import WrappedClip, check_target, wrap
from fastvid.decode.request import DeviceRgb, EncodedClip, Output, Rgb
from fastvid.errors import FastvidError, UsageError
from fastvid.format.schema import Codec

# DALI's type stubs are incomplete.
_fn: Any = nvidia.dali.fn
_types: Any = nvidia.dali.types
_Pipeline: Any = nvidia.dali.pipeline.Pipeline


class DaliCpuDecoder:
    """Decodes batches of clips with DALI on the CPU.

    Args:
        max_clips: Maximum number of clips per DALI batch. On one thread a batch is no faster than single clips.
        num_threads: Threads of each pipeline. Use one if every thread of the loader has its own decoder.
    """

    outputs: ClassVar[frozenset[type]] = frozenset({Rgb})
    codecs: ClassVar[frozenset[Codec]] = frozenset({Codec.VP9, Codec.MJPEG})
    device: ClassVar[str] = "cpu"

    def __init__(self, *, max_clips: int = 1, num_threads: int = 1) -> None:
        if max_clips < 1 or num_threads < 1:
            raise UsageError(f"max_clips {max_clips} and num_threads {num_threads} must be at least 1")
        self.max_clips = max_clips
        self._num_threads = num_threads
        self._device_id: int | None = None
        self._graphs: dict[bool, _Graph] | None = {}
        self._lock = threading.Lock()

    def decode(self, clips: Sequence[EncodedClip], outputs: Sequence[Output]) -> list[FastvidError | None]:
        """See `fastvid.decode.request.Decoder`.

        Raises:
            UsageError: If the decoder is closed or used by another thread, or an output does not match its request.
        """
        targets = [check_target(clip, output, self.outputs) for clip, output in zip(clips, outputs, strict=True)]
        if not self._lock.acquire(blocking=False):
            raise UsageError("DALI decoder is in use by another thread", hint="open one decoder for each thread")
        try:
            if self._graphs is None:
                raise UsageError("decoder is closed")
            results: list[FastvidError | None] = [None] * len(clips)
            wrapped: dict[int, WrappedClip] = {}
            for number, clip in enumerate(clips):
                try:
                    wrapped[number] = wrap(clip, f"DALI on a {self.device}", self.codecs)
                except FastvidError as error:
                    results[number] = clip.error(error.message, hint=error.hint)
            for resized in (False, True):
                group = [number for number, sample in wrapped.items() if sample.resized is resized]
                for first in range(0, len(group), self.max_clips):
                    self._run(resized, group[first : first + self.max_clips], wrapped, targets, results)
            return results
        finally:
            self._lock.release()

    def close(self) -> None:
        """Release the pipelines. May be called twice."""
        with self._lock:
            self._graphs = None

    def _run(
        self,
        resized: bool,
        numbers: Sequence[int],
        wrapped: dict[int, WrappedClip],
        targets: Sequence[Rgb | DeviceRgb],
        results: list[FastvidError | None],
    ) -> None:
        """Decode some clips in one run; if the run fails, repeat it clip by clip."""
        assert self._graphs is not None
        graph = self._graphs.pop(resized, None)
        try:
            if graph is None:
                graph = _Graph(resized, self.max_clips, self._num_threads, self._device_id)
            errors = graph.run([wrapped[number] for number in numbers], [targets[number] for number in numbers])
        except RuntimeError as error:
            if len(numbers) == 1:
                results[numbers[0]] = wrapped[numbers[0]].clip.error(_reason(error))
                return
            for number in numbers:
                self._run(resized, [number], wrapped, targets, results)
            return
        # Keep the graph only after a run without an exception: otherwise its pipeline is invalid.
        self._graphs[resized] = graph
        for number, message in zip(numbers, errors, strict=True):
            if message is not None:
                results[number] = wrapped[number].clip.error(message)


class DaliGpuDecoder(DaliCpuDecoder):
    """Decodes batches of clips with NVDEC and leaves the frames on the GPU.

    Args:
        max_clips: Maximum number of clips per DALI batch.
        num_threads: Threads of the pipeline, for parsing and demuxing.
        device_id: Index of the GPU; by default torch's current one.
    """

    outputs = frozenset({DeviceRgb})
    codecs = frozenset({Codec.H264, Codec.HEVC, Codec.VP9})
    device = "gpu"

    def __init__(self, *, max_clips: int = 4, num_threads: int = 1, device_id: int | None = None) -> None:
        super().__init__(max_clips=max_clips, num_threads=num_threads)
        self._device_id = nvdec.current_device() if device_id is None else device_id

    @staticmethod
    def check() -> None:
        """Raise MissingDependency, with the reason, if no GPU can decode."""
        nvdec.require(nvdec.current_device())

    @staticmethod
    def lanes() -> int:
        """Return the number of NVDEC engines of torch's current GPU: each needs one decoder."""
        return nvdec.engines(nvdec.current_device())


class _Graph:
    """One persistent DALI pipeline: encoded clips in, uint8 [3, U, H, W] out.

    Args:
        resized: Whether crops are resized; cropping alone costs a third of that.
        max_clips: Maximum number of samples per run.
        num_threads: Threads of the pipeline.
        device_id: Index of the GPU, or None for the CPU.
    """

    def __init__(self, resized: bool, max_clips: int, num_threads: int, device_id: int | None) -> None:
        self._resized = resized
        self._device_id = device_id
        pipeline = _Pipeline(
            batch_size=max_clips,
            num_threads=num_threads,
            device_id=device_id,
            prefetch_queue_depth=1,
            set_affinity=False,
        )
        with pipeline:
            mp4 = _fn.external_source(name="mp4", dtype=_types.UINT8, ndim=1)
            positions = _fn.external_source(name="positions", dtype=_types.INT32, ndim=1)
            # Without pad_mode="none" a missing frame would silently be black.
            video = _fn.decoders.video(
                mp4, frames=positions, device="cpu" if device_id is None else "mixed", pad_mode="none"
            )
            corner = _fn.external_source(name="corner", dtype=_types.FLOAT, ndim=1)
            extent = _fn.external_source(name="extent", dtype=_types.FLOAT, ndim=1)
            flip = _fn.external_source(name="flip", dtype=_types.INT32, ndim=0)
            if resized:
                size = _fn.external_source(name="size", dtype=_types.FLOAT, ndim=1)
                cut = _fn.resize(
                    video,
                    roi_start=corner,
                    roi_end=corner + extent,
                    size=size,
                    interp_type=_types.INTERP_LINEAR,
                    antialias=True,
                )
            else:
                cut = _fn.slice(video, corner, extent, axes=(1, 2), normalized_anchor=False, normalized_shape=False)
            rgb = _fn.crop_mirror_normalize(cut, mirror=flip, output_layout="CFHW", dtype=_types.UINT8)
            pipeline.set_outputs(rgb, video.shape())
        pipeline.build()
        self._pipeline = pipeline

    def run(self, samples: Sequence[WrappedClip], targets: Sequence[Rgb | DeviceRgb]) -> list[str | None]:
        """Decode samples into their targets.

        Returns:
            For each sample None, or the error message.

        Raises:
            RuntimeError: If DALI failed; the graph cannot be used again.
        """
        requests = [sample.clip.request for sample in samples]
        boxes = [request.box for request in requests]
        feed = self._pipeline.feed_input
        feed("mp4", [np.frombuffer(sample.mp4, np.uint8) for sample in samples])
        feed("positions", [sample.positions for sample in samples])
        feed("corner", [np.array((box.y, box.x), np.float32) for box in boxes])
        feed("extent", [np.array((box.height, box.width), np.float32) for box in boxes])
        feed("flip", [np.array(request.flip, np.int32) for request in requests])
        if self._resized:
            feed("size", [np.array(request.size, np.float32) for request in requests])
        rgb, shapes = self._pipeline.run()
        errors: list[str | None] = []
        for place, (sample, target) in enumerate(zip(samples, targets, strict=True)):
            info = sample.clip.info
            decoded = tuple(np.asarray(shapes.at(place)).tolist())
            expected = (len(sample.positions), info.height, info.width, 3)
            if decoded != expected:
                errors.append(f"decoded frames have shape {decoded}, expected {expected} for this stream")
                continue
            if isinstance(target, Rgb):
                frames = np.asarray(rgb.at(place))
                target.data[...] = frames if sample.in_order else frames[:, sample.index]
            else:
                self._deliver(rgb.at(place), sample, target)
            errors.append(None)
        if self._device_id is not None:
            # The next run overwrites the pipeline's outputs, and the consumer uses its own CUDA stream.
            nvdec.synchronize(self._device_id)
        return errors

    def _deliver(self, tensor: Any, sample: WrappedClip, target: DeviceRgb) -> None:
        """Copy from DALI's tensor to ours on the device, without passing through the host."""
        import torch
        from torch.utils.dlpack import from_dlpack

        frames = from_dlpack(tensor)
        target.data.copy_(frames if sample.in_order else frames[:, torch.from_numpy(sample.index).to(frames.device)])


def _reason(error: RuntimeError) -> str:
    """Return the line of DALI's message that names the cause."""
    lines = str(error).partition("encountered:")[2].strip().splitlines() or str(error).splitlines()
    return f"DALI: {lines[0].strip()}"
