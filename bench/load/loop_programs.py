"""The same small job as a user would write it with five libraries: batches of eight random frames and a random crop.

Each program yields uint8 [B, 3, 8, 224, 224] of an epoch of `_EPOCH` clips; few videos are repeated. It
is as short as is natural: what it leaves out, such as a seed that does not depend on the workers, users leave out too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

_EPOCH: Final = 1 << 14


def clip_loader(url: str, _files: list[str], batch: int, workers: int) -> Iterator[Tensor]:
    """fastvid's ClipLoader."""
    import fastvid

    dataset = fastvid.Mixture([fastvid.open(url)], weights=[1.0], num_samples=_EPOCH)
    for clips in fastvid.ClipLoader(
        dataset,
        frames=fastvid.Segments(8),
        spatial=fastvid.RandomCrop(224),
        global_batch_size=batch,
        output=fastvid.Output(dtype=torch.uint8),
        workers=fastvid.Workers(num_threads=workers),
    ):
        yield clips.video


def clip_dataset(url: str, _files: list[str], batch: int, workers: int) -> Iterator[Tensor]:
    """fastvid's ClipDataset and ExactSampler in torch's DataLoader."""
    import fastvid

    dataset = fastvid.Mixture([fastvid.open(url)], weights=[1.0], num_samples=_EPOCH)
    output = fastvid.Output(dtype=torch.uint8)
    clips = fastvid.ClipDataset(dataset, frames=fastvid.Segments(8), spatial=fastvid.RandomCrop(224), output=output)
    sampler = fastvid.ExactSampler(clips, global_batch_size=batch)
    for rows in torch.utils.data.DataLoader(clips, batch_size=batch, sampler=sampler, num_workers=workers):
        yield rows.video


def torchcodec(_url: str, files: list[str], batch: int, workers: int) -> Iterator[Tensor]:
    """torchcodec in torch's DataLoader."""
    from torchcodec.decoders import VideoDecoder

    def collate(paths: list[str]) -> Tensor:
        clips = []
        for path in paths:
            decoder = VideoDecoder(path, seek_mode="approximate", num_ffmpeg_threads=1)
            count = len(decoder)
            frames = decoder.get_frames_at([i * count // 8 + np.random.randint(count // 8) for i in range(8)])
            y, x = (np.random.randint(side - 223) for side in frames.data.shape[2:])
            clips.append(frames.data[:, :, y : y + 224, x : x + 224].transpose(0, 1))
        return torch.stack(clips)

    many = files * (_EPOCH // len(files))
    loader = torch.utils.data.DataLoader(many, batch, shuffle=True, num_workers=workers, collate_fn=collate)  # type: ignore[arg-type]
    yield from loader


def hf_datasets(_url: str, files: list[str], batch: int, workers: int) -> Iterator[Tensor]:
    """Hugging Face datasets, which decodes with torchcodec."""
    import datasets

    def clip(rows: dict[str, Any]) -> dict[str, Any]:
        clips = []
        for decoder in rows["video"]:
            count = len(decoder)
            frames = decoder.get_frames_at([i * count // 8 + np.random.randint(count // 8) for i in range(8)]).data
            y, x = (np.random.randint(side - 223) for side in frames.shape[2:])
            clips.append(frames[:, :, y : y + 224, x : x + 224].transpose(0, 1))
        return {"clip": clips}

    rows = datasets.Dataset.from_dict({"video": files * (_EPOCH // len(files))}).cast_column("video", datasets.Video())
    loader = torch.utils.data.DataLoader(rows.with_transform(clip), batch, shuffle=True, num_workers=workers)  # type: ignore[arg-type]
    for one in loader:
        yield one["clip"]


def spdl(_url: str, files: list[str], batch: int, workers: int) -> Iterator[Tensor]:
    """SPDL's pipeline of threads."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    def clip(path: str) -> Tensor:
        packets = spdl.io.demux_video(path)
        count = len(packets)
        wanted = [i * count // 8 + np.random.randint(count // 8) for i in range(8)]
        frames = spdl.io.sample_decode_video(packets, wanted, filter_desc="format=pix_fmts=rgb24")
        array = torch.from_numpy(spdl.io.to_numpy(spdl.io.convert_frames(frames)))
        y, x = (np.random.randint(side - 223) for side in array.shape[1:3])
        return array[:, y : y + 224, x : x + 224].permute(3, 0, 1, 2)

    order = (files[place % len(files)] for place in np.random.permutation(_EPOCH).tolist())
    builder = PipelineBuilder().add_source(order).pipe(clip, concurrency=workers).aggregate(batch).pipe(torch.stack)
    pipeline = builder.add_sink(2).build(num_threads=workers)
    with pipeline.auto_stop():
        yield from pipeline


Program = Callable[[str, list[str], int, int], Iterator[Tensor]]

PROGRAMS: Final[Mapping[str, Program]] = {
    "ClipLoader": clip_loader,
    "ClipDataset in a DataLoader": clip_dataset,
    "torchcodec in a DataLoader": torchcodec,
    "HF datasets": hf_datasets,
    "SPDL": spdl,
}
