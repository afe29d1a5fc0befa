"""The training loop, independent of the strategy and of how clips are decoded.

`Stepper` is one step of a replica on a batch: forward and backward of micro-batches, clipping, update.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastvid.errors import FastvidError, StateError
from fastvid.load.batch.batch import Batch
from fastvid.models import ghost
from fastvid.runtime import faults
from fastvid.train.config.config import Config, to_json
from fastvid.train.loop.strategy import Strategy
from fastvid.train.parts.evaluate import Score, autocast, evaluate
from fastvid.train.parts.replica import Lineage, Loader, Replica, hash64
from fastvid.train.ranks import Interrupted, Member, StopSignal
from fastvid.train.records.checkpoint import Checkpoints
from fastvid.train.records.records import Exposure, Observers, Recorder, Stopwatch, Telemetry, console
from fastvid.train.tasks.task import CLIPS, LOSS, Phase, Sums


@dataclass(frozen=True)
class Stepper:
    """Runs training steps: forward and backward of a batch, optimizer step, synchronization."""

    config: Config
    member: Member
    strategy: Strategy
    exposure: Exposure | None = None

    def step(self, replica: Replica, batch: Batch) -> tuple[Sums, Tensor | None]:
        """Train a replica on this rank's share of a batch.

        The loss is the weighted sum of the clips' losses, times `Strategy.loss_scale`. Up to rounding it does
        not depend on how the share is split into micro-batches, unless a layer such as batch norm combines several
        clips.

        Returns the sums of the loss and of the task's numbers (`Task.measure`) over the share's scored clips, and the
        norm of the gradient before clipping, or None without clipping.
        """
        device, run, task = self.member.device, self.config.run, self.config.task
        group_size, clip_norm = self.config.data.group_size, self.config.optim.clip_norm
        # A function of the samples seen: a resumed run draws the same numbers, and checkpoints need no generator state.
        # 63 bits, because torch rejects larger seeds.
        _seed(hash64(f"{run.seed}:{replica.samples}:{self.member.world.rank}") >> 1, device)
        replica.set_lr()
        replica.optimizer.zero_grad(set_to_none=True)
        # Computed from `valid`, because `batch.weight` is rounded to float32.
        weight = batch.valid.double() / (batch.stop - batch.start)
        scale = self.strategy.loss_scale(weight.sum())
        weight = weight * scale
        batch = task.prepare(batch, Phase(training=True, seed=run.seed, group_size=group_size))
        if replica.freezer is not None:
            replica.freezer.freeze_norms(replica.samples)
        sums: Sums | None = None
        slices = micro_batches(batch.num_rows, run.micro_batch_size, group_size)
        # Autocast drops its cached half-precision weights when the outermost context ends. This outer context keeps
        # them for all micro-batches; it is disabled, because backward must not run under autocast.
        with torch.autocast(device.type, enabled=False):
            for rows in slices:
                part = batch.rows(rows)
                with _reducing(replica.forward, last=rows is slices[-1]):
                    with autocast(device, run.amp):
                        outputs = replica.forward(*task.inputs(part))
                    losses = task.losses(outputs, part)
                    loss = (losses * weight[rows].to(losses.dtype)).sum()
                    torch.autograd.backward(replica.scaler.scale(loss))
                    if self.exposure is not None and rows is slices[-1]:
                        self.exposure.backward_ended()
                found = task.sums(outputs, part, losses)
                sums = found if sums is None else sums + found
        assert sums is not None
        if replica.freezer is not None:
            replica.freezer.drop_gradients(replica.samples)
        norm = None
        if clip_norm is not None:
            replica.scaler.unscale_(replica.optimizer)
            norm = nn.utils.clip_grad_norm_(replica.model.parameters(), clip_norm)
        if self.config.model.ghost_norm:  # before the step, in which a strategy may send the statistics too
            ghost.update_running_stats(replica.model, scale * batch.num_rows / (batch.stop - batch.start))
        replica.scaler.step(replica.optimizer)
        replica.scaler.update()
        with self.exposure.waiting() if self.exposure is not None else contextlib.nullcontext():
            self.strategy.maybe_sync(replica, sums)
        replica.stepped(batch.stop - batch.start)
        if self.strategy.has_one_model():
            replica.update_average()
        return sums, norm


def _reducing(forward: Any, *, last: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context for a micro-batch in which DDP all-reduces gradients only if it is the `last` of a step."""
    wait: Callable[[], contextlib.AbstractContextManager[None]] | None = getattr(forward, "no_sync", None)
    return contextlib.nullcontext() if last or wait is None else wait()


