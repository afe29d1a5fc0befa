"""The learning rate against tables worked out by hand."""

import pytest

from fastvid.errors import UsageError
from fastvid.train.config.config import OptimConfig
from fastvid.train.parts.optim import Schedule

# An epoch of 1,000 samples; base rate 0.02 at 128 clips, so 0.04 at 256. Warm-up of 2 epochs from a tenth of the rate,
# a quarter of the way is 0.004 + 0.036 / 4; then constant until epoch 5, a tenth until epoch 8, a hundredth afterwards.
STEP = {
    0: 0.004, 500: 0.013, 1000: 0.022, 1999: 0.039982, 2000: 0.04, 4999: 0.04, 5000: 0.004, 7999: 0.004, 8000: 0.0004,
    10_000: 0.0004, 99_999: 0.0004,
}  # fmt: skip
# 8,000 samples from 0.04 down to a tenth; cos(60 degrees) = 1/2 after a third of them.
COSINE = {
    0: 0.004, 2000: 0.04, 4000: 0.004 + 0.036 * (1 + 0.5**0.5) / 2, 6000: 0.022,
    8000: 0.004 + 0.036 * (1 - 0.5**0.5) / 2, 10_000: 0.004, 12_000: 0.004,
}  # fmt: skip


def optim(**changes: object) -> OptimConfig:
    values = {"base_lr": 0.02, "base_batch_size": 128, "warmup_epochs": 2.0, "milestones": (5.0, 8.0)} | changes
    return OptimConfig(**values)  # type: ignore[arg-type]


def schedule(config: OptimConfig) -> Schedule:
    return Schedule(config, epochs=10, samples_per_epoch=1000, global_batch_size=256)


@pytest.mark.parametrize(("changes", "table"), [({}, STEP), ({"decay": "cosine", "final": 0.1}, COSINE)])
def test_schedules_match_the_table(changes: dict[str, object], table: dict[int, float]) -> None:
    made = schedule(optim(**changes))
    assert {samples: made.lr(samples) for samples in table} == pytest.approx(table, rel=1e-12)


def test_constant_schedule_without_warmup() -> None:
    flat = schedule(optim(decay="constant", warmup_epochs=0.0))
    assert {flat.lr(samples) for samples in (0, 1, 5000, 99_999)} == {0.04}


def test_a_milestone_during_warmup_applies() -> None:
    early = schedule(optim(milestones=(1.0,)))
    assert early.lr(1000) == pytest.approx(0.0022, rel=1e-12)
    assert early.lr(2000) == pytest.approx(0.004, rel=1e-12)


def test_rate_scales_linearly_for_the_summit_run() -> None:
    # 0.02 at 128 clips gives 1.92 at 12,288.
    config = OptimConfig(base_lr=0.02, base_batch_size=128)
    large = Schedule(config, epochs=1, samples_per_epoch=234_619, global_batch_size=12_288)
    assert large.lr(0) == pytest.approx(1.92, rel=1e-12)


def test_warmup_longer_than_the_run_is_refused() -> None:
    with pytest.raises(UsageError, match="the run has 10 epochs"):
        schedule(optim(warmup_epochs=11.0))
