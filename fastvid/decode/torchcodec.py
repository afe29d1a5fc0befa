"""The torchcodec back-end: planned packets, wrapped in minimal MP4s, through ``VideoDecoder``.

For those who have torchcodec already, and as a rival in benchmarks: on a CPU it decodes with libavcodec as PyAV does,
but opens a container for every clip and converts whole frames before they are cropped.

Colours: on a CPU libswscale converts, nearest chroma, as in `fastvid.decode.swscale`; the coefficients are those of the
bitstream, so streams other than BT.601 are refused. On a GPU NVIDIA's converter interpolates.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import av
import numpy as np
import torch

from fastvid.decode import libraries, nvdec
from fastvid.decode.container import WrappedClip, check_target, wrap
from fastvid.decode.pixels import resize
from fastvid.decode.request import DeviceRgb, EncodedClip, Output, Rgb
from fastvid.errors import DecodeError, FastvidError, MissingDependency, UsageError
from fastvid.format.schema import Codec

# What importing it raises where its libraries do not load.
_NOT_LOADED = (ImportError, OSError, RuntimeError)
# Of FFmpeg and of torchcodec itself: missing where a library of torchcodec is for another version of FFmpeg.
_OF_ANOTHER_FFMPEG = re.compile(r"lib(av|sw|torchcodec_)\w+\.so[.\d]*: cannot open")


def _video_decoder() -> Any:
    """torchcodec's ``VideoDecoder``, over the system's FFmpeg or, where no version there fits, over PyAV's.

    Raises:
        ImportError: torchcodec is not installed.
        MissingDependency: It is installed, and does not load.
    """
    spec = importlib.util.find_spec("torchcodec")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torchcodec is not installed", name="torchcodec")
    try:
        return _imported()
    except _NOT_LOADED:
        libraries.share()
    # Since 0.16 it can be imported without FFmpeg, perhaps by others and long ago, and then never looks for it again.
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchcodec"]:
        del sys.modules[name]
    try:
        return _imported()
    except _NOT_LOADED as error:
        raise _does_not_load(Path(spec.origin).parent) from error


def _imported() -> Any:
    import torchcodec
    from torchcodec.decoders import VideoDecoder

    if torchcodec.ffmpeg_major_version is None:
        raise ImportError("torchcodec has found no FFmpeg")
    return VideoDecoder


def _does_not_load(package: Path) -> MissingDependency:
    """The error that says why in the loader's own words; torchcodec's message holds those of every attempt."""
    files = [path for kind in ("core", "custom_ops", "image") for path in sorted(package.glob(f"lib*_{kind}*.so"))]
    words = filter(None, map(_problem, files))
    reason = next((text for text in words if not _OF_ANOTHER_FFMPEG.match(text)), None)
    message = f"torchcodec {version('torchcodec')} is installed, but"
    if reason is not None:
        return MissingDependency(f"{message} its libraries do not load: {reason}", hint=_fitting())
    versions = sorted(int(path.stem.removeprefix("libtorchcodec_core")) for path in package.glob("lib*_core*.so"))
    return MissingDependency(
        f"{message} not built for FFmpeg {av.ffmpeg_version_info}, which PyAV brings",
        hint=f"install the shared libraries of FFmpeg in a version among {', '.join(map(str, versions))}",
    )


def _problem(library: Path) -> str | None:
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return None


def _fitting() -> str:
    """How to install a torchcodec that is built for this torch."""
    cuda = torch.version.cuda
    # What the public index has since 0.14 is built for CUDA 13.
    build = "cpu" if cuda is None else f"cu{cuda.replace('.', '')}" if cuda.startswith("12.") else None
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    return f"install the one for torch {torch.__version__}: pip install --upgrade --force-reinstall torchcodec{index}"


VideoDecoder: Any = _video_decoder()

# A frame's time may be off by this share of its duration: the container holds exact ticks, torchcodec float seconds.
_TIME_SLACK = 0.25


class TorchcodecCpuDecoder:
    """Decodes one clip at a time on the calling thread."""

    max_clips: ClassVar[int] = 1
    outputs: ClassVar[frozenset[type]] = frozenset({Rgb})
    codecs: ClassVar[frozenset[Codec]] = frozenset({Codec.H264, Codec.HEVC, Codec.VP9})
    device: ClassVar[str] = "cpu"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False

    def decode(self, clips: Sequence[EncodedClip], outputs: Sequence[Output]) -> list[FastvidError | None]:
        """See `fastvid.decode.request.Decoder`.

        Raises:
            UsageError: The decoder is closed or in use by another thread, or an output does not fit its request.
        """
        targets = [check_target(clip, output, self.outputs) for clip, output in zip(clips, outputs, strict=True)]
        if not self._lock.acquire(blocking=False):
            raise UsageError("a torchcodec decoder serves one thread at a time", hint="open one for each thread")
        try:
            if self._closed:
                raise UsageError("the decoder is closed")
            return [self._decode(clip, target) for clip, target in zip(clips, targets, strict=True)]
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends its use. May be called twice."""
        with self._lock:
            self._closed = True

    def _decode(self, clip: EncodedClip, target: Rgb | DeviceRgb) -> FastvidError | None:
        try:
            wrapped = wrap(clip, f"torchcodec on a {self.device}", self.codecs)
            frames = self._frames(wrapped)
        except FastvidError as error:
            return clip.fail(error.message, hint=error.hint)
        box, size = clip.request.box, clip.request.size
        rgb = frames[:, :, box.y : box.y + box.height, box.x : box.x + box.width].transpose(0, 1)
        if wrapped.resized:
            rgb = resize(rgb.float(), size).round_().to(torch.uint8)
        if clip.request.flip:
            rgb = rgb.flip(-1)
        if not wrapped.in_order:
            rgb = rgb[:, torch.from_numpy(wrapped.index).to(rgb.device)]
        if isinstance(target, Rgb):
            target.data[...] = rgb.numpy()
        else:
            target.data.copy_(rgb)
        return None

    def _frames(self, wrapped: WrappedClip) -> torch.Tensor:
        """The wanted frames, each once: uint8 [U, 3, h, w] of the stream's size.

        Raises:
            DecodeError: torchcodec fails, or gives other frames than it was asked for.
        """
        info, positions = wrapped.clip.info, wrapped.positions
        try:
            # The container's table of packets is exact, so there is nothing to scan.
            decoder = VideoDecoder(
                wrapped.mp4, num_ffmpeg_threads=1, device=self._torch_device(), seek_mode="approximate"
            )
            batch = decoder.get_frames_at(positions.tolist())
        except (RuntimeError, ValueError, IndexError) as error:
            raise DecodeError(f"torchcodec: {str(error).strip().partition(chr(10))[0]}") from error
        self._accept(decoder)
        expected = (len(positions), 3, info.height, info.width)
        if tuple(batch.data.shape) != expected:
            raise DecodeError(f"decoded frames have shape {tuple(batch.data.shape)}, the stream promises {expected}")
        late = np.abs(batch.pts_seconds.cpu().numpy() * float(info.fps) - positions)
        if late.max() > _TIME_SLACK:
            raise DecodeError("torchcodec gave frames of other times than those asked for")
        frames: torch.Tensor = batch.data
        return frames

    def _torch_device(self) -> str:
        return "cpu"

    def _accept(self, decoder: Any) -> None:
        """Raises DecodeError when the decoder did something else than was asked."""


