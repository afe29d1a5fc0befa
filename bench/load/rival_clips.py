"""Clips of whole videos as the users of other libraries decode them: random frames and a random crop of 224 pixels."""

from __future__ import annotations

import io
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from bench.common.linked import video_decoder
from bench.decode.kept import OpenDecoders

CROP: Final = 224
FRAMES: Final = 8


def torchcodec_frames(source: Any, seek: str = "approximate", kept: int = 0) -> Tensor:
    """Decode random frames and a random crop of a video by torchcodec, uint8 [3, T, H, W].

    `source`: path or bytes.
    """
    decoder = _torchcodec_decoders(seek, kept)[source]
    count = decoder.metadata.num_frames
    frames = decoder.get_frames_at(choose(count)).data
    y, x = corner(frames.shape[2], frames.shape[3])
    return frames[:, :, y : y + CROP, x : x + CROP].transpose(0, 1).contiguous()


@cache
def _torchcodec_decoders(seek: str, kept: int) -> OpenDecoders:
    decoder = video_decoder()
    return OpenDecoders(lambda source: decoder(source, seek_mode=seek, num_ffmpeg_threads=1), kept)


def decord_frames(source: Any, kept: int = 0) -> Tensor:
    """Decode random frames and a random crop of a video by decord, uint8 [3, T, H, W]."""
    reader = _decord_readers(kept)[source]
    frames = reader.get_batch(choose(len(reader))).asnumpy()
    y, x = corner(frames.shape[1], frames.shape[2])
    return torch.from_numpy(np.ascontiguousarray(frames[:, y : y + CROP, x : x + CROP].transpose(3, 0, 1, 2)))


@cache
def _decord_readers(kept: int) -> OpenDecoders:
    import decord

    def opened(source: Any) -> Any:
        where = io.BytesIO(source) if isinstance(source, bytes) else source
        return decord.VideoReader(where, ctx=decord.cpu(0), num_threads=1)

    return OpenDecoders(opened, kept)


def spdl_frames(spdl: Any, file: str) -> Tensor:
    """Decode random frames of a video by SPDL, cropped at random by FFmpeg's filter, uint8 [3, T, H, W]."""
    packets = spdl.demux_video(file)
    # SPDL rejects repeated frames and would drop the clip.
    wanted, places = np.unique(choose(len(packets)), return_inverse=True)
    y, x = corner(packets.height, packets.width)
    steps = f"crop={CROP}:{CROP}:{x}:{y},format=pix_fmts=rgb24"
    # Decodes each needed GOP up to the wanted frame, as SPDL's documentation recommends.
    frames = spdl.sample_decode_video(packets, wanted.tolist(), filter_desc=steps)
    array = torch.from_numpy(spdl.to_numpy(spdl.convert_frames(frames)))
    return array[torch.from_numpy(places)].permute(3, 0, 1, 2).contiguous()


def choose(count: int) -> list[int]:
    """Return one random frame of each of FRAMES segments."""
    edges = np.linspace(0, count, FRAMES + 1)
    places = edges[:-1] + np.random.random(FRAMES) * np.diff(edges)
    return [min(int(place), count - 1) for place in places]


def corner(height: int, width: int) -> tuple[int, int]:
    """Return the row and column of a random crop."""
    return np.random.randint(0, height - CROP + 1), np.random.randint(0, width - CROP + 1)
