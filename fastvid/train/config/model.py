"""The configuration of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastvid.errors import UsageError
from fastvid.train.config.section import at_least


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train.

    Attributes:
        name: A name from `fastvid.models.zoo`, or ``module:callable``.
        num_classes: Width of the last layer; None uses the number of classes in the dataset.
        channels_last: Use the channels-last memory format for the model and its batches, equal up to rounding; None
            uses it on GPUs with `run.amp`, whose 16-bit convolutions would otherwise transpose every input.
        weights: File of initial weights, see `fastvid.models.weights`; None uses random initialization. Two-stream
            networks take one file for both streams, or SPATIAL,TEMPORAL.
        ghost_norm: Compute batch norm over groups of `data.group_size` clips instead of over a rank's micro-batch.
        compile: Run the model through ``torch.compile``; the first steps take longer.
        pipeline: Devices of one machine that a replica is spread over, see `fastvid.models.pipeline`. Start one rank
            per `pipeline` devices.
        pipeline_batches: Micro-batches in the pipeline; norm layers see one at a time.
        options: Keyword arguments of the model, for example ``{"dropout": 0.8}``; None keeps the model's default.
    """

    name: str
    num_classes: int | None = None
    channels_last: bool | None = None
    weights: str | None = None
    ghost_norm: bool = False
    compile: bool = False
    pipeline: int = 1
    pipeline_batches: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(1, self, "num_classes", "pipeline", "pipeline_batches")
        if self.pipeline > 1 and self.compile:
            raise UsageError(
                "model.compile cannot be combined with model.pipeline",
                hint="set model.compile=false or model.pipeline=1",
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """The options that are not None."""
        return {name: value for name, value in self.options.items() if value is not None}
