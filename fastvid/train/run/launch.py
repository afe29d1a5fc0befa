"""A run from start to finish in one process, which may be one of many started by torchrun.

A run's folder:
    config.json     the configuration, with generations and number of classes filled in
    classes.json    names of the outputs: classes, or columns
    metrics.jsonl   one row every few steps and every evaluation, see `fastvid.train.records.records`
    checkpoints/    see `fastvid.train.records.checkpoint`
    summary.json    samples, speed and score when the process ended
    .lock           exists while the run writes here
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from fastvid.errors import FastvidError, JobError, StorageError, UsageError
from fastvid.runtime.processes import available_cores, lock_file
from fastvid.runtime.values import duration, json_text, listing, things
from fastvid.storage import LocalStorage
from fastvid.train.config.config import Config, differing, flatten, to_json
from fastvid.train.loop.loop import Trainer
from fastvid.train.loop.strategy import Strategy, build_strategy, strategy_of
from fastvid.train.parts.evaluate import Score
from fastvid.train.ranks import Member, StopSignal, broadcast_bytes, join
from fastvid.train.records.records import METRICS_FILE, Observers, Recorder, RunInfo
from fastvid.train.run import assemble
from fastvid.train.run.assemble import CLASSES_FILE, Run, checkpoints_of, quiet
from fastvid.train.tasks.task import Task

log = logging.getLogger(__name__)

CONFIG_FILE: Final = "config.json"
_STARTS: Final = "config-*.json"  # the configuration of each start
_TORCHRUN: Final = "TORCHELASTIC_RUN_ID"  # a variable that torchrun sets
SUMMARY_FILE: Final = Strategy.record
LOCK_FILE: Final = ".lock"

_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})

# Exit code of a run stopped by a signal, as shells report it: 128 + the signal's number.
_SIGNALLED: Final = 128


def start(configs: Sequence[Config], *, as_json: bool = False) -> int:
    """Train the models of a recipe with `Strategy.start`, print the summary that it wrote, and return the exit code."""
    given = os.environ.get("OMP_NUM_THREADS")
    # By default torch uses all cores in each rank, and under torchrun one: use this rank's share instead.
    if given is None or (given == "1" and _TORCHRUN in os.environ):
        torch.set_num_threads(available_cores())
    for config in configs:
        strategy = strategy_of(config)
    code = strategy.start(configs, train)
    out = Path(configs[0].run.out)
    if is_first() and (out / strategy.record).exists():
        found = json.loads((out / strategy.record).read_bytes())
        print(json_text(found) if as_json else listing(found), flush=True)  # noqa: T201
        if not as_json and strategy.record == SUMMARY_FILE:  # a sweep has neither curves nor checkpoints
            print(f"next: `fastvid report {out}`, `fastvid weights {out} --out FILE`")  # noqa: T201
    return code


def rehearse(configs: Sequence[Config], world: int, *, as_json: bool) -> int:
    """Do a dry run on every rank, because nodes may see different files; rank 0 prints its results."""
    from fastvid.train.run import dry_run

    for found in dry_run.check(configs, max(1, world)):
        if is_first():
            print(json_text(found, indent=1) if as_json else listing(found))  # noqa: T201
    return 0


def is_first() -> bool:
    """Return whether this process is rank 0, which prints for all ranks."""
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended; the same on every rank, except for the exit code.

    Attributes:
        finished: Whether all epochs are done; False if a signal stopped the run early, with a checkpoint.
        exit_code: 0 if the run is finished, else 128 + the signal's number.
        score: Score of the last evaluation of this process; None without one.
        summary: What summary.json contains: samples, seconds, clips per second, score and lineage.
        model: The trained model, in this process's memory.
    """

    finished: bool
    exit_code: int
    score: Score | None
    summary: Mapping[str, Any]
    model: nn.Module


