"""The end of an epoch: what is left after its last batch is its evaluation, and a short epoch has a row of metrics."""

import pytest
import torch

from fastvid.runtime.processes import World
from fastvid.train.parts.replica import Loader
from fastvid.train.ranks import Member
from fastvid.train.records import records as metrics
from tests.load.fakes import FakeDataset
from tests.load.tools import make, rows
from tests.train import toy


@pytest.mark.parametrize("restart", [True, False])
def test_a_state_of_the_last_batch_resumes_in_its_epoch_without_batches(restart):
    loader = Loader(make(FakeDataset(32)))
    for _ in loader:
        state = loader.state_dict()
    expected = [rows(batch) for batch in loader]
    if restart:
        loader = Loader(make(FakeDataset(32)))
    loader.load_state_dict(state)
    assert (loader.epoch, loader.steps_left) == (0, 0)
    assert loader.state_dict() == state
    assert list(loader) == [], "the epoch is not trained on again, and is evaluated after this"
    assert (loader.epoch, loader.steps_left) == (1, 4)
    assert [rows(batch) for batch in loader] == expected


def test_an_epoch_of_few_steps_has_a_row_of_metrics_unless_set_otherwise(tmp_path):
    steps = toy.NUM_SAMPLES // toy.BATCH
    assert steps < 20
    for every, expected in ((None, [steps, 2 * steps]), (20, [20])):
        config = toy.toy_config(tmp_path / str(every), log_every_steps=every, epochs=2)
        member = Member(World(), torch.device("cpu"))
        assert toy.fit(toy.trainer(config, member), member)["over"]
        found = metrics.curve(metrics.read(tmp_path / str(every) / "metrics.jsonl"))
        assert [row["step"] for row in found] == expected
