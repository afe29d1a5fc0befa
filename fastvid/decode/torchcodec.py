"""The torchcodec back-end: decodes planned packets, wrapped in minimal MP4s, with ``VideoDecoder``.

For users who already have torchcodec, and as a rival in benchmarks: on a CPU it decodes with libavcodec like PyAV, but
opens a container for every clip and converts whole frames before cropping.

Colours: on a CPU libswscale converts with nearest chroma, as in `fastvid.decode.swscale`; the coefficients are those of
the bitstream, so streams other than BT.601 are rejected. On a GPU NVIDIA's converter interpolates chroma; neither the
difference nor the speed is measured, because no GPU has run this yet (``python -m bench gpu`` measures them).
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

from fastvid.decode import engines
from fastvid.decode import engines as libraries
from fastvid.decode.containers import WrappedClip, check_target, wrap
from fastvid.decode.device_stream import DeviceStream
from fastvid.decode.pixels import resize
from fastvid.decode.request import DecoderOutput, DeviceRgb, EncodedClip, Rgb
from fastvid.errors import DecodeError, FastvidError, MissingDependency, UsageError
from fastvid.format.schema import Codec

# Raised by the import of torchcodec if its libraries fail to load.
_NOT_LOADED = (ImportError, OSError, RuntimeError)
# The loader's message about a torchcodec library that is built for another version of FFmpeg.
_OF_ANOTHER_FFMPEG = re.compile(r"lib(av|sw|torchcodec_)\w+\.so[.\d]*: cannot open")


def _video_decoder() -> Any:
    """Import torchcodec's ``VideoDecoder``, with the system's FFmpeg or, if it does not fit, PyAV's."""
    spec = importlib.util.find_spec("torchcodec")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torchcodec is not installed", name="torchcodec")
    try:
        return _imported()
    except _NOT_LOADED:
        libraries.expose_ffmpeg()
    # Since 0.16 torchcodec can be imported without FFmpeg and then never searches for it again, so import it afresh.
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
        raise ImportError("torchcodec found no FFmpeg")
    return VideoDecoder


def _does_not_load(package: Path) -> MissingDependency:
    """Return an error with the loader's own message; torchcodec's error lists all its attempts."""
    files = [path for kind in ("core", "custom_ops", "image") for path in sorted(package.glob(f"lib*_{kind}*.so"))]
    words = filter(None, map(_problem, files))
    reason = next((text for text in words if not _OF_ANOTHER_FFMPEG.match(text)), None)
    message = f"torchcodec {version('torchcodec')} is installed, but"
    if reason is not None:
        return MissingDependency(f"{message} its libraries fail to load: {reason}", hint=_fitting())
    versions = sorted(int(path.stem.removeprefix("libtorchcodec_core")) for path in package.glob("lib*_core*.so"))
    return MissingDependency(
        f"{message} not built for FFmpeg {av.ffmpeg_version_info}, the version that PyAV contains",
        hint=f"install the shared libraries of one of these FFmpeg versions: {', '.join(map(str, versions))}",
    )


def _problem(library: Path) -> str | None:
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return None


def _fitting() -> str:
    """Return the hint to install a torchcodec that is built for this torch."""
    cuda = torch.version.cuda
    # Since 0.14 the wheels on PyPI are built for CUDA 13.
    build = "cpu" if cuda is None else f"cu{cuda.replace('.', '')}" if cuda.startswith("12.") else None
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    return f"install the one for torch {torch.__version__}: pip install --upgrade --force-reinstall torchcodec{index}"


VideoDecoder: Any = _video_decoder()

# Tolerated error of a frame's time, in frame durations: containers have exact ticks, torchcodec float seconds.
_TIME_SLACK = 0.25

# Of torchcodec: "nvdec" is its default back-end on CUDA, and its wheels on PyPI contain it.
_FIRST_WITH_NVDEC = (0, 14)


