"""How a run ends: at the end of an epoch, and with values that are not finite."""

import math
from collections.abc import Callable

import pytest
import torch

from fastvid.errors import FastvidError, StateError
from fastvid.train.parts.replica import Loader, Replica
from fastvid.train.records import records as metrics
from fastvid.train.records.checkpoint import decode
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


@pytest.mark.parametrize(("group", "ranges"), [(1, [(4, 15), (1, 3), (0, 32)]), (2, [(4, 14), (2, 20), (0, 32)])])
def test_a_range_that_no_whole_batches_fill_is_delivered_whole(group, ranges):
    loader = Loader(make(FakeDataset(32), group_size=group))
    sizes = set()
    for start, stop in ranges:
        loader.go(0, start, stop)
        batches = [batch.position.tolist() for batch in loader]
        assert [one for batch in batches for one in batch] == list(range(start, stop))
        assert all(len(batch) % group == 0 for batch in batches)
        sizes.update(map(len, batches))
    assert max(sizes) == 8


def test_a_run_of_few_steps_has_rows_for_a_curve_unless_set_otherwise(tmp_path):
    steps = toy.NUM_SAMPLES // toy.BATCH
    assert steps < 20
    for every, epochs, expected in ((None, 2, 1), (None, 10, 2), (20, 2, 20)):
        out = tmp_path / f"{every}-{epochs}"
        config = toy.toy_config(out, log_every_steps=every, epochs=epochs)
        member = toy.ALONE
        assert toy.fit(toy.trainer(config, member), member)["over"]
        found = metrics.curve(metrics.read(out / "metrics.jsonl"))
        assert [row["step"] for row in found] == list(range(expected, epochs * steps + 1, expected))


EPOCH = 11 * toy.BATCH
Poison = Callable[[Replica, torch.Tensor], None]


def weights(replica, _sums):
    next(iter(replica.model.parameters())).data.view(-1)[3] = math.inf


def moments(replica, _sums):
    next(iter(replica.optimizer.state.values()))["momentum_buffer"].view(-1)[3] = math.nan


def statistics(replica, _sums):
    replica.model[1].running_mean[0] = math.nan


def loss(_replica, sums):
    sums.vector[0] = math.nan


def evaluation(replica, _sums):
    replica.model[1].running_var.fill_(-1.0)


def poisoned(folder, poison, step, **run):
    """A run in which something happens after a step, and no row of metrics is due."""
    made = toy.trainer(toy.toy_config(folder, log_every_steps=1000, **run), toy.ALONE, norm=True)
    steps = 0

    def maybe_sync(replica, sums):
        nonlocal steps
        steps += 1
        if steps == step:
            poison(replica, sums)

    made.strategy.maybe_sync = maybe_sync
    return made


def kept(made):
    """The samples of the checkpoints, all of whose values are finite."""
    checkpoints = made.checkpoints
    checkpoints.wait()  # for one that a run was writing when it failed, as the interpreter does at exit
    for name in checkpoints.names():
        replica = decode(checkpoints.read(name).data, name)["replica"]
        momentum = [state["momentum_buffer"] for state in replica["optimizer"]["state"].values()]
        assert all(value.isfinite().all() for value in [*replica["model"].values(), *momentum])
    return [int(name.split("-")[1]) for name in checkpoints.names()]


@pytest.mark.parametrize("every", [0.0, 1000.0])
@pytest.mark.parametrize("poison", [weights, moments, statistics, loss])
def test_what_is_not_finite_is_never_saved_and_the_run_resumes_from_the_last_good_checkpoint(tmp_path, poison, every):
    step = 2 * 11 + 4
    made = poisoned(tmp_path, poison, step, checkpoint_every_s=every)
    with pytest.raises(FastvidError, match=r"not finite|loss is nan") as error:
        toy.fit(made, toy.ALONE)
    assert error.value.hint is not None
    last = (step - 1) * toy.BATCH if every == 0 else 2 * EPOCH
    assert kept(made)[-1] == last
    assert toy.fit(toy.trainer(toy.toy_config(tmp_path), toy.ALONE, norm=True), toy.ALONE)["over"]


def test_the_last_step_of_a_run_is_checked(tmp_path):
    made = poisoned(tmp_path, weights, toy.EPOCHS * 11)
    with pytest.raises(FastvidError, match="not finite"):
        toy.fit(made, toy.ALONE)
    assert kept(made)[-1] == (toy.EPOCHS - 1) * EPOCH


def test_a_loss_of_the_evaluation_that_is_not_finite_fails_the_run(tmp_path):
    made = poisoned(tmp_path, evaluation, toy.EPOCHS * 11)
    with pytest.raises(FastvidError, match="loss of the evaluation is nan after 440 samples"):
        toy.fit(made, toy.ALONE)
    assert not (tmp_path / "checkpoints" / "best.json").exists()


def test_a_buffer_that_is_infinite_on_purpose_stops_no_run(tmp_path):
    model = toy.net(norm=True)
    made = toy.trainer(toy.toy_config(tmp_path), toy.ALONE, norm=True)
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    made.replica = Replica(
        model, torch.optim.SGD([{"params": list(model.parameters()), "lr_mult": 1.0}]), made.replica.schedule
    )
    assert toy.fit(made, toy.ALONE)["over"]


def test_a_checkpoint_with_nan_is_refused_by_name(tmp_path):
    made = toy.trainer(toy.toy_config(tmp_path), toy.ALONE)
    made.recorder.close()
    state = made.state_dict(made.replica)
    state["replica"]["model"]["0.bias"][1] = math.nan
    with pytest.raises(StateError, match=r"checkpoint after 0 samples: 0\.bias is not finite"):
        made.load_state_dict(state)
