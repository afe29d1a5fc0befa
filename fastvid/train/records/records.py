"""Metrics of a run: a JSON lines file with units in the keys, a console line, and calls of loggers and callbacks.

Speed metrics are throughput per GPU, MFU (model FLOPs utilization), memory, and exposed communication: the seconds that
a rank waits for communication not hidden by computation. They are measured as follows: backward computes the gradient
of the model's first parameter last, so the time from then to the end of backward is spent waiting for the all-reduce of
the remaining buckets. Strategies that average weights wait in `maybe_sync`.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from fastvid.errors import FastvidError, StorageError, UsageError
from fastvid.models.zoo import UNCOUNTED, model_cost
from fastvid.runtime.names import check_keywords, import_name
from fastvid.runtime.values import duration, json_text
from fastvid.train.config.config import Config
from fastvid.train.ranks import Member


class Exposure:
    """Sums up exposed communication time, see the module; on CUDA measured with events, which `take` reads."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._idle: list[Any] = []  # events that were read and can be recorded again
        self._pairs: list[tuple[Any, Any]] = []  # start and end of each wait: events on CUDA, else seconds
        self._computed: Any = None  # when the gradient of the model's first parameter was computed
        first = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
        if first is not None:
            first.register_post_accumulate_grad_hook(self._mark)  # type: ignore[no-untyped-call]

    def _mark(self, _parameter: Tensor) -> None:
        self._computed = self._now()

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        # A step takes several events, and creating one costs the driver more than recording it.
        event = self._idle.pop() if self._idle else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def backward_ended(self) -> None:
        """Record the end of a backward whose gradients were reduced."""
        if self._computed is not None:
            self._pairs.append((self._computed, self._now()))
            self._computed = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the block as exposed communication."""
        began = self._now()
        yield
        self._pairs.append((began, self._now()))

    def take(self) -> float:
        """Return the seconds of exposed communication since the last call; waits for the device."""
        pairs, self._pairs = self._pairs, []
        if not self._cuda:
            return float(sum(ended - began for began, ended in pairs))
        seconds = 0.0
        for began, ended in pairs:
            ended.synchronize()
            seconds += began.elapsed_time(ended) / 1000.0
            self._idle += (began, ended)
        return seconds


# Dense 16-bit matrix throughput in TFLOP/s by what a word of the device's name ends in, first match wins. From NVIDIA's
# data sheets, whose figures with sparsity are twice as high.
PEAKS: Final = (
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("A10", 125.0),
    ("V100", 125.0),
    ("T4", 65.0),
)


class Telemetry:
    """Computes the speed and memory columns of a row of metrics of kind "train"; rank 0 counts the model's FLOPs."""

    def __init__(self, config: Config, member: Member, model: nn.Module) -> None:
        self.world_size, self.device = member.world.size, member.device
        self.flops_per_clip = clip_flops(config, model) if member.leads else None
        self.peak = config.run.peak_tflops
        if not self.peak and self.device.type == "cuda" and config.run.amp != "off":
            self.peak = peak_tflops(torch.cuda.get_device_name(self.device))

    def numbers(self, speed: Mapping[str, float], seconds: float, exposed_s: float | None) -> dict[str, Any]:
        """Return the columns for the steps since the last row.

        `speed`: from `Stopwatch.numbers`. `seconds`: duration of these steps. `exposed_s`: seconds of exposed
        communication of this rank; None if it is not measured.
        """
        each = speed["clips_per_s"] / self.world_size
        row: dict[str, Any] = {
            "clips_per_s_per_gpu": each,
            "memory_gib": memory_bytes(self.device) / 2**30,
        }
        if exposed_s is not None:
            row["exposed_percent"] = 100 * exposed_s / max(seconds, 1e-9)
        if self.flops_per_clip is not None:
            tflops = each * self.flops_per_clip / 1e12
            row["tflops_per_gpu"] = tflops
            if self.peak:
                row["mfu_percent"] = 100 * tflops / self.peak
        return row


def peak_tflops(device: str) -> float | None:
    """Return the 16-bit peak of a device by its name, such as "NVIDIA L4"; None if it is not known."""
    return next((peak for part, peak in PEAKS if re.search(rf"{part}\b", device)), None)


def clip_flops(config: Config, model: nn.Module) -> int | None:
    """Return the FLOPs of forward and backward of one clip; None if they cannot be counted."""
    shape = config.data.clip_shape
    try:
        return None if shape is None else model_cost(model, shape).training_flops
    except UNCOUNTED:
        return None