class TorchcodecCpuDecoder:
    """Decodes one clip at a time on the calling thread."""

    max_clips: ClassVar[int] = 1
    outputs: ClassVar[frozenset[type]] = frozenset({Rgb})
    codecs: ClassVar[frozenset[Codec]] = frozenset({Codec.H264, Codec.HEVC, Codec.VP9})
    device: ClassVar[str] = "cpu"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False

    def decode(self, clips: Sequence[EncodedClip], outputs: Sequence[DecoderOutput]) -> list[FastvidError | None]:
        """See `fastvid.decode.request.Decoder`."""
        targets = [check_target(clip, output, self.outputs) for clip, output in zip(clips, outputs, strict=True)]
        if not self._lock.acquire(blocking=False):
            raise UsageError("torchcodec decoder is in use by another thread", hint="open one decoder for each thread")
        try:
            if self._closed:
                raise UsageError("decoder is closed")
            return [self._decode(clip, target) for clip, target in zip(clips, targets, strict=True)]
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the decoder. May be called twice."""
        with self._lock:
            self._closed = True

    def _decode(self, clip: EncodedClip, target: Rgb | DeviceRgb) -> FastvidError | None:
        try:
            wrapped = wrap(clip, f"torchcodec on a {self.device}", self.codecs)
            frames = self._frames(wrapped)
        except FastvidError as error:
            return clip.error(error.message, hint=error.hint)
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
        """Decode each wanted frame once: uint8 [U, 3, h, w] of the stream's size."""
        info, positions = wrapped.clip.info, wrapped.positions
        try:
            decoder = self._open(wrapped)
            batch = decoder.get_frames_at(positions.tolist())
        except (RuntimeError, ValueError, IndexError) as error:
            raise DecodeError(f"torchcodec: {str(error).strip().partition(chr(10))[0]}") from error
        expected = (len(positions), 3, info.height, info.width)
        if tuple(batch.data.shape) != expected:
            raise DecodeError(
                f"decoded frames have shape {tuple(batch.data.shape)}, expected {expected} for this stream"
            )
        late = np.abs(batch.pts_seconds.cpu().numpy() * float(info.fps) - positions)
        if late.max() > _TIME_SLACK:
            raise DecodeError("torchcodec returned frames at other times than requested")
        frames: torch.Tensor = batch.data
        return frames

    def _open(self, wrapped: WrappedClip) -> Any:
        # The container's packet table is exact, so "approximate" seeks, which skip the scan, are exact as well.
        return VideoDecoder(wrapped.mp4, num_ffmpeg_threads=1, device=self._torch_device(), seek_mode="approximate")

    def _torch_device(self) -> str:
        return "cpu"


class TorchcodecCudaDecoder(TorchcodecCpuDecoder):
    """Decodes one clip at a time with NVDEC and leaves the frames on the GPU.

    Requires torchcodec 0.14, the first with a cache of NVDEC decoders by default and with CUDA in its wheels on PyPI.
    """

    outputs = frozenset({DeviceRgb})
    device = "cuda"

    def __init__(self, *, device_id: int | None = None, cached_decoders: int = 64) -> None:
        super().__init__()
        self._stream = DeviceStream(engines.gpu_index(device_id))
        decoders = _cuda_decoders()
        decoders.set_nvdec_cache_capacity(max(cached_decoders, decoders.get_nvdec_cache_capacity()))

    @staticmethod
    def check(device_id: int | None = None) -> None:
        """Raise MissingDependency, with the reason, if the GPU cannot decode or torchcodec lacks CUDA."""
        engines.require(device_id)
        _cuda_decoders()

    @staticmethod
    def lanes(device_id: int | None = None) -> int:
        """Return the number of NVDEC engines of the GPU: each needs one decoder."""
        return engines.engines(engines.gpu_index(device_id))

    def decode(self, clips: Sequence[EncodedClip], outputs: Sequence[DecoderOutput]) -> list[FastvidError | None]:
        """See `TorchcodecCpuDecoder.decode`."""
        with self._stream.writing(outputs):
            return super().decode(clips, outputs)

    def _open(self, wrapped: WrappedClip) -> Any:
        with _cuda_decoders().set_cuda_backend("nvdec"):
            decoder = super()._open(wrapped)
        # A silent fallback to the CPU would look like a slow GPU.
        if decoder.cpu_fallback:
            raise DecodeError(f"torchcodec cannot decode this stream on the GPU: {decoder.cpu_fallback}")
        return decoder

    def _torch_device(self) -> str:
        return str(self._stream.device)


def _cuda_decoders() -> Any:
    """Return ``torchcodec.decoders`` if it has NVDEC."""
    import torchcodec
    from torchcodec import decoders

    if "+cpu" in torchcodec.__version__:
        raise MissingDependency(f"torchcodec {torchcodec.__version__} is built without CUDA", hint=_fitting())
    if tuple(map(int, torchcodec.__version__.split(".")[:2])) < _FIRST_WITH_NVDEC:
        raise MissingDependency(
            f"torchcodec {torchcodec.__version__} has no cache of NVDEC decoders by default",
            hint="pip install --upgrade 'torchcodec>=0.14'",
        )
    return decoders
