"""The Lightning example resumes in the middle and at the end of an epoch with the next batch."""

import pytest
import torch

from tests.examples import kit

# Ignore warnings from Lightning and its dependencies.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 5  # per epoch


@pytest.fixture(scope="module")
def example():
    # Not at the top: the import takes seconds in each worker of pytest-xdist that collects this file.
    pytest.importorskip("lightning", reason="lightning is not installed")
    return kit.load("lightning_trainer")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return kit.dataset(tmp_path_factory.mktemp("lightning"), 4 * STEPS + 2)


def train(example, url, out, **limits):
    """Train from the newest checkpoint; return the keys of each step and the weights."""
    keys = []

    class Noting(example.Classifier):
        def training_step(self, batch, number):
            keys.append((batch.epoch, batch.key))
            return super().training_step(batch, number)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example, "Classifier", Noting)
        model = example.main(url, str(out), crop=32, accelerator="cpu", devices=1, **quiet, **limits)
    return keys, torch.cat([value.flatten() for value in model.state_dict().values()])


def test_a_stopped_run_resumes_with_the_next_clip(example, url, tmp_path):
    whole, weights = train(example, url, tmp_path / "whole", max_epochs=3)
    assert len(whole) == 3 * STEPS
    for epoch in range(3):
        seen = [key for number, keys in whole for key in keys if number == epoch]
        assert len(seen) == len(set(seen)) == 4 * STEPS
    for stop in (3, STEPS, STEPS + 1, 2 * STEPS):
        out = tmp_path / f"stopped{stop}"
        first, _ = train(example, url, out, max_steps=stop)
        rest, again = train(example, url, out, max_epochs=3)
        assert first + rest == whole, stop
        assert torch.equal(weights, again)