def fit(config: Config, *, model: assemble.ModelSource | None = None, task: Task | None = None) -> Result:
    """Train a model from Python, in this process or, under torchrun, on every rank that calls this.

    It checks, resumes, evaluates and writes what ``fastvid train`` does for a recipe.

    Args:
        config: Configuration of the run.
        model: A model that is trained in place, or a class or function that returns one, called with `model.options`
            and with ``num_classes`` and ``num_frames`` if it accepts them; None builds the model of `model.name`.
        task: What is learnt; None uses the task of `config`.

    Raises:
        UsageError: If the strategy does not train one model in the training loop.
        FastvidError: As in `train`.
    """
    if task is not None:
        config = replace(config, task=task)
    kind = strategy_of(config)
    if kind.start.__func__ is not Strategy.start.__func__:  # type: ignore[attr-defined]
        raise UsageError(
            f"fit runs the training loop, but sync={config.sync} replaces it",
            hint="use another sync, or a recipe and `fastvid train`",
        )
    with join(config.run.timeout_s) as member:
        return run_as(config, member, model)


def train(config: Config) -> int:
    """Train one model, from its newest checkpoint if there is one.

    Returns 0 if the run is finished; 128 + the signal's number if a signal stopped it early, with a checkpoint.
    """
    # A separate function, so that all references to the process group are gone before it is destroyed.
    with join(config.run.timeout_s) as member:
        return run_as(config, member).exit_code


def run_as(config: Config, member: Member, make: assemble.ModelSource | None = None) -> Result:
    with contextlib.ExitStack() as open_until_the_end:
        stop = open_until_the_end.enter_context(StopSignal())
        quiet(member)
        began = time.monotonic()
        out = Path(config.run.out)
        if member.leads:
            open_until_the_end.enter_context(only_run(out))
        checkpoints = checkpoints_of(config)
        assemble.check_device(config, member.device)
        strategy = build_strategy(config.sync, member, config.sync_options, timeout_s=config.run.timeout_s)
        run = Run.of(config, member, strategy.reader, make)
        config, replica, loggers, callbacks = run.config, run.replica, run.loggers, run.callbacks
        open_until_the_end.callback(run.loader.clips.close)
        recorder = Recorder(out / METRICS_FILE if member.leads else None, loggers)
        open_until_the_end.callback(recorder.close)
        trainer = Trainer(
            config,
            member,
            replica,
            run.loader,
            strategy,
            eval_data=run.eval_data,
            checkpoints=checkpoints,
            recorder=recorder,
            callbacks=callbacks,
            stop=stop,
        )
        if run.state is not None:
            trainer.load_state_dict(run.state)
        if (before := _finished(run, member)) is not None:
            log.info("nothing is left to train: raise run.epochs, or choose another run.out to train anew")
            return Result(True, 0, None, before, replica.model)
        if member.leads:
            checkpoints.prepare()
        world = member.world
        info = RunInfo(out, to_json(config), world.rank, world.size, replica.samples, replica.model)
        loggers.call("start", info)
        open_until_the_end.push(lambda kind, *_: _abandon(loggers) if kind else None)
        if member.leads:
            starts = len(list(out.glob(_STARTS)))
            for name in (CONFIG_FILE, _STARTS.replace("*", f"{starts + 1:03}")):
                _write(out / name, json_text(to_json(config), indent=1))
            _write(out / CLASSES_FILE, json_text(config.task.names(run.train_set, config.data)))
            _announce(trainer, run)
        callbacks.call("on_start", info)
        finished = trainer.fit()
        summary = _summary(trainer, finished=finished, seconds=time.monotonic() - began)
        callbacks.call("on_end", summary)
        if member.leads:
            _write(out / SUMMARY_FILE, json_text(summary, indent=1))
            loggers.call("finish", summary)
        # A signal to another rank stops this one too.
        code = 0 if finished else _SIGNALLED + (stop.received or signal.SIGTERM)
        return Result(finished, code, trainer.score, summary, replica.model)


