"""Writes metrics for TensorBoard.

Sends metrics to Weights & Biases.
"""

from __future__ import annotations

import importlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastvid.errors import MissingDependency
from fastvid.runtime.values import json_text
from fastvid.storage import LocalStorage
from fastvid.train.records.records import Logger, RunInfo


class TensorBoard(Logger):
    """Writes rows as TensorBoard scalars to tensorboard/ in the run's folder, with the samples seen as the step."""

    def __init__(self) -> None:
        try:
            self._make: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as error:
            raise MissingDependency(
                "run.loggers has 'tensorboard', but TensorBoard cannot be imported",
                hint="run `pip install 'fastvid-toolkit[tensorboard]'`, or remove it from run.loggers",
            ) from error
        self._writer: Any = None

    def start(self, run: RunInfo) -> None:
        self._writer = self._make(str(run.out / "tensorboard"), flush_secs=10)

    def write(self, kind: str, row: Mapping[str, Any]) -> None:
        """Write the numbers of a row; a row without ``samples`` is ignored."""
        samples = row.get("samples")
        if samples is None:
            return
        for name, value in row.items():
            if name != "samples" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(f"{kind}/{name}", value, samples)

    def finish(self, summary: Mapping[str, Any] | None) -> None:  # noqa: ARG002
        """Flush and close."""
        self._writer.close()


RUN_FILE: Final = "wandb.json"
"""File in the run's folder with the identity of its wandb run, which a resumed run continues."""


class Wandb(Logger):
    """Logs the configuration, the rows of metrics and the summary to a run of wandb.

    wandb's own variables say where: WANDB_PROJECT (by default "fastvid"), WANDB_ENTITY, WANDB_MODE and others. Each
    number is ``KIND/NAME`` over ``samples``. A resumed run continues the same wandb run.

    Raises:
        MissingDependency: If wandb is not installed.
    """

    def __init__(self) -> None:
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise MissingDependency(
                "run.loggers has 'wandb', but wandb cannot be imported",
                hint="run `pip install 'fastvid-toolkit[wandb]'`, or remove it from run.loggers",
            ) from error
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        settings = self._wandb.Settings()
        self._run = self._wandb.init(
            id=_identity(run.out),
            resume="allow",
            dir=str(run.out),
            project=settings.project or "fastvid",
            name=settings.run_name or run.out.name,
            config=dict(run.config),
        )
        # Not wandb's step, which must not decrease, as it does when a resumed run repeats work.
        self._run.define_metric("samples")
        self._run.define_metric("*", step_metric="samples")

    def write(self, kind: str, row: Mapping[str, Any]) -> None:
        """Log the numbers of a row; a row without ``samples`` is ignored."""
        if "samples" not in row:
            return
        numbers = {
            f"{kind}/{name}": value
            for name, value in row.items()
            if name != "samples" and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        self._run.log({"samples": row["samples"], **numbers})

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self._run.summary.update({name: summary[name] for name in summary if name != "lineage"})
        self._run.finish(exit_code=1 if summary is None else 0)


def _identity(out: Path) -> str:
    """Return the identity of the wandb run of a folder, made at the first start."""
    path = out / RUN_FILE
    try:
        return str(json.loads(path.read_text())["id"])
    except (OSError, ValueError, KeyError):
        identity = secrets.token_hex(8)
        LocalStorage(out).write(RUN_FILE, f"{json_text({'id': identity})}\n".encode())
        return identity
