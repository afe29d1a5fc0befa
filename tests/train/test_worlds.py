"""The same run in worlds of 1, 2 and 3 processes, also stopped or killed and resumed."""

import shutil
import signal

import pytest
import torch
from torch.nn import functional

from fastvid.train.records import records as metrics
from fastvid.train.records.checkpoint import Checkpoints
from tests.train import toy

# Killed after 30 steps, with a checkpoint after each: the middle of the third epoch.
KILLED_AFTER = 30


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Results of all scenarios by world size and name, one entry per rank."""
    folder = tmp_path_factory.mktemp("worlds")
    codes = toy.spawn(1, folder, "resumed", FASTVID_FAULT=f"step:{KILLED_AFTER}")
    assert codes == [-signal.SIGKILL]
    found = {}
    for world, names in (
        (1, ("plain", "micro", "masked", "score")),
        (2, ("plain", "micro", "norm", "resumed", "stopped", "poisoned", "score")),
        (3, ("plain", "masked", "naive", "resumed", "score")),
    ):
        here = folder / f"world{world}"
        here.mkdir()
        if "resumed" in names:
            shutil.copytree(folder / "resumed", here / "resumed")
        if world == 1:
            for name in names:
                found[1, name] = [toy.scenario(name, here, toy.ALONE)]
            continue
        assert toy.spawn(world, here, *names) == [0] * world
        for name in names:
            found[world, name] = [torch.load(here / f"{name}-{rank}.pt") for rank in range(world)]
    return found | {"folder": folder}


def test_the_toy_learns(outcomes):
    # Otherwise equality of weights would prove little.
    untrained, trained = toy.score(toy.ALONE, bad=()), outcomes[1, "plain"][0]["score"]
    assert trained["loss"] < 0.6 * untrained.loss
    assert trained["top1_percent"] > 60


def test_weights_do_not_depend_on_the_world(outcomes):
    one = outcomes[1, "plain"][0]
    steps = one["samples"] // toy.BATCH
    assert steps >= 50
    # Two ranks have equal shares; of three ranks, one has 2 clips and two have 3.
    assert toy.difference(one, outcomes[2, "plain"][0]) < 1e-12
    assert toy.difference(one, outcomes[3, "plain"][0]) < 1e-9
    for world in (2, 3):
        for other in outcomes[world, "plain"]:
            assert toy.difference(outcomes[world, "plain"][0], other) == 0


def test_uneven_shares_without_weights_change_the_result(outcomes):
    # The mean of the ranks' means is a different gradient, so the test above can fail.
    assert toy.difference(outcomes[1, "plain"][0], outcomes[3, "naive"][0]) > 1e-4


def test_accumulation_gives_the_same_updates(outcomes):
    # At most 3 clips at once: 8 clips are 2 + 3 + 3 on one rank; a share of 4 is 2 + 2.
    for world in (1, 2):
        assert toy.difference(outcomes[1, "plain"][0], outcomes[world, "micro"][0]) < 1e-12


def test_masked_and_skipped_rows_do_not_affect_training_in_any_world(outcomes):
    one, three = outcomes[1, "masked"][0], outcomes[3, "masked"][0]
    assert one["samples"] == toy.EPOCHS * toy.NUM_SAMPLES
    assert toy.difference(one, three) < 1e-9
    assert one["lineage"] == three["lineage"]


def test_lineage_covers_every_sample_of_an_epoch_in_any_world(outcomes):
    one = outcomes[1, "plain"][0]["lineage"]
    for world in (2, 3):
        for rank in outcomes[world, "plain"]:
            assert rank["lineage"] == one
    assert [entry["samples"] for entry in one] == [88] * toy.EPOCHS
    # Different orders have different digests.
    assert len({entry["digest"] for entry in one}) == toy.EPOCHS


def test_all_ranks_fail_if_one_has_a_loss_that_is_not_finite(outcomes):
    for rank in outcomes[2, "poisoned"]:
        assert "loss is nan after 88 samples" in rank["error"]
    assert not Checkpoints(str(outcomes["folder"] / "world2" / "poisoned" / "checkpoints")).names()


def test_evaluation_counts_each_sample_once(outcomes):
    model = toy.net().eval()
    clips = torch.stack([toy.clip(sample) for sample in range(toy.NUM_SAMPLES)])
    labels = torch.arange(toy.NUM_SAMPLES) % toy.CLASSES
    with torch.no_grad():
        logits = model(clips)
    hits = int((logits.argmax(1) == labels).sum())
    loss = float(functional.cross_entropy(logits, labels))
    for world in (1, 2, 3):
        for rank in outcomes[world, "score"]:
            assert rank["score"]["scored"] == rank["score"]["total"] == toy.NUM_SAMPLES
            assert rank["score"]["top1_percent"] == pytest.approx(100 * hits / toy.NUM_SAMPLES, abs=1e-12)
            assert rank["score"]["loss"] == pytest.approx(loss, abs=1e-12)
            # Two samples fail to decode: they are missing, not replaced.
            assert rank["some"]["scored"] == toy.NUM_SAMPLES - 2
            assert rank["some"]["total"] == toy.NUM_SAMPLES


def test_running_statistics_are_the_mean_of_the_ranks(outcomes):
    first, second = outcomes[2, "norm"]
    assert toy.difference(first, second) == 0
    # With momentum 0.1, a statistic that a rank never updated would still be near its initial value.
    assert float(first["weights"]["1.running_mean"].abs().max()) > 0
    model = toy.newest(outcomes["folder"] / "world2" / "norm")["replica"]["model"]
    assert torch.equal(model["1.running_var"], first["weights"]["1.running_var"])
    assert first["score"] == second["score"]


@pytest.mark.parametrize("world", [2, 3])
def test_a_killed_run_resumed_in_another_world_equals_an_uninterrupted_run(outcomes, world):
    undisturbed, resumed = outcomes[1, "plain"][0], outcomes[world, "resumed"][0]
    assert resumed["samples"] == undisturbed["samples"]
    assert resumed["lineage"] == undisturbed["lineage"]
    assert toy.difference(undisturbed, resumed) < 1e-9
    assert resumed["score"]["loss"] == pytest.approx(undisturbed["score"]["loss"], abs=1e-9)
    folder = outcomes["folder"]
    whole = metrics.curve(metrics.read(folder / "world1" / "plain" / metrics.METRICS_FILE))
    pieces = metrics.read(folder / f"world{world}" / "resumed" / metrics.METRICS_FILE)
    starts = [(row["samples"], row["world_size"]) for row in pieces if row["kind"] == "start"]
    # The kill came before the checkpoint of this step was started, perhaps while the previous one was being written.
    again_from = starts[1][0] // toy.BATCH
    assert starts == [(0, 1), (again_from * toy.BATCH, world)]
    assert again_from in (KILLED_AFTER - 2, KILLED_AFTER - 1)
    again = metrics.curve(pieces)
    assert [row["samples"] for row in again] == [row["samples"] for row in whole]
    assert [row["lr"] for row in again] == [row["lr"] for row in whole]
    for number in ("loss", "grad_norm", "top1_percent"):
        assert [row[number] for row in again] == pytest.approx([row[number] for row in whole], abs=1e-9)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(outcomes):
    first, second = outcomes[2, "stopped"]
    assert first["over"] is second["over"] is False
    assert first["samples"] == second["samples"] == 7 * toy.BATCH
    state = toy.newest(outcomes["folder"] / "world2" / "stopped")
    assert state["replica"]["samples"] == 7 * toy.BATCH
    assert state["loader"]["position"] == 7 * toy.BATCH
