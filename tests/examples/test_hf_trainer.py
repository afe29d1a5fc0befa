"""The Hugging Face Trainer example resumes in the middle and at the end of an epoch with the next batch."""

from __future__ import annotations

import zlib

import pytest
import torch
from torch import nn

from tests.examples import kit

# Ignore warnings from transformers and its dependencies.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 5  # per epoch


@pytest.fixture(scope="module")
def example():
    # Not at the top: the import takes seconds in each worker of pytest-xdist that collects this file.
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    return kit.load("hf_trainer")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return kit.dataset(tmp_path_factory.mktemp("hf"), 4 * STEPS + 2)


def train(example, url, out, stop=None):
    """Train from the newest checkpoint to step `stop` or to the end; return the inputs of each step and the weights."""
    given, trained = [], []

    class NotingClips(example.Clips):
        def __iter__(self):
            for inputs in super().__iter__():
                content = zlib.crc32(inputs["video"].numpy().tobytes())
                given.append((self.loader.epoch, self.loader.position, content))
                yield inputs

    class Noting(example.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            trained.append(given[-1])
            control.should_training_stop = state.global_step == stop

    torch.manual_seed(0)
    net = nn.Sequential(nn.AdaptiveAvgPool3d((2, 2, 2)), nn.Flatten(), nn.Linear(24, 2))
    arguments = {
        "num_train_epochs": 3,
        "save_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
    }
    options = {"spatial": example.fastvid.RandomCrop(32), "global_batch_size": 4, "decoder": "pyav", "num_threads": 1}
    out.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example, "Clips", NotingClips)
        trainer = example.make(url, str(out), net, arguments, **options)
    trainer.add_callback(Noting())
    trainer.go_on()
    return trained, torch.cat([value.flatten() for value in net.state_dict().values()])


def test_a_stopped_run_resumes_with_the_next_clip(example, url, tmp_path):
    whole, weights = train(example, url, tmp_path / "whole")
    places = [(epoch, 4 * step) for epoch in range(3) for step in range(1, STEPS + 1)]
    assert [batch[:2] for batch in whole] == places
    for stop in (3, STEPS, STEPS + 1, 2 * STEPS):
        out = tmp_path / f"stopped{stop}"
        first, _ = train(example, url, out, stop)
        rest, again = train(example, url, out)
        assert first + rest == whole, stop
        assert torch.equal(weights, again)
