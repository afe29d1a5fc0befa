"""A run from beginning to end in one process, which may be one of many that torchrun started.

A run's folder:
    config.json     the configuration with everything resolved
    classes.json    names of the classes
    metrics.jsonl   one row every few steps and every evaluation, see `fastvid.train.records.metrics`
    checkpoints/    see `fastvid.train.records.checkpoint`
    summary.json    where the run stands when the process ends
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastvid.errors import UsageError
from fastvid.train.config.config import Config, flatten, to_json
from fastvid.train.loop.loop import Trainer
from fastvid.train.loop.strategy import build_strategy, strategy_of
from fastvid.train.ranks.elastic import Member, StopSignal, broadcast_bytes, highest, join
from fastvid.train.records.checkpoint import Checkpoints, decode
from fastvid.train.records.metrics import METRICS_FILE, Recorder, clock
from fastvid.train.records.tensorboard import Board
from fastvid.train.run import assemble

log = logging.getLogger(__name__)

CHECKPOINTS: Final = "checkpoints"
CONFIG_FILE: Final = "config.json"
SUMMARY_FILE: Final = "summary.json"
CLASSES_FILE: Final = "classes.json"

# Exit code of a run that a signal ended, as shells report it: 128 + the signal's number.
_SIGNALLED: Final = 128


def start(configs: Sequence[Config]) -> int:
    """Train the models of a recipe as their strategy says: one by `train`, or all of them in another way.

    Raises:
        UsageError: The strategy cannot train with these settings, or not several models.
        FastvidError: As in `train`.
    """
    for config in configs:
        strategy = strategy_of(config)
    return strategy.start(configs, train)


def train(config: Config) -> int:
    """Trains a configuration, from its newest checkpoint where there is one.

    Returns:
        0 when the run is over; 128 and the signal's number when a signal ended it early, with a checkpoint.

    Raises:
        FastvidError: What is wrong with data, model or options is raised before the first step.
    """
    # Everything that holds the process group is gone with the call's return, before the group is left.
    with join(config.run.timeout_s) as member:
        return _train(config, member)


def _train(config: Config, member: Member) -> int:
    with contextlib.ExitStack() as open_until_the_end:
        stop = open_until_the_end.enter_context(StopSignal())
        quiet(member)
        began = time.monotonic()
        out = Path(config.run.out)
        checkpoints = checkpoints_of(config)
        if member.leads:
            checkpoints.sweep()
        name, state = read_state(checkpoints, member)
        if state is not None and not config.run.resume:
            raise UsageError("run.out holds a run already", file=out, hint="choose another one, or run.resume=true")
        config, train_set, eval_set = assemble.datasets(config, state, member)
        strategy = build_strategy(config.sync, member, config.sync_options)
        loader = assemble.train_loader(config, train_set, strategy.reader)
        open_until_the_end.callback(loader.clips.close)
        replica = assemble.make_replica(config, assemble.samples_per_epoch(loader.clips), member)
        board = Board(out / "tensorboard") if config.run.tensorboard and member.leads else None
        recorder = Recorder(out / METRICS_FILE if member.leads else None, board)
        open_until_the_end.callback(recorder.close)
        trainer = Trainer(
            config,
            member,
            replica,
            loader,
            strategy,
            eval_data=None if eval_set is None else assemble.eval_data(config, eval_set, strategy.reader),
            checkpoints=checkpoints,
            recorder=recorder,
            stop=stop,
        )
        if state is not None:
            trainer.load_state_dict(state)
        elif member.leads:
            assemble.load_initial_weights(config, replica.model)
        if member.leads:
            (out / CONFIG_FILE).write_text(json.dumps(to_json(config), indent=1) + "\n")
            (out / CLASSES_FILE).write_text(json.dumps(list(train_set.classes)) + "\n")
            _announce(trainer, loader.clips, name, state)
        over = trainer.fit()
        if member.leads:
            summary = _summary(trainer, over=over, seconds=time.monotonic() - began)
            (out / SUMMARY_FILE).write_text(json.dumps(summary, indent=1) + "\n")
            print(json.dumps(summary), flush=True)  # noqa: T201 - the run's result, for whoever started it
        # Another rank's signal ends this one too.
        return 0 if over else _SIGNALLED + (stop.received or signal.SIGTERM)


def read_state(
    checkpoints: Checkpoints, member: Member, name: str | None = None
) -> tuple[str | None, dict[str, Any] | None]:
    """Name and content of a checkpoint, the same on every rank. The rank that has the newest reads it: where each node
    has its own folder, rank 0 may be on a node that has just joined.

    Args:
        checkpoints: Of the run.
        member: This process.
        name: Which one; "best" has the highest score, None takes the newest that is whole.

    Returns:
        None and None when there is none.

    Raises:
        StateError: There are checkpoints, and none of them is whole.
        FormatError: The named one is not whole.
        UsageError: No checkpoint was noted as the best.
    """
    found, owner = None, highest(checkpoints.newest_samples(), member) if name is None else 0
    if member.world.rank == owner:
        found = checkpoints.newest() if name is None else checkpoints.read(_named(checkpoints, name))
    which = broadcast_bytes(found.name.encode() if found else None, member, owner)
    data = broadcast_bytes(found.data if found else None, member, owner)
    if which is None or data is None:
        return None, None
    return which.decode(), decode(data, which.decode())


def checkpoints_of(config: Config) -> Checkpoints:
    """The checkpoints of a run."""
    run = config.run
    return Checkpoints(run.checkpoints or str(Path(run.out) / CHECKPOINTS), run.keep_checkpoints)


def known_classes(config: Config) -> list[str]:
    """Names of the classes as the run noted them; none where it did not."""
    try:
        return [str(name) for name in json.loads((Path(config.run.out) / CLASSES_FILE).read_text())]
    except (OSError, ValueError):
        return []


def _named(checkpoints: Checkpoints, name: str) -> str:
    if name != "best":
        return name
    best = checkpoints.best()
    if best is None:
        raise UsageError("no checkpoint was noted as the best", file=checkpoints.storage.url)
    return best[0]


def _announce(trainer: Trainer, clips: Any, name: str | None, state: Mapping[str, Any] | None) -> None:
    """What a run starts from, as a metrics row and for people."""
    config, member, replica = trainer.config, trainer.member, trainer.replica
    if state is not None:
        now, before = flatten(to_json(config)), flatten(state["config"])
        for key in sorted(now.keys() | before.keys()):
            if now.get(key) != before.get(key):
                log.warning("%s is %r, in the checkpoint it was %r", key, now.get(key), before.get(key))
        log.info("going on from %s, written by %d ranks", name, state["world_size"])
    trainer.recorder.write(
        "start", samples=replica.samples, world_size=member.world.size, checkpoint=name, device=str(member.device)
    )
    batches = clips.batches
    log.info(
        "%s: %s clips an epoch in %s steps of %s, shuffled over all; %d epochs; %d ranks on %s, sync=%s, decoder %s",
        config.model.name,
        f"{replica.schedule.total // config.run.epochs:,}",
        f"{batches.count(0):,}",
        f"{batches.size:,}",
        config.run.epochs,
        member.world.size,
        member.device.type,
        config.sync,
        clips.backend.name,
    )


def _summary(trainer: Trainer, *, over: bool, seconds: float) -> dict[str, Any]:
    """Where a run stands. Seconds are those of this process alone."""
    replica = trainer.replica
    summary = {
        "over": over,
        "samples": replica.samples,
        "world_size": trainer.member.world.size,
        "seconds": seconds,
        "clips_per_s": trainer.clips_per_s,
        "eval": None if trainer.score is None else trainer.score.as_row(),
        "lineage": trainer.lineage.state_dict(),
    }
    log.info("%s after %s clips, %s", "run is over" if over else "stopped", f"{replica.samples:,}", clock(seconds))
    return summary


def quiet(member: Member) -> None:
    """Only rank 0 tells of progress; warnings come from all."""
    if not member.leads:
        logging.getLogger("fastvid").setLevel(logging.WARNING)