def memory_bytes(device: torch.device) -> int:
    """Return the peak number of bytes allocated on a CUDA device; on the CPU, the process's peak resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # ru_maxrss is in kilobytes on Linux, in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What loggers and callbacks are told about a run at its start.

    Attributes:
        out: Folder of the run.
        config: The configuration with everything resolved, as JSON values.
        rank: Number of this process.
        world_size: Number of processes.
        samples: Number of samples that the model has been trained on: 0, or more if the run resumes.
        model: The model, without the wrapper of a strategy.
    """

    out: Path
    config: Mapping[str, Any]
    rank: int
    world_size: int
    samples: int
    model: nn.Module


class Logger:
    """Base class of loggers, which send a run's records to another place; called on rank 0 only. Override its methods.

    ``run.loggers=my_code:MyLogger`` names a class, or a function that returns an object; it is called without
    arguments. A dry run creates the object, but does not call `start`. An exception in a method ends the run.
    """

    def start(self, run: RunInfo) -> None:
        """Begin; called once, before the first row."""

    def write(self, kind: str, row: Mapping[str, Any]) -> None:
        """Record a row of metrics.

        Args:
            kind: "start", "train" or "eval", see `fastvid.train.records.records.Recorder`.
            row: JSON values by name; numbers that are not finite are None. ``samples`` is the number of samples seen;
                after a resume, the same numbers may come again.
        """

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """End; called once.

        Args:
            summary: What summary.json contains; None if an error ends the run.
        """


class Callback:
    """Base class of callbacks: methods that are called at fixed points of a run, on every rank. Override them.

    ``run.callbacks=my_code:MyCallback`` names a class, or a function that returns an object; it is called without
    arguments. A dry run creates the object, but calls no method. An exception in a method on any rank ends the run. To
    do something once, keep ``run.rank`` in `on_start` and do it on rank 0 only. A method may use collective operations
    only if every rank does, and never with a strategy whose ranks share no batches.
    """

    def on_start(self, run: RunInfo) -> None:
        """Called before the first step."""

    def on_step(self, row: Mapping[str, Any]) -> None:
        """Called every `run.log_every_steps` steps, with the row of metrics; loss and metrics are over all ranks."""

    def on_eval(self, row: Mapping[str, Any]) -> None:
        """Called after an evaluation, with its row of metrics; the model has its trained weights, not the average."""

    def on_checkpoint(self, samples: int) -> None:
        """Called when the model after `samples` samples is complete on every rank; rank 0 then writes it."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Called after the last step, even if a signal stopped the run, but not if an error ends it."""


class Observers:
    """The loggers or callbacks of a run, by the name in the setting (``run.loggers``), called in order."""

    def __init__(self, setting: str, members: Mapping[str, object] | None = None) -> None:
        self.setting, self.members = setting, dict(members or {})

    def call(self, method: str, *arguments: Any) -> None:
        """Call the method of this name on each of them."""
        for name, member in self.members.items():
            try:
                getattr(member, method)(*arguments)
            except FastvidError:
                raise
            except Exception as error:
                raise FastvidError(
                    f"{self.setting} {name!r} failed in {method}: {type(error).__name__}: {error}",
                    hint=f"correct it, or remove it from {self.setting}; the same command then resumes the run",
                ) from error


def observers(setting: str, names: Sequence[str], base: type, known: Mapping[str, str]) -> Observers:
    """Create loggers or callbacks from their names in a setting.

    `base`: class that they must be derived from. `known`: import strings of the names that come with fastvid.
    """
    members = {}
    for name in names:
        make = import_name(setting, known.get(name, name))
        if not callable(make):
            raise UsageError(f"{setting} {name!r} is not callable", hint="name a class, or a function that returns it")
        check_keywords(setting, name, make, ())
        members[name] = make()
        if not isinstance(members[name], base):
            raise UsageError(
                f"{setting} {name!r} is a {type(members[name]).__name__}",
                hint=f"derive its class from fastvid.train.{base.__name__}",
            )
    return Observers(setting, members)


log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
_PERCENT = "_percent"

Item = TypeVar("Item")


