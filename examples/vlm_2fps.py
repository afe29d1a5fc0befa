"""Two frames a second of every video, at its own size, for a video-language model such as Qwen2.5-VL.

Every clip has the length and size of its video, so a batch is a list; the patches of all clips follow each other in one
tensor. Frames, sizes and order depend on facts and the seed alone: a run resumes exactly, on any number of ranks.

    python examples/vlm_2fps.py shards/mine
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import fastvid

PAIR, PATCH, MERGE = 2, 14, 2  # frames and pixels of a patch, and sides of the square of patches that make one token


def make(url: str, **options: Any) -> fastvid.ClipLoader:
    """Whole videos at 2 fps: 4 to 64 frames in pairs, at most 768 tokens each pair, sides that are multiples of 28."""
    standard: dict[str, Any] = {
        "frames": fastvid.AtFps(2, min_frames=4, max_frames=64, multiple=PAIR),
        "spatial": fastvid.Native(multiple=PATCH * MERGE, max_pixels=768 * (PATCH * MERGE) ** 2),
        "global_batch_size": 4,
        "collate": "list",
    }
    return fastvid.ClipLoader(fastvid.open(url), **standard | options)


def inputs(batch: fastvid.Batch) -> dict[str, torch.Tensor]:
    """Return what the model takes: patches of all clips [N, 3 * 2 * 14 * 14], the grid of each, and its seconds."""
    patches, grids = [], []
    for clip in batch.video:
        grid = clip.shape[1] // PAIR, clip.shape[2] // PATCH, clip.shape[3] // PATCH
        squares = clip.reshape(3, grid[0], PAIR, grid[1] // MERGE, MERGE, PATCH, grid[2] // MERGE, MERGE, PATCH)
        patches.append(squares.permute(1, 3, 6, 4, 7, 0, 2, 5, 8).reshape(-1, 3 * PAIR * PATCH * PATCH))
        grids.append(grid)
    seconds = (batch.seconds[:, 2] - batch.seconds[:, 0]).float()  # from one pair of frames to the next
    return {
        "pixel_values_videos": torch.cat(patches),
        "video_grid_thw": torch.tensor(grids),
        "second_per_grid_ts": seconds,
    }


def main(url: str) -> None:
    """Print the shapes of one epoch."""
    for batch in make(url):
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs(batch).items()}
        sys.stdout.write(f"{', '.join(batch.key)}: {shapes}\n")


if __name__ == "__main__":
    main(sys.argv[1])
