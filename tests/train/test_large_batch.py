"""The large-batch recipe, with all its parts, trains the same model in worlds of 1, 2, 3 and 5 ranks."""

import itertools
from typing import Any

import pytest
import torch

from fastvid.runtime.processes import World
from fastvid.train.loop.strategy import build_strategy
from tests.skips import soak_but
from tests.train import toy, toy_large

WORLDS = (2, 3, 5)


# What is trained together: a world and its scenarios. Some of it is needed by `make soak` only.
TOGETHER = {
    1: [toy_large.NAMES],
    2: [toy_large.NAMES],
    3: [("plain", "recipe"), ("norm", "ghost")],
    5: [("plain", "recipe", "norm", "ghost")],
}


class Outcomes(dict[tuple[int, str], dict[str, Any]]):
    """Results by world size and scenario, trained when they are asked for."""

    def __init__(self, folder):
        self.folder = folder

    def __missing__(self, wanted):
        world, name = wanted
        names = next(names for names in TOGETHER[world] if name in names)
        here = self.folder / f"world{world}-{names[0]}"
        here.mkdir()
        assert toy.spawn(world, here, *names, module="tests.train.toy_large") == [0] * world
        self |= {(world, one): torch.load(here / f"{one}-{world - 1}.pt") for one in names}
        return self[wanted]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return Outcomes(tmp_path_factory.mktemp("large"))


@pytest.mark.parametrize(
    ("world", "name"),
    soak_but(
        itertools.product(WORLDS, ["plain", "ghost", "recipe"]),
        *itertools.product([2], toy_large.NAMES),
        (3, "plain"),
        (3, "recipe"),
    ),
)
def test_weights_after_200_steps_do_not_depend_on_the_world(outcomes, name, world):
    one, other = outcomes[1, name], outcomes[world, name]
    assert one["samples"] == other["samples"] >= 200 * toy_large.BATCH
    # The compared values include the running statistics of ghost norms.
    assert toy.difference(one, other) < 1e-9
    assert one["lineage"] == other["lineage"]
    assert other["score"]["loss"] == pytest.approx(one["score"]["loss"], abs=1e-9)


@pytest.mark.parametrize("world", soak_but(WORLDS, 2))
def test_plain_batch_norm_depends_on_the_world(outcomes, world):
    assert toy.difference(outcomes[1, "norm"], outcomes[world, "norm"]) > 1e-4


def test_lamb_does_not_depend_on_the_world(outcomes):
    assert toy.difference(outcomes[1, "lamb"], outcomes[2, "lamb"]) < 1e-9


def test_micro_batches_do_not_split_groups(outcomes):
    for world in (1, 2):
        assert toy.difference(outcomes[1, "ghost"], outcomes[world, "micro"]) < 1e-9


@pytest.mark.parametrize("world", soak_but(WORLDS, 2, 3))
def test_ema_does_not_depend_on_the_world(outcomes, world):
    one, other = outcomes[1, "recipe"], outcomes[world, "recipe"]
    for name, value in one["average"].items():
        assert float((value - other["average"][name]).abs().max()) < 1e-9


def test_ema_is_evaluated(outcomes):
    one = outcomes[1, "recipe"]
    model = toy.net(norm=True)
    loader = toy.ToyLoader(World(), last="keep")
    losses = []
    for state in ({**one["weights"], **one["average"]}, one["weights"]):
        model.load_state_dict(state)
        losses.append(toy.evaluate(toy.toy_config(toy.ROOT), model, loader, toy.ALONE.device).loss)
    assert one["score"]["loss"] == pytest.approx(losses[0], abs=1e-9)
    assert abs(losses[0] - losses[1]) > 1e-4


def test_half_precision_gradients_are_close_to_full_precision(outcomes):
    apart = toy.difference(outcomes[2, "plain"], outcomes[2, "half"])
    # Half precision has 11 bits: the difference is not zero, but small.
    assert 1e-9 < apart < 0.05
    assert toy.difference(outcomes[1, "plain"], outcomes[1, "half"]) == 0


def test_the_large_batch_recipe_learns(outcomes):
    untrained = toy.score(toy.ALONE, bad=())
    for name in toy_large.NAMES:
        assert outcomes[1, name]["score"]["loss"] < 0.9 * untrained.loss, name


def test_bf16_gradients_are_refused_where_gloo_would_fail(tmp_path):
    made = toy.trainer(toy.toy_config(tmp_path), toy.ALONE)
    made.recorder.close()
    with toy.refused("which gloo cannot reduce"):
        build_strategy("ddp", toy.ALONE, {"gradients": "bf16"}).prepare(made.replica)
