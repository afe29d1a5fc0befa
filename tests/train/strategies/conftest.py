"""Runs all scenarios once, grouped by world, because a process takes seconds to start; also once for all workers of
pytest-xdist."""

import contextlib
import fcntl
import shutil
import signal
from typing import Any

import pytest
import torch

from tests.train import toy
from tests.train.strategies import lab, scenarios

BY_WORLD = {
    2: (
        "k1-sgd", "k1-momentum", "k1-adam", "k4", "k4-norm", "count-k11", "count-k5", "count-int8", "count-int4",
        "k4-nesterov", "post-local", "ddp-plain", "batch-ddp", "batch-kavg",
        "meter-ddp", "meter-k1", "meter-k5",
        *(f"{when}-{name}" for name in scenarios.STATEFUL for when in ("whole", "again")),
    ),
    3: ("k1-momentum", "k1-masked", "batch-ddp", "resumed", "wire"),
    4: ("noise-k3", "noise-k7", "noise-k11", "still-k11"),
}  # fmt: skip

Outcome = dict[str, Any]


class Outcomes:
    """Results of scenarios, one per rank. A world runs when one of its results is first requested."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, world, name):
        here = self.folder / str(world)
        with self._once(str(world) if world > 1 else f"1-{name}") as begin:
            if begin and world == 1:
                self._prepare(here, name)
                torch.save(scenarios.SCENARIOS[name](here / name, toy.ALONE), here / f"{name}-0.pt")
            elif begin:
                for name_of_world in BY_WORLD[world]:
                    self._prepare(here, name_of_world)
                assert toy.spawn(world, here, *BY_WORLD[world], module=scenarios.__name__) == [0] * world
        return lab.results(here, name, world)

    def killed(self):
        """Return the folder of a run of two ranks, one of which was killed."""
        here = self.folder / "killed"
        with self._once("killed") as begin:
            if begin:
                here.mkdir()
                codes = toy.spawn(2, here, "killed", module=scenarios.__name__)
                # The other rank detects that its peer is gone.
                assert codes[1] == -signal.SIGKILL
                assert codes[0] not in (0, -signal.SIGKILL)
        return here / "killed"

    @contextlib.contextmanager
    def _once(self, name):
        """Return whether this process must run it; wait while another process does."""
        done = self.folder / f"{name}.done"
        with open(self.folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield not done.exists()
            done.touch()

    def _prepare(self, here, name):
        here.mkdir(exist_ok=True)
        if name == "resumed":
            shutil.copytree(self.killed(), here / name)


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory, worker_id):
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "sync"
    folder.mkdir(exist_ok=True)
    return Outcomes(folder)


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread, as the commands do, because sums of floats depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