def micro_batches(rows: int, limit: int | None, group: int = 1) -> list[slice]:
    """Return the fewest slices of at most `limit` rows that cover all rows; one slice if `limit` is None.

    A group of `group` consecutive rows is never split, so a slice has at least one group, even if `limit` is smaller.
    The sizes of the slices differ by at most one group.
    """
    groups, most = -(-rows // group), max(1, (limit or rows) // group)
    parts = -(-groups // most)
    ends = [min(rows, groups * part // parts * group) for part in range(parts + 1)]
    return [slice(first, end) for first, end in itertools.pairwise(ends)]


def _seed(seed: int, device: torch.device) -> None:
    """Seed the generators that dropout draws from.

    `torch.manual_seed` is not used: without CUDA it queues a call with a formatted stack trace each time and never
    frees it (torch 2.13).
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


log = logging.getLogger(__name__)

_LEAST_ROWS: Final = 50  # minimum rows of metrics of a run, if it has as many steps: enough to plot a curve
_LOG_EVERY_STEPS: Final = 20  # the default; each row costs a sum over the ranks and one line on the console


@dataclass(eq=False)
class Trainer:
    """Trains the replica of one process.

    `callbacks`: called after rows of metrics, evaluations and checkpoints. `lineage`: record of the samples that the
    weights were trained on. `clips_per_s`: mean clips per second since this process started, of all ranks together,
    without the time of evaluations and checkpoints.
    """

    config: Config
    member: Member
    replica: Replica
    loader: Loader
    strategy: Strategy
    _: KW_ONLY
    eval_data: Loader | None = None
    checkpoints: Checkpoints | None = None
    recorder: Recorder = field(default_factory=lambda: Recorder(None))
    callbacks: Observers = field(default_factory=lambda: Observers("run.callbacks"))
    stop: StopSignal = field(default_factory=StopSignal)

    def __post_init__(self) -> None:
        config, member, replica, loader = self.config, self.member, self.replica, self.loader
        self.lineage = Lineage()
        self._own = Lineage()  # samples of this rank since the lineage was last summed over the ranks
        self.score: Score | None = None
        self.clips_per_s = 0.0
        self._steps = self._logged = 0
        steps_per_epoch = replica.schedule.total // config.run.epochs // loader.global_batch_size
        rare = min(_LOG_EVERY_STEPS, steps_per_epoch, steps_per_epoch * config.run.epochs // _LEAST_ROWS)
        self._log_every = config.run.log_every_steps or max(1, rare)
        self._may_write = self._writes = member.leads and self.checkpoints is not None
        self._delivered = 0  # clips of the global batches since the last row of metrics
        self._seen = 0  # samples of all replicas after the last step
        self._position = loader.state_dict()
        self._sums: Sums | None = None  # sums over this rank's clips since the last row of metrics
        self._watch, self._whole = Stopwatch(), Stopwatch()
        self._exposure = Exposure(replica.model, member.device) if member.world.size > 1 else None
        self._telemetry = Telemetry(config, member, replica.model)
        self._saved_at = time.monotonic()
        self._saved_samples = 0

    def fit(self) -> bool:
        """Train until the last epoch is finished or a stop is requested.

        Returns whether the run is finished; False if it was stopped early, after saving a checkpoint.
        """
        devices = [self.member.device] if self.member.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            try:
                finished = self._fit()
            except Interrupted as error:
                log.info("%s", error)
                finished = False
        self.clips_per_s = self._whole.numbers()["clips_per_s"]
        return finished

    def _fit(self) -> bool:
        config, run = self.config, self.config.run
        stepper = Stepper(config, self.member, self.strategy, self._exposure)
        self.strategy.prepare(self.replica)
        if self.replica.average is not None and self.replica.samples == 0:
            self.replica.average.restart(self.replica.model)
        self._saved_at = time.monotonic()
        self._watch.start()
        self._whole.start()
        with contextlib.closing(self.strategy.rounds(self.replica, self.loader, run.epochs)) as rounds:
            for part in rounds:
                replica = part.replica
                self._seen, self._writes = replica.samples, self._may_write and part.kept
                for batch in self._watch.timed(part.batches):
                    agreed = self.strategy.agree(self._requests())
                    sums, norm = stepper.step(replica, batch)
                    self._sums = sums if self._sums is None else self._sums + sums
                    requests = agreed()
                    self._advance(replica, part.epoch, batch)
                    faults.reach("step")
                    if requests is None:
                        continue
                    if self._steps // self._log_every > self._logged:
                        self._log(replica, part.epoch, norm)
                    stopping, saving = requests.tolist()
                    if (stopping or saving) and self._save(replica) and stopping:
                        self._wait_for_checkpoint()
                        return False
                if self._save(replica) and self._steps // self._log_every > self._logged:
                    self._log(replica, part.epoch, None)  # replicas have not agreed since, as in short epochs
                done = part.epoch + 1
                due = part.kept and (done % run.eval_every_epochs == 0 or done == run.epochs)
                if self.eval_data is not None and due:
                    self._evaluate(replica, self.eval_data, part.epoch)
        self._wait_for_checkpoint()
        return True

    def state_dict(self, replica: Replica) -> dict[str, Any]:
        """Return the contents of a checkpoint, from which a run can resume with any world size."""
        return {
            "config": to_json(self.config),
            "replica": replica.state_dict(),
            "loader": self._position,
            "strategy": {"name": self.config.sync, "state": self.strategy.state_dict()},
            "lineage": self.lineage.state_dict(),
            "world_size": self.member.world.size,
            "step": self._steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint; call it before `fit`, with the same state on every rank."""
        for name, before, now in (
            ("sync", state["strategy"]["name"], self.config.sync),
            ("optim.name", state["config"]["optim"]["name"], self.config.optim.name),
        ):
            if before != now:
                raise StateError(
                    f"checkpoint was written with {name}={before}, this run uses {name}={now}",
                    hint="use another run.out; model.weights= takes the weights of the checkpoint's file",
                )
        self.replica.load_state_dict(state["replica"])
        if broken := self.replica.nonfinite():
            raise StateError(
                f"checkpoint after {self.replica.samples} samples: {_several(broken)} not finite",
                hint="remove this checkpoint; the run then resumes from the one before",
            )
        self.loader.load_state_dict(state["loader"])
        self.strategy.load_state_dict(state["strategy"]["state"])
        self.lineage.load_state_dict(state["lineage"])
        self._position = self.loader.state_dict()
        self._steps = int(state["step"])
        self._logged = self._steps // self._log_every
        self._saved_samples = self.replica.samples

    def _requests(self) -> Tensor:
        """Return this rank's requests, int64 [stop, save], 1 or 0. All ranks act on the sum, so after the same step."""
        late = time.monotonic() - self._saved_at >= self.config.run.checkpoint_every_s
        return torch.tensor([int(self.stop.requested), int(late and self._writes)])

    def _advance(self, replica: Replica, epoch: int, batch: Batch) -> None:
        """Count a finished step: the clips of the whole global batch, on each rank that shares it."""
        samples = batch.stop - batch.start
        replica.samples += samples
        self._own.add(epoch, *Lineage.of(batch))
        self._position = self.loader.state_dict()
        self._steps += 1
        self._delivered += samples
        # Other replicas may have trained in the meantime, on batches that this rank does not share.
        seen, self._seen = self._seen, replica.samples
        self._watch.count(replica.samples - seen)
        self._whole.count(replica.samples - seen)

    def _log(self, replica: Replica, epoch: int, norm: Tensor | None) -> None:
        assert self._sums is not None
        sums = self._sums.numbers(self.strategy.total(self._sums.vector.cpu())())
        numbers = self.config.task.row(sums)
        if norm is None:
            norm = nn.utils.get_total_norm([p.grad for p in replica.model.parameters() if p.grad is not None])
        speed, seconds = self._watch.numbers(), self._watch.seconds
        row = {
            "samples": replica.samples,
            "epoch": epoch,
            "step": self._steps,
            **numbers,
            "lr": replica.lr,
            "grad_norm": float(norm),
            "skipped": self._delivered - int(sums[CLIPS]),
            **speed,
            **self._telemetry.numbers(speed, seconds, None if self._exposure is None else self._exposure.take()),
            **self.strategy.numbers(),
        }
        self._sums = None
        self._delivered = 0
        self._watch.start()
        self._logged = self._steps // self._log_every
        self.recorder.write("train", **row)
        if self.member.leads:
            shown = [LOSS, *({self.config.task.metric} & numbers.keys() - {LOSS})]
            console(row, shown, replica.samples, replica.schedule.total, self._whole)
        if not math.isfinite(numbers[LOSS]):
            raise _diverged(f"loss is {numbers[LOSS]}", replica)
        with self._watch.paused(), self._whole.paused():
            self.callbacks.call("on_step", row)

    def _refuse_nonfinite(self, replica: Replica) -> None:
        """Raise if the loss since the last row of metrics, or a value of the replica, is not finite on any rank."""
        broken = replica.nonfinite()
        own = 0.0 if self._sums is None else float(self._sums[LOSS])
        loss, count = self.strategy.total(torch.tensor([own, len(broken)], dtype=torch.float64))().tolist()
        if not math.isfinite(loss):
            raise _diverged(f"loss is {loss}", replica)
        if count:
            raise _diverged(f"{_several(broken or ['weights of another rank'])} not finite", replica)

    def _evaluate(self, replica: Replica, loader: Loader, epoch: int) -> None:
        with self._watch.paused(), self._whole.paused() as began, replica.averaged():
            self.score = evaluate(
                self.config, replica.model, loader, self.member.device, lambda values: self.strategy.total(values)()
            )
            seconds = time.perf_counter() - began
        row = {"samples": replica.samples, "epoch": epoch, "seconds": seconds, **self.score.as_row()}
        self.recorder.write("eval", **row)
        if self.score.scored and not math.isfinite(self.score.loss):
            raise _diverged(f"loss of the evaluation is {self.score.loss}", replica)
        if self.member.leads:
            log.info("epoch %d evaluated in %.1f s: %s", epoch + 1, seconds, self.score)
            if self.checkpoints is not None:
                self.checkpoints.note(replica.samples, self.score.value)
        self.callbacks.call("on_eval", row)

    def _wait_for_checkpoint(self) -> None:
        """Wait until the pending checkpoint is written."""
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def _save(self, replica: Replica) -> bool:
        """Save a checkpoint if the model was trained since the last one.

        Returns False, without saving, if the ranks' models differ now and the strategy cannot make them equal.
        """
        with self._watch.paused(), self._whole.paused():
            if not self.strategy.settle(replica):
                return False
            replica.update_average()
            self._refuse_nonfinite(replica)
            self._gather_lineage()
            self._saved_at = time.monotonic()
            if self.checkpoints is not None and self._writes and replica.samples != self._saved_samples:
                self.checkpoints.begin(self.state_dict(replica), replica.samples)
            new, self._saved_samples = replica.samples != self._saved_samples, replica.samples
            if new:
                self.callbacks.call("on_checkpoint", replica.samples)
            return True

    def _gather_lineage(self) -> None:
        """Add the samples that the ranks trained on since the last call to the lineage."""
        own, self._own = self._own, Lineage()
        kept = self.strategy.lineage()
        if kept is not None:
            self.lineage.load_state_dict(kept)
        elif own.epochs:
            epochs, rows = sorted(own.epochs), torch.tensor(own.rows())
            for epoch, (samples, digest) in zip(epochs, self.strategy.total(rows)().tolist(), strict=True):
                self.lineage.add(epoch, samples, digest)


def _diverged(what: str, replica: Replica) -> FastvidError:
    return FastvidError(
        f"{what} after {replica.samples} samples",
        hint="lower optim.base_lr, lengthen optim.warmup_epochs or set optim.clip_norm; the same command resumes from "
        "the last checkpoint",
    )


def _several(names: Sequence[str]) -> str:
    """Return "NAME is" for one name, or "NAME and N more are"."""
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"
