"""Outputs of every type for the contract tests: made, filled, read."""

from __future__ import annotations

import numpy as np
import torch

from fastvid.decode.colours import ClipPlanes
from fastvid.decode.pixels import clip_to_rgb
from fastvid.decode.request import Box, Decoder, DecoderOutput, DevicePlanes, DeviceRgb, EncodedClip, Planes, Rgb
from tests.makers import Video, read_numbers

UNWRITTEN = 0x5A
"""Every output is filled with this level before it is decoded to."""


def empty(clip: EncodedClip, kind: type, device: str = "cpu") -> DecoderOutput:
    """Create an output for a clip, filled with `UNWRITTEN`."""
    return empties([clip], kind, device)[0]


def empties(clips: list[EncodedClip], kind: type, device: str = "cpu") -> list[DecoderOutput]:
    """Create outputs for clips of one shape, as views of one batch [B, T, ...]."""
    request = clips[0].request
    count, box, many = len(request.frames), request.box, len(clips)
    if kind is Planes:
        nbytes = Planes.nbytes(count, box)
        whole = np.full(many * nbytes, UNWRITTEN, np.uint8)
        return [Planes.packed(whole[at * nbytes :][:nbytes], count, box) for at in range(many)]

    def full(*shape):
        made = torch.full((many, count, *shape), UNWRITTEN, dtype=torch.uint8, device=device)
        if device != "cpu":
            torch.cuda.current_stream(device).synchronize()  # the decoder writes on a stream of its own
        return made

    if kind is DevicePlanes:
        y, uv = full(box.height, box.width), full(box.height // 2, box.width // 2, 2)
        return [DevicePlanes(y[at], uv[at]) for at in range(many)]
    pictures = full(3, *request.size)
    if kind is DeviceRgb:
        return [DeviceRgb(pictures[at].transpose(0, 1)) for at in range(many)]
    return [Rgb(one.transpose(1, 0, 2, 3)) for one in pictures.numpy()]


def decoded(decoder: Decoder, clip: EncodedClip, kind: type, device: str = "cpu") -> DecoderOutput:
    """Decode one clip, raising its error."""
    out = empty(clip, kind, device)
    (error,) = decoder.decode([clip], [out])
    if error is not None:
        raise error
    return out


def arrays(out: DecoderOutput) -> list[np.ndarray]:
    """Return an output's RGB [3, T, H, W], or its planes Y, U and V, on the host."""
    if isinstance(out, DevicePlanes):
        uv = out.uv.cpu().numpy()
        return [out.y.cpu().numpy(), uv[..., 0], uv[..., 1]]
    if isinstance(out, Planes):
        return [out.y, out.u, out.v]
    return [out.data if isinstance(out, Rgb) else out.data.cpu().numpy()]


def pictures(out: DecoderOutput) -> np.ndarray:
    """Return all bytes of an output."""
    return np.concatenate([one.ravel() for one in arrays(out)])


def read(out: DecoderOutput) -> list[int]:
    """Read the painted frame numbers in an output."""
    first = arrays(out)[0]
    return read_numbers(first[1] if isinstance(out, Rgb | DeviceRgb) else first)


def numbers(decoder: Decoder, clip: EncodedClip, kind: type, device: str = "cpu") -> list[int]:
    """Decode a clip and read its painted frame numbers."""
    return read(decoded(decoder, clip, kind, device))


def rgb(decoder: Decoder, clip: EncodedClip, device: str = "cpu") -> np.ndarray:
    """Decode a clip to RGB uint8 [3, T, H, W]; planes of a device are converted by the reference."""
    kind = next(kind for kind in (Rgb, DeviceRgb, DevicePlanes) if kind in decoder.outputs)
    found = arrays(decoded(decoder, clip, kind, device))
    return found[0] if len(found) == 1 else converted(found, clip)


def converted(planes: list[np.ndarray], clip: EncodedClip) -> np.ndarray:
    """Return RGB uint8 [3, T, H, W] of a clip's cropped planes by the reference conversion."""
    y, u, v = (torch.from_numpy(np.ascontiguousarray(one)) for one in planes)
    request, info = clip.request, clip.info
    return clip_to_rgb(ClipPlanes(y, u, v, request.flip, info.matrix, info.range), request.size).numpy()


def cut(planes: np.ndarray, box: Box, step: int) -> np.ndarray:
    """Crop luma (step 1) or chroma (step 2) planes [T, H, W] to a box."""
    rows = slice(box.y // step, (box.y + box.height) // step)
    return planes[:, rows, box.x // step : (box.x + box.width) // step]


def reference(video: Video, clip: EncodedClip) -> np.ndarray:
    """Return RGB uint8 [3, T, H, W] of a clip from ffmpeg's decoder and the reference conversion."""
    frames, box = clip.request.frames, clip.request.box
    return converted([cut(p[frames], box, step) for p, step in zip(video.planes, (1, 2, 2), strict=True)], clip)
