"""The DALI back-end: planned packets, wrapped in minimal MP4s, through ``fn.decoders.video``.

DALI 2.4 decodes VP8, VP9 and MJPEG on a CPU; H.264 and HEVC need its GPU decoder. Crop, resize, flip and the layout are
done by DALI's operators in the same pipeline.

Colours: DALI converts with BT.601 whatever the stream says, so streams with other coefficients are refused. Its chroma
is interpolated: against the reference of `fastvid.decode.pixels` it is 2 levels off on average and 13 at most on a
texture of smooth colours, more at sharp edges between colours.

One undecodable sample makes the pipeline that met it invalid. Then the pipeline is built anew (1 to 7 ms) and the batch
is repeated sample by sample, so that only the bad one fails.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import nvidia.dali.fn
import nvidia.dali.pipeline
import nvidia.dali.types

from fastvid.decode.request import EncodedClip, IntArray, Output, Rgb, UInt8Array
from fastvid.errors import DecodeError, FastvidError, UsageError
from fastvid.format.mp4 import minimal_mp4
from fastvid.format.picture_size import declared_size
from fastvid.format.schema import Codec, Matrix, Range

# DALI's own stubs leave half of it out.
_fn: Any = nvidia.dali.fn
_types: Any = nvidia.dali.types
_Pipeline: Any = nvidia.dali.pipeline.Pipeline

_BT601: Final = frozenset({Matrix.SMPTE170M, Matrix.BT470BG, Matrix.UNKNOWN})


class DaliCpuDecoder:
    """Decodes batches of clips with DALI on the CPU.

    Args:
        max_clips: The most clips of one DALI batch. On one thread a batch is no faster than its clips one by one.
        num_threads: Threads of each pipeline. One is right where every lane of a loader has a decoder of its own.
    """

    outputs: Final = frozenset({Rgb})
    codecs: Final = frozenset({Codec.VP9, Codec.MJPEG})
    device: Final = "cpu"

    def __init__(self, *, max_clips: int = 1, num_threads: int = 1) -> None:
        if max_clips < 1 or num_threads < 1:
            raise UsageError(f"max_clips {max_clips} and num_threads {num_threads} must be at least 1")
        self.max_clips = max_clips
        self._num_threads = num_threads
        self._graphs: dict[bool, _Graph] | None = {}
        self._lock = threading.Lock()

    def decode(self, clips: Sequence[EncodedClip], outputs: Sequence[Output]) -> list[FastvidError | None]:
        """See `fastvid.decode.request.Decoder`.

        Raises:
            UsageError: The decoder is closed or in use by another thread, or an output does not fit its request.
        """
        targets = [_target(clip, output) for clip, output in zip(clips, outputs, strict=True)]
        if not self._lock.acquire(blocking=False):
            raise UsageError("a DALI decoder serves one thread at a time", hint="open one for each thread")
        try:
            if self._graphs is None:
                raise UsageError("the decoder is closed")
            results: list[FastvidError | None] = [None] * len(clips)
            samples = []
            for number, clip in enumerate(clips):
                try:
                    samples.append(self._sample(number, clip))
                except FastvidError as error:
                    results[number] = clip.fail(error.message, hint=error.hint)
            for resized in (False, True):
                group = [sample for sample in samples if sample.resized is resized]
                for first in range(0, len(group), self.max_clips):
                    self._run(resized, group[first : first + self.max_clips], targets, results)
            return results
        finally:
            self._lock.release()

    def close(self) -> None:
        """Frees the pipelines. May be called twice."""
        with self._lock:
            self._graphs = None

    def _sample(self, number: int, clip: EncodedClip) -> _Sample:
        info = clip.info
        if info.codec not in self.codecs:
            known = ", ".join(sorted(codec.label for codec in self.codecs))
            raise DecodeError(f"DALI decodes {known} on a {self.device}, not {info.codec.label}", hint="use pyav")
        # JPEG pictures say their range themselves.
        if info.matrix not in _BT601 or (info.range is Range.FULL and info.codec is not Codec.MJPEG):
            colour = f"{info.matrix.name.lower()} {info.range.name.lower()}"
            raise DecodeError(f"DALI converts by limited BT.601, the stream is {colour}", hint="use pyav")
        if not clip.keys[0]:
            raise DecodeError("the first packet of a plan must be a key packet")
        for start, size in zip(clip.starts.tolist(), clip.sizes.tolist(), strict=True):
            if not size:
                raise DecodeError("a packet is empty")
            found = declared_size(info.codec, clip.data[start : start + size])
            # DALI writes pictures into memory of the promised size, whatever theirs is.
            if found not in (None, (info.width, info.height)):
                raise DecodeError(f"a packet's pictures are {found}, the stream's {(info.width, info.height)}")
        wanted, index = np.unique(clip.request.frames, return_inverse=True)
        shown = np.sort(clip.shows)
        # Positions among the packets given, sorted and unique: for a repeated one DALI seeks and decodes again.
        positions = np.searchsorted(shown, wanted)
        if positions[-1] >= len(shown) or (shown[positions] != wanted).any():
            raise DecodeError("wanted frames are shown by no packet of the plan")
        mp4 = minimal_mp4(info, clip.data, clip.starts, clip.sizes, clip.shows, clip.keys)
        return _Sample(number, clip, np.frombuffer(mp4, np.uint8), positions.astype(np.int32), index)

    def _run(
        self,
        resized: bool,
        samples: Sequence[_Sample],
        targets: Sequence[UInt8Array],
        results: list[FastvidError | None],
    ) -> None:
        assert self._graphs is not None
        graph = self._graphs.pop(resized, None)
        try:
            if graph is None:
                graph = _Graph(self.device, resized=resized, max_clips=self.max_clips, num_threads=self._num_threads)
            errors = graph.run(samples, targets)
        except RuntimeError as error:
            if len(samples) == 1:
                results[samples[0].number] = samples[0].clip.fail(_reason(error))
                return
            for sample in samples:
                self._run(resized, [sample], targets, results)
            return
        # Put back only after a run without an exception: the pipeline is invalid otherwise.
        self._graphs[resized] = graph
        for sample, message in zip(samples, errors, strict=True):
            if message is not None:
                results[sample.number] = sample.clip.fail(message)


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """A clip as DALI gets it.

    Attributes:
        number: Its place in the call.
        clip: The clip.
        mp4: Its packets in a container.
        positions: Which of the container's frames are wanted, sorted and unique, int32 [U].
        index: Which of those stands at each place of the output, int64 [T].
    """

    number: int
    clip: EncodedClip
    mp4: UInt8Array
    positions: npt.NDArray[np.int32]
    index: IntArray

    @property
    def resized(self) -> bool:
        request = self.clip.request
        return (request.box.height, request.box.width) != request.size


class _Graph:
    """One DALI pipeline that stays open: encoded clips in, uint8 [3, U, H, W] out.

    Args:
        device: "cpu".
        resized: Whether crops are resized; a crop alone costs a third of that.
        max_clips: The most samples of one run.
        num_threads: Threads of the pipeline.
    """

    def __init__(self, device: str, *, resized: bool, max_clips: int, num_threads: int) -> None:
        self._resized = resized
        pipeline = _Pipeline(
            batch_size=max_clips, num_threads=num_threads, device_id=None, prefetch_queue_depth=1, set_affinity=False
        )
        with pipeline:
            mp4 = _fn.external_source(name="mp4", dtype=_types.UINT8, ndim=1)
            positions = _fn.external_source(name="positions", dtype=_types.INT32, ndim=1)
            # Without pad_mode a missing frame would silently be black.
            video = _fn.decoders.video(mp4, frames=positions, device=device, pad_mode="none")
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

    def run(self, samples: Sequence[_Sample], targets: Sequence[UInt8Array]) -> list[str | None]:
        """Decodes samples into the targets of their numbers.

        Returns:
            For each sample None, or what is wrong with it.

        Raises:
            RuntimeError: DALI failed; the graph cannot be used again.
        """
        requests = [sample.clip.request for sample in samples]
        boxes = [request.box for request in requests]
        feed = self._pipeline.feed_input
        feed("mp4", [sample.mp4 for sample in samples])
        feed("positions", [sample.positions for sample in samples])
        feed("corner", [np.array((box.y, box.x), np.float32) for box in boxes])
        feed("extent", [np.array((box.height, box.width), np.float32) for box in boxes])
        feed("flip", [np.array(request.flip, np.int32) for request in requests])
        if self._resized:
            feed("size", [np.array(request.size, np.float32) for request in requests])
        rgb, shapes = self._pipeline.run()
        errors: list[str | None] = []
        for place, sample in enumerate(samples):
            info = sample.clip.info
            decoded = tuple(np.asarray(shapes.at(place)).tolist())
            expected = (len(sample.positions), info.height, info.width, 3)
            if decoded != expected:
                errors.append(f"decoded frames have shape {decoded}, the stream promises {expected}")
                continue
            frames, target = np.asarray(rgb.at(place)), targets[sample.number]
            if len(sample.index) == len(sample.positions) and (np.diff(sample.index) > 0).all():
                target[...] = frames
            else:
                np.take(frames, sample.index, axis=1, out=target)
            errors.append(None)
        return errors


def _target(clip: EncodedClip, output: Output) -> UInt8Array:
    if not isinstance(output, Rgb):
        raise UsageError(f"DALI writes Rgb, not {type(output).__name__}")
    expected = (3, len(clip.request.frames), *clip.request.size)
    if output.data.shape != expected:
        raise UsageError(f"output has shape {output.data.shape}, the request gives {expected}")
    return output.data


def _reason(error: RuntimeError) -> str:
    """The one line of DALI's message that says what happened."""
    lines = str(error).partition("encountered:")[2].strip().splitlines() or str(error).splitlines()
    return f"DALI: {lines[0].strip()}"
