"""Writes metrics for TensorBoard."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from fastvid.errors import MissingDependency


class Board:
    """Writes rows of metrics as TensorBoard scalars, with the samples seen as the step.

    Args:
        folder: Folder of the event files.

    Raises:
        MissingDependency: If TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as error:
            raise MissingDependency(
                "run.tensorboard is true, but TensorBoard cannot be imported",
                hint="run `pip install 'fastvid-toolkit[tensorboard]'`, or set run.tensorboard=false",
            ) from error
        self._writer: Any = writer(str(folder), flush_secs=10)

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Write the numbers of a row; a row without ``samples`` is ignored."""
        samples = values.get("samples")
        if samples is None:
            return
        for name, value in values.items():
            if name != "samples" and isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(f"{kind}/{name}", value, samples)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
