"""The example of torchdata's StatefulDataLoader goes on exactly where its state was taken."""

from __future__ import annotations

import importlib.util

import pytest

from tests.datasets import REPOSITORY, make_clip, pack

pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("stateful", REPOSITORY / "examples" / "stateful_dataloader.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_resumed_stateful_dataloader_gives_the_rest_and_nothing_else(example, tmp_path):
    data = make_clip(tmp_path / "clip.mp4", frames=20)
    pack(tmp_path / "set", [[(f"clip{n}", data, n % 2) for n in range(20)]])
    options = {"spatial": example.fastvid.RandomCrop(32), "global_batch_size": 4, "decoder": "pyav", "num_threads": 1}

    def keys(loader):
        return [batch.key for batch in loader]

    whole = keys(example.make(str(tmp_path / "set"), **options))
    assert len(whole) == 5
    for taken in range(1, 5):
        loader = example.make(str(tmp_path / "set"), **options)
        iterator = iter(loader)
        first = [next(iterator).key for _ in range(taken)]
        state = loader.state_dict()
        del iterator
        resumed = example.make(str(tmp_path / "set"), **options)
        resumed.load_state_dict(state)
        assert first + keys(resumed) == whole
