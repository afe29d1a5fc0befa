"""The DALI back-end: decodes planned packets, wrapped in minimal MP4s, with ``fn.decoders.video``; JPEG one by one.

On a GPU each decoder has its own DALI pipeline, whose operator decodes as many clips at once as it has threads, on a
CUDA stream of its own. The same graph runs on a CPU, where DALI 2.4 decodes VP8, VP9 and MJPEG; H.264 and HEVC need a
GPU. DALI's operators crop, resize, flip and lay out the frames in the same pipeline. This has not been run on a GPU:
``python -m bench gpu`` measures which numbers of pipelines and threads are best.

On a GPU the pictures of MJPEG, whole or cut to tiles, are decoded by nvJPEG through ``fn.decoders.image``, each as a
sample of its own. It takes all as full range.

Colours: DALI always converts with BT.601, so streams with other coefficients are rejected. It interpolates chroma:
on a CPU it is 2 levels off the reference in `fastvid.decode.pixels` on average and at most 13 on a texture of smooth
colours, more at sharp edges between colours. On a GPU this is not measured.

Missing pictures: DALI reports success and leaves a frame unwritten if NVDEC's parser drops its picture. So decoded
frames are overwritten with a constant level, the mark, after use, and a frame that has only this level after the next
run is an error. Memory that a pipeline uses for the first time does not contain the mark.

An undecodable sample makes its pipeline unusable. The pipeline is then rebuilt (1 to 7 ms on a CPU, not measured on a
GPU) and the batch is repeated sample by sample, so that only the bad sample fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Final

import numpy as np
import nvidia.dali.fn
import nvidia.dali.pipeline
import nvidia.dali.types

from fastvid.decode import engines
from fastvid.decode.containers import WrappedClip, wrap
from fastvid.decode.device_stream import DeviceStream
from fastvid.decode.request import DecoderOutput, DeviceRgb, EncodedClip, Rgb, ThreadDecoder
from fastvid.decode.tiles import reduced
from fastvid.errors import DecodeError, FastvidError, UsageError
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import Codec, Range

_log = logging.getLogger(__name__)

# DALI's type stubs are incomplete.
_fn: Any = nvidia.dali.fn
_types: Any = nvidia.dali.types
_Pipeline: Any = nvidia.dali.pipeline.Pipeline

# Levels of overwritten frames. A frame may really be grey of the first level; it does not change to the second one.
_MARK: Final = 0x5A
_OTHER_MARK: Final = 0xA5
_PICTURES: Final = 64  # JPEG pictures of one run: eight clips of eight frames
_UNWRITTEN: Final = "DALI did not write frame {}: NVDEC's parser dropped its picture"


class DaliCpuDecoder(ThreadDecoder):
    """Decodes batches of clips with DALI on the CPU."""

    NAME = "DALI decoder"
    outputs = frozenset({Rgb})
    codecs: ClassVar[frozenset[Codec]] = frozenset({Codec.VP9, Codec.MJPEG})
    device: ClassVar[str] = "cpu"

    def __init__(self, *, max_clips: int = 1, num_threads: int = 1) -> None:
        if max_clips < 1 or num_threads < 1:
            raise UsageError(f"max_clips {max_clips} and num_threads {num_threads} must be at least 1")
        super().__init__()
        self.max_clips = max_clips
        self._num_threads = num_threads
        self._stream: DeviceStream | None = None
        self._graphs: dict[tuple[bool, bool], _Graph | _Pictures] = {}

    def _decode_all(self, clips: Sequence[EncodedClip], outputs: Sequence[DecoderOutput]) -> list[FastvidError | None]:
        results: list[FastvidError | None] = [None] * len(clips)
        wrapped: dict[int, WrappedClip] = {}
        for number, clip in enumerate(clips):
            try:
                wrapped[number] = self._wrap(clip)
            except FastvidError as error:
                results[number] = clip.error(error.message, hint=error.hint).at(**error.where)
        with nullcontext() if self._stream is None else self._stream.writing(outputs):
            for kind in ((resized, pictures) for resized in (False, True) for pictures in (False, True)):
                group = [number for number, sample in wrapped.items() if self._kind(sample) == kind]
                for first in range(0, len(group), self.max_clips):
                    self._run(kind, group[first : first + self.max_clips], wrapped, outputs, results)
        return results

    def _release(self) -> None:
        self._graphs.clear()

    def _wrap(self, clip: EncodedClip) -> WrappedClip:
        return wrap(reduced(clip), f"DALI on a {self.device}", self.codecs)

    def _kind(self, sample: WrappedClip) -> tuple[bool, bool]:
        """Return whether a sample is resized, and whether its pictures are decoded one by one."""
        return sample.resized, self._stream is not None and sample.clip.info.codec is Codec.MJPEG

    def _run(
        self,
        kind: tuple[bool, bool],
        numbers: Sequence[int],
        wrapped: dict[int, WrappedClip],
        targets: Sequence[Any],
        results: list[FastvidError | None],
    ) -> None:
        """Decode some clips in one run; if the run fails, repeat it clip by clip. Errors go to `results`."""
        graph = self._graphs.pop(kind, None)
        try:
            if graph is None:
                resized, pictures = kind
                clips = _PICTURES if pictures else self.max_clips
                graph = (_Pictures if pictures else _Graph)(resized, clips, self._num_threads, self._stream)
            errors = graph.run([wrapped[number] for number in numbers], [targets[number] for number in numbers])
        except RuntimeError as error:
            if len(numbers) == 1:
                results[numbers[0]] = wrapped[numbers[0]].clip.error(_reason(error))
                return
            for number in numbers:
                self._run(kind, [number], wrapped, targets, results)
            return
        # Keep the graph only after a run without an exception: otherwise its pipeline is invalid.
        self._graphs[kind] = graph
        for number, message in zip(numbers, errors, strict=True):
            if message is not None:
                results[number] = wrapped[number].clip.error(message)


class DaliGpuDecoder(DaliCpuDecoder):
    """Decodes batches of clips with NVDEC or nvJPEG and leaves the frames on the GPU."""

    outputs = frozenset({DeviceRgb})
    codecs = frozenset({Codec.H264, Codec.HEVC, Codec.VP9, Codec.MJPEG})
    device = "gpu"

    def __init__(self, *, max_clips: int = 4, num_threads: int | None = None, device_id: int | None = None) -> None:
        super().__init__(max_clips=max_clips, num_threads=max_clips if num_threads is None else num_threads)
        self._stream = DeviceStream(engines.gpu_index(device_id))

    @staticmethod
    def check(device_id: int | None = None) -> None:
        """Raise MissingDependency, with the reason, if the GPU has no NVDEC engine."""
        engines.require(device_id)

    @staticmethod
    def lanes(device_id: int | None = None) -> int:
        """Return the number of decoders to open: one pipeline for each NVDEC engine of the GPU."""
        return engines.engines(engines.gpu_index(device_id))

    def _wrap(self, clip: EncodedClip) -> WrappedClip:
        if clip.info.codec is not Codec.MJPEG:
            _warn_if_padded(clip.info)
        elif clip.info.range is Range.LIMITED:
            raise DecodeError("nvJPEG takes all pictures as full range, the stream is limited", hint="use pyav")
        return super()._wrap(clip)


class _Graph:
    """One persistent DALI pipeline: takes encoded clips, and returns uint8 [3, U, H, W] for each.

    `resized`: whether it resizes. `max_clips`: maximum number of samples per run.
    """

    def __init__(self, resized: bool, max_clips: int, num_threads: int, stream: DeviceStream | None) -> None:
        self._resized = resized
        self._stream = stream
        self._pipeline = _pipeline(resized, max_clips, num_threads, None if stream is None else stream.device.index)

    def run(self, samples: Sequence[WrappedClip], targets: Sequence[Rgb | DeviceRgb]) -> list[str | None]:
        """Decode samples into their targets.

        Returns for each sample None, or its error message.
        """
        errors, videos, marked = self._decode(samples, targets, _MARK)
        if marked:
            # Either these frames are grey, or DALI did not write them: decode again over another mark to find out.
            _overwrite(videos, _OTHER_MARK)
            doubtful = sorted(marked)
            again, videos, marked = self._decode(
                [samples[place] for place in doubtful], [targets[place] for place in doubtful], _OTHER_MARK
            )
            for number, place in enumerate(doubtful):
                unwritten = ", ".join(map(str, marked.get(number, ())))
                errors[place] = again[number] or (_UNWRITTEN.format(unwritten) if unwritten else None)
        _overwrite(videos, _MARK)
        return errors

    def _decode(
        self, samples: Sequence[WrappedClip], targets: Sequence[Rgb | DeviceRgb], mark: int
    ) -> tuple[list[str | None], list[Any], dict[int, list[int]]]:
        """Run the pipeline once.

        Returns for each sample None or its error message; if the target is on a device, the frames of each sample in
        DALI's memory, [U, h, w, 3]; and for each of these samples that has any, its frames of the level `mark` only.
        """
        _feed(self._pipeline, [np.frombuffer(sample.mp4, np.uint8) for sample in samples], samples, self._resized)
        self._pipeline.feed_input("positions", [sample.positions for sample in samples])
        rgb, video = self._pipeline.run(None if self._stream is None else self._stream.stream.cuda_stream)
        on_host = isinstance(targets[0], Rgb)
        view = np.asarray if on_host else _tensor
        videos = [view(video.at(place)) for place in range(len(samples))]
        errors: list[str | None] = []
        flat: dict[int, Any] = {}
        for place, (sample, target) in enumerate(zip(samples, targets, strict=True)):
            info = sample.clip.info
            decoded = tuple(videos[place].shape)
            expected = (len(sample.positions), info.height, info.width, 3)
            if decoded != expected:
                errors.append(f"decoded frames have shape {decoded}, expected {expected} for this stream")
                continue
            if isinstance(target, Rgb):
                frames = view(rgb.at(place))
                target.data[...] = frames if sample.in_order else frames[:, sample.index]
            else:
                flat[place] = _deliver(view(rgb.at(place)), sample, target, mark)
            errors.append(None)
        marked = {
            place: np.unique(samples[place].clip.request.frames)[found].tolist()
            for place, found in ((place, found.cpu().numpy()) for place, found in flat.items())
            if found.any()
        }
        return errors, [] if on_host else videos, marked


class _Pictures:
    """One persistent DALI pipeline for JPEG on a GPU: takes pictures, and returns uint8 [3, H, W] for each."""

    def __init__(self, resized: bool, most: int, num_threads: int, stream: DeviceStream | None) -> None:
        assert stream is not None
        self._resized, self._most, self._stream = resized, most, stream
        self._pipeline = _pipeline(resized, most, num_threads, stream.device.index, pictures=True)

    def run(self, samples: Sequence[WrappedClip], targets: Sequence[DeviceRgb]) -> list[str | None]:
        """Decode samples into their targets; an undecodable picture is an exception of the pipeline."""
        pictures = [
            (sample, target, np.flatnonzero(sample.index == number).tolist(), data)
            for sample, target in zip(samples, targets, strict=True)
            for number, data in enumerate(sample.pictures())
        ]
        for first in range(0, len(pictures), self._most):
            owners, outputs, places, data = zip(*pictures[first : first + self._most], strict=True)
            _feed(self._pipeline, data, owners, self._resized)
            (rgb,) = self._pipeline.run(self._stream.stream.cuda_stream)
            for at, (output, shown) in enumerate(zip(outputs, places, strict=True)):
                frame = _tensor(rgb.at(at))
                for place in shown:
                    output.data[:, place].copy_(frame, non_blocking=True)
        return [None] * len(samples)


def _feed(pipeline: Any, data: Sequence[Any], samples: Sequence[WrappedClip], resized: bool) -> None:
    """Give a pipeline the bytes of its next run, and the crop of the clip that each belongs to."""
    requests = [sample.clip.request for sample in samples]
    boxes = [request.box for request in requests]
    feed = pipeline.feed_input
    feed("data", data)
    feed("corner", [np.array((box.y, box.x), np.float32) for box in boxes])
    feed("extent", [np.array((box.height, box.width), np.float32) for box in boxes])
    feed("flip", [np.array(request.flip, np.int32) for request in requests])
    if resized:
        feed("size", [np.array(request.size, np.float32) for request in requests])


def _deliver(frames: Any, sample: WrappedClip, target: DeviceRgb, mark: int) -> Any:
    """Copy frames, uint8 [3, U, H, W], on the device; return which have only the level `mark`, bool [U]."""
    import torch

    if sample.in_order:
        target.data.copy_(frames, non_blocking=True)
    else:
        target.data.copy_(frames[:, torch.tensor(sample.index, device=frames.device)], non_blocking=True)
    return (frames.amin((0, 2, 3)) == mark) & (frames.amax((0, 2, 3)) == mark)


def _overwrite(videos: Sequence[Any], mark: int) -> None:
    for video in videos:
        video.fill_(mark)


def _pipeline(resized: bool, max_clips: int, num_threads: int, device_id: int | None, *, pictures: bool = False) -> Any:
    """Build a pipeline that returns uint8 [3, U, H, W], and the uncropped frames as decoded, [U, h, w, 3].

    `pictures`: its samples are JPEG pictures; then it returns uint8 [3, H, W] alone.
    """
    pipeline = _Pipeline(
        batch_size=max_clips,
        num_threads=num_threads,
        device_id=device_id,
        prefetch_queue_depth=1,
        set_affinity=False,
    )
    # The GPU's operator has a pool of `num_threads` threads, which it would pin to cores that all decoders share.
    where = {"device": "cpu"} if device_id is None else {"device": "mixed", "affine": False}
    with pipeline:
        data = _fn.external_source(name="data", dtype=_types.UINT8, ndim=1)
        if pictures:
            video = _fn.decoders.image(data, adjust_orientation=False, **where)
        else:
            positions = _fn.external_source(name="positions", dtype=_types.INT32, ndim=1)
            # Without pad_mode="none" a missing frame would silently be black.
            video = _fn.decoders.video(data, frames=positions, pad_mode="none", **where)
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
            cut = _fn.slice(video, corner, extent, axis_names="HW", normalized_anchor=False, normalized_shape=False)
        layout = "CHW" if pictures else "CFHW"
        rgb = _fn.crop_mirror_normalize(cut, mirror=flip, output_layout=layout, dtype=_types.UINT8)
        pipeline.set_outputs(*((rgb,) if pictures else (rgb, video)))
    pipeline.build()
    return pipeline


def _tensor(tensor: Any) -> Any:
    """Return a tensor of DALI as a torch tensor, without a copy."""
    from torch.utils.dlpack import from_dlpack

    return from_dlpack(tensor)


_padded: Final[set[tuple[int, int]]] = set()  # sizes that were warned about


def _warn_if_padded(info: StreamInfo) -> None:
    """Warn once per size if DALI 2.4 will create an NVDEC decoder for every clip.

    Its cache stores decoders by their target size and looks them up by the coded size, which is a multiple of 16 for
    H.264 (macroblocks) and of 8 for the other codecs (smallest coding block).
    """
    unit, size = 16 if info.codec is Codec.H264 else 8, (info.width, info.height)
    if (info.width % unit or info.height % unit) and size not in _padded:
        _padded.add(size)
        _log.warning(
            "DALI creates an NVDEC decoder for every clip of %dx%d %s, because the sides are not multiples of %d:"
            " use the decoder nvdec, or shard with a profile that scales",
            *(*size, info.codec.label, unit),
        )


def _reason(error: RuntimeError) -> str:
    """Return the line of DALI's message that names the cause."""
    lines = str(error).partition("encountered:")[2].strip().splitlines() or str(error).splitlines()
    return f"DALI: {lines[0].strip()}"