class Recorder:
    """Appends rows to a file, each as a JSON object on one line, flushed immediately.

    Rows have ``kind``: "train" every few steps, "eval", and "start" whenever a process group starts or resumes. A
    resumed run repeats the work after the last checkpoint, so its rows occur twice; `curve` drops the earlier ones.

    `path`: the file; None records nothing. `loggers`: they also receive the rows.
    """

    def __init__(self, path: Path | None, loggers: Observers | None = None) -> None:
        self._loggers, self._path = loggers, path
        self._file: io.FileIO | None = None
        self._pending: list[str] = []
        self._failed = False
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
            self._file = io.FileIO(path, "a")
        except OSError as error:
            raise StorageError(f"metrics cannot be written: {error.strerror}", file=path) from error
        if torn:
            # The last writer was killed in the middle of a line; `read` skips the incomplete line.
            self._pending.append("")

    def write(self, kind: str, **values: Any) -> None:
        """Append a row. Non-finite values (nan, inf) become null, which every JSON reader accepts.

        A row that cannot be written, for example to a full disk, does not end the run: a warning is logged, and the
        row is written before the next one.
        """
        if self._file is None:
            return
        text = json_text({"kind": kind, **values})
        self._pending.append(text)
        self._append(self._file)
        if self._loggers is not None:
            self._loggers.call("write", kind, json.loads(text))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._append(self._file)
            self._file.close()
            if self._pending:
                log.warning("%s: %d rows of metrics are lost", self._path, len(self._pending))

    def _append(self, file: io.FileIO) -> None:
        """Write the pending rows; if that fails, remove what was written and keep them for the next call."""
        rest = memoryview("".join(f"{line}\n" for line in self._pending).encode())
        end = file.seek(0, io.SEEK_END)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                file.truncate(end)
            if not self._failed:
                log.warning("%s: metrics cannot be written, retrying with each row: %s", self._path, error.strerror)
            self._failed = True
        else:
            self._pending.clear()
            self._failed = False


def read(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a metrics file, in the order written; skip a line that a killed process left incomplete."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and "kind" in row:
            rows.append(row)
    return rows


def curve(rows: list[dict[str, Any]], kind: str = "train") -> list[dict[str, Any]]:
    """Return the rows of one kind, sorted by samples, without those of steps that a resumed run repeated."""
    kept: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row["kind"] == "start":
            kept = {samples: earlier for samples, earlier in kept.items() if samples <= row["samples"]}
        elif row["kind"] == kind:
            kept[row["samples"]] = row
    return [kept[samples] for samples in sorted(kept)]


class Stopwatch:
    """Measures the speed of a range of steps and the time spent waiting for batches.

    `wait_s`: seconds spent waiting for batches.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start a new range of steps."""
        self._began = time.perf_counter()
        self.clips = self.steps = 0
        self.wait_s = 0.0

    def count(self, clips: int) -> None:
        """Count a finished step of so many clips."""
        self.clips += clips
        self.steps += 1

    def timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield the same batches, measuring the time spent waiting for each."""
        iterator = iter(batches)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.wait_s += time.perf_counter() - asked
            yield batch
            # Drop the reference right after the step, so that the memory can be reused.
            del batch

    @contextlib.contextmanager
    def paused(self) -> Iterator[float]:
        """Exclude the time of the block, for example an evaluation; yields its start time."""
        began = time.perf_counter()
        yield began
        self._began += time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """Seconds since `start`, excluding pauses."""
        return time.perf_counter() - self._began

    def numbers(self) -> dict[str, float]:
        """Return the speed since `start`."""
        seconds = max(self.seconds, 1e-9)
        return {
            "clips_per_s": self.clips / seconds,
            "step_ms": 1000 * seconds / max(1, self.steps),
            "wait_percent": 100 * self.wait_s / seconds,
        }


def console(row: dict[str, Any], shown: Iterable[str], done: int, total: int, watch: Stopwatch) -> None:
    """Log a line for a "train" row: samples `done` of `total`, the columns `shown`, speed, and time left."""
    left = (total - done) * watch.seconds / max(1, watch.clips)
    log.info(
        "%s/%s clips  %s  lr %.4g  %.1f clips/s  wait %.0f %%  left %s",
        f"{done:,}",
        f"{total:,}",
        "  ".join(shown_number(name, row[name]) for name in shown),
        row["lr"],
        row["clips_per_s"],
        row["wait_percent"],
        duration(left),
    )


def shown_number(name: str, value: float) -> str:
    """Format a metric with its name, whose unit may be its last word: ``top1 93.75 %``, ``rmse 0.1234``."""
    if name.endswith(_PERCENT):
        return f"{name.removesuffix(_PERCENT)} {value:.2f} %"
    return f"{name} {value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{name} {value:.4g}"