def _abandon(loggers: Observers) -> None:
    """Tell the loggers that an error ends the run; ignore a logger's own errors, so that the first one is reported."""
    with contextlib.suppress(FastvidError):
        loggers.call("finish", None)


@contextlib.contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Lock the folder of a run, so that two runs never write there at once."""
    try:
        descriptor = lock_file(out / LOCK_FILE, wait=False)
    except BlockingIOError as error:
        raise JobError(
            "another run is writing here", file=out, hint="wait until it has ended, or choose another run.out"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise StorageError(f"run.out cannot be written: {error.strerror}", file=out) from error
        log.warning("the file system of %s has no locks: nothing prevents a second run there", out)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (out / LOCK_FILE).unlink()
        os.close(descriptor)


def _write(path: Path, text: str) -> None:
    """Write a line of text atomically; raise StorageError if that fails, for example on a full disk."""
    LocalStorage(path.parent).write(path.name, f"{text}\n".encode())


def _finished(run: Run, member: Member) -> dict[str, Any] | None:
    """Return the recorded summary of a run if it is complete: nothing is left to train or evaluate; else None."""
    if run.state is None or run.replica.samples < run.replica.schedule.total:
        return None
    path = Path(run.config.run.out) / SUMMARY_FILE
    found = broadcast_bytes(path.read_bytes() if member.leads and path.exists() else None, member)
    summary: Any = None
    with contextlib.suppress(ValueError):  # a damaged summary is written anew
        summary = json.loads(found or b"{}")
    if not isinstance(summary, dict) or not summary.get("over") or summary.get("samples") != run.replica.samples:
        return None
    if member.leads:
        _log_changes(run.config, run.state)
    return summary


def _log_changes(config: Config, state: Mapping[str, Any]) -> None:
    """Warn of settings that differ from those in a checkpoint."""
    now, before = flatten(to_json(config)), flatten(state["config"])
    for key in differing([now, before]):
        log.warning("%s is %r, but was %r in the checkpoint", key, now.get(key), before.get(key))


def _announce(trainer: Trainer, run: Run) -> None:
    """Log the start of a run, and record it as a metrics row."""
    config, member, replica, state = trainer.config, trainer.member, trainer.replica, run.state
    if state is not None:
        _log_changes(config, state)
        log.info("resuming from %s, written by %s", run.checkpoint, things(state["world_size"], "rank"))
    trainer.recorder.write(
        "start",
        samples=replica.samples,
        samples_per_epoch=replica.schedule.total // config.run.epochs,
        world_size=member.world.size,
        checkpoint=run.checkpoint,
        device=str(member.device),
        metric=config.task.metric,
        higher_is_better=config.task.higher_is_better,
    )
    batches = run.loader.clips.batches
    log.info(
        "%s: %s clips per epoch in %s of %s; %s; %s on %s, sync=%s, decoder %s",
        config.model.name,
        f"{replica.schedule.total // config.run.epochs:,}",
        things(batches.count(0), "step"),
        f"{batches.size:,}",
        things(config.run.epochs, "epoch"),
        things(member.world.size, "rank"),
        member.device.type,
        config.sync,
        run.loader.clips.backend.name,
    )


def _summary(trainer: Trainer, *, finished: bool, seconds: float) -> dict[str, Any]:
    """Return the contents of summary.json; `seconds` since this process started the run, without earlier starts."""
    replica = trainer.replica
    summary = {
        "over": finished,
        "samples": replica.samples,
        "world_size": trainer.member.world.size,
        "seconds": seconds,
        "clips_per_s": trainer.clips_per_s,
        "eval": None if trainer.score is None else trainer.score.as_row(),
        "lineage": trainer.lineage.state_dict(),
    }
    state = "run finished" if finished else "run stopped"
    log.info("%s after %s clips, %s", state, f"{replica.samples:,}", duration(seconds))
    return summary
