"""Run trained models on the held-out clips, with frames in order and shuffled in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fastvid.decode.access import VideoDataset
from fastvid.demo.report import Strip
from fastvid.load.clips.augment import CenterCrop
from fastvid.load.clips.sampling import Segments
from fastvid.load.loader import ClipLoader
from fastvid.models import zoo
from fastvid.train.config import recipes
from fastvid.train.records import checkpoint

_BATCH = 32


@dataclass(frozen=True, slots=True, eq=False)
class DemoEvaluation:
    """Predictions of the trained models."""

    shuffled_top1: float  # top-1 accuracy in percent of the first model on clips whose frames are shuffled in time
    strips: tuple[Strip, ...]


@torch.no_grad()
def examine(
    dataset: VideoDataset,
    folders: Mapping[str, Path],
    *,
    recipe: str,
    changes: Mapping[str, Sequence[str]],
    strips: int,
) -> DemoEvaluation:
    """Run trained models on the held-out clips.

    `dataset`: the held-out samples. `folders`: run folder of each model; the first model is also run on shuffled
    frames.
    """
    models = {name: _load(folder, recipe, changes[name], len(dataset.classes)) for name, folder in folders.items()}
    config = recipes.load(recipe).data
    crop = next(t for t in config.eval_spatial if isinstance(t, CenterCrop))
    loader = ClipLoader(
        dataset,
        frames=Segments(config.num_frames, jitter=False),
        spatial=crop,
        global_batch_size=min(_BATCH, len(dataset)),
        decoder="pyav",
        shuffle=False,
        last="keep",
        rank=0,
        world_size=1,
    )
    shuffle = torch.Generator().manual_seed(0)
    hits, total, shown = 0, 0, []
    # Positions spread over the split, with different textures and directions.
    examples = {round((number + 0.5) * len(dataset) / strips) + number for number in range(strips)}
    for batch in loader:
        order = torch.stack([torch.randperm(batch.video.shape[2], generator=shuffle) for _ in range(batch.num_rows)])
        shuffled = torch.stack([clip[:, when] for clip, when in zip(batch.video, order, strict=True)])
        first = next(iter(models.values()))
        hits += int((first(shuffled).argmax(1) == batch.label).sum())
        total += batch.num_rows
        guesses = {name: model(batch.video).argmax(1) for name, model in models.items()}
        for row, sample in enumerate(batch.sample.tolist()):
            if sample in examples:
                shown.append(_strip(dataset, batch.key[row], batch.frame_index[row], guesses, row, crop))
    loader.close()
    return DemoEvaluation(100.0 * hits / total, tuple(shown))


def _load(folder: Path, recipe: str, changes: Sequence[str], num_classes: int) -> nn.Module:
    config = recipes.load(recipe, changes)
    model = zoo.build(config.model.name, num_classes, config.data.num_frames, **config.model.arguments)
    found = checkpoint.Checkpoints(str(folder / "checkpoints")).newest()
    assert found is not None, "a finished run has a checkpoint"
    model.load_state_dict(checkpoint.decode(found.data, found.name)["replica"]["model"])
    return model.eval()


def _strip(
    dataset: VideoDataset, key: str, frames: Tensor, guesses: Mapping[str, Tensor], row: int, crop: CenterCrop
) -> Strip:
    names = dataset.classes
    data = dataset[key].frames(frames.tolist()).data
    height, width = crop.output_of(*data.shape[1:3])
    top, left = (data.shape[1] - height) // 2, (data.shape[2] - width) // 2
    truth = names[int(dataset.labels[dataset.find(key)])]
    predicted = {name: names[int(guess[row])] for name, guess in guesses.items()}
    return Strip(np.ascontiguousarray(data[:, top : top + height, left : left + width]), truth, predicted)
