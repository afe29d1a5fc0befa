"""The Hugging Face Trainer example resumes in the middle and at the end of an epoch with the next batch."""

import subprocess
import sys
import zlib

import pytest
import torch

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
    """Train from the newest checkpoint to step `stop` or to the end; return the clips of each step and the weights."""
    trained = []

    class Stop(example.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == stop

    class Noting(example.ClipTrainer):
        def __init__(self, *args, callbacks, **options):
            super().__init__(*args, callbacks=[*callbacks, Stop()], **options)

        def compute_loss(self, model, batch, **options):
            content = zlib.crc32(batch["video"].numpy().tobytes())
            trained.append((batch["epoch"], batch["stop"], content))
            return super().compute_loss(model, batch, **options)

    arguments = {"num_train_epochs": 3, "save_steps": 1, "disable_tqdm": True}
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example, "ClipTrainer", Noting)
        trainer = example.main(url, str(out), crop=32, lr_scheduler_type="constant", **arguments)
    return trained, torch.cat([value.flatten() for value in trainer.model.state_dict().values()])


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


@pytest.mark.soak
def test_the_documented_command_trains_one_model_on_all_ranks(example, url, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "examples/hf_trainer.py", url, str(tmp_path / "out")], cwd=kit.REPOSITORY,
        env=kit.environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Rank 0 alone reports: each of two Trainers that know of no other rank would.
    assert done.stdout.count("train_runtime") == 1
