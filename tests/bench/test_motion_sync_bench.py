"""The lineage that a run of the benchmark must have."""

from pathlib import Path
from types import SimpleNamespace

from bench.strategies.motion_sync import lineage_of
from fastvid.format.dataset import Dataset
from fastvid.load.clips.crops import CenterCrop
from fastvid.load.clips.sampling import Segments
from fastvid.train.parts.replica import Lineage
from tests import datasets
from tests.load.loaders import clip_loader


def test_the_lineage_computed_from_keys_equals_that_of_a_loader(tmp_path: Path) -> None:
    clip = datasets.make_clip(tmp_path / "clip.mp4", frames=4, size="32x32")
    datasets.pack(tmp_path / "shards", [[(f"clip{n}", clip, 0) for n in range(7)]])
    data = SimpleNamespace(path=str(tmp_path / "shards"), split=None, global_batch_size=3)
    config = SimpleNamespace(data=data, run=SimpleNamespace(epochs=2, seed=5))
    loader = clip_loader(
        Dataset(data.path), frames=Segments(1), spatial=CenterCrop(32), global_batch_size=3, num_threads=1, seed=5,
        rank=0, world_size=1,
    )  # fmt: skip
    seen = Lineage()
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            seen.add(epoch, *Lineage.of(batch))
    loader.close()
    assert lineage_of(config) == seen.state_dict()
    config.run.seed = 6
    assert [entry["samples"] for entry in lineage_of(config)] == [6, 6]
    assert lineage_of(config) != seen.state_dict()
