"""A loader reads its generation while commands change the dataset: the same clips, or an error that names a file."""

import pytest
import torch

from fastvid.errors import StorageError
from fastvid.format.dataset import Dataset
from fastvid.load.clips.crops import CenterCrop
from fastvid.load.clips.sampling import Segments
from fastvid.sharding.change.edit import remove_samples
from fastvid.sharding.change.history import collect_garbage
from fastvid.sharding.change.repack import compact_shards
from tests.datasets import make_clip, pack
from tests.load.loaders import clip_loader
from tests.load.tools import rows


def loader_of(dataset):
    options = {"frames": Segments(4), "spatial": CenterCrop(64), "global_batch_size": 4, "dtype": torch.uint8}
    return clip_loader(dataset, **options, shuffle=False, num_threads=1, prefetch=1, decoder="pyav")


@pytest.mark.parametrize("deletes", [False, True])
def test_clips_stay_those_of_the_generation_until_its_files_are_deleted(deletes, tmp_path):
    clips = [make_clip(tmp_path / f"{n}.mp4", frames=30 + n, size="160x128") for n in range(3)]
    samples = [[(f"clip{shard}{n}", clips[(shard + n) % 3], n % 2) for n in range(8)] for shard in range(6)]
    store = pack(tmp_path / "set", samples)
    expected = [row for batch in loader_of(Dataset(store.url)) for row in rows(batch)]
    loader, found = loader_of(Dataset(store.url)), []

    def read():
        for batch in loader:
            if not found:
                remove_samples(store, Dataset(store.url).keys.to_pylist()[::3])
                compact_shards(store)
                if deletes:
                    collect_garbage(store)
            found.extend(rows(batch))

    if deletes:
        with pytest.raises(StorageError, match=r"file does not exist.*data-00000\d"):
            read()
    else:
        read()
    assert found == expected[: len(found)]
    assert len(found) == len(expected) or deletes