class TorchcodecCudaDecoder(TorchcodecCpuDecoder):
    """One lane of a GPU: decodes with NVDEC, and leaves the frames on the GPU.

    Args:
        device_id: Which GPU; by default torch's current one.
    """

    outputs = frozenset({DeviceRgb})
    device = "cuda"

    def __init__(self, *, device_id: int | None = None) -> None:
        super().__init__()
        self._device_id = nvdec.current_device() if device_id is None else device_id

    @staticmethod
    def check() -> None:
        """Raises MissingDependency, with the reason, where no GPU can decode or torchcodec has no CUDA."""
        nvdec.require(nvdec.current_device())
        from torchcodec import __version__

        if "+cpu" in __version__:
            raise MissingDependency(
                f"torchcodec {__version__} is built without CUDA",
                hint=_fitting(),
            )

    @staticmethod
    def lanes() -> int:
        """NVDEC engines of torch's current GPU: one decoder for each is right."""
        return nvdec.engines(nvdec.current_device())

    def decode(self, clips: Sequence[EncodedClip], outputs: Sequence[Output]) -> list[FastvidError | None]:
        """See `TorchcodecCpuDecoder.decode`."""
        results = super().decode(clips, outputs)
        # What is written is there for every stream of the device.
        nvdec.synchronize(self._device_id)
        return results

    def _torch_device(self) -> str:
        return f"cuda:{self._device_id}"

    def _accept(self, decoder: Any) -> None:
        # A decoder that silently works on the CPU would be taken for a slow GPU.
        if decoder.cpu_fallback:
            raise DecodeError(f"torchcodec does not decode this stream on the GPU: {decoder.cpu_fallback}")
