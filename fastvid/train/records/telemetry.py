"""Numbers about a run's speed: per GPU, against the device's peak, lost to communication, and memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from fastvid.models.cost import model_cost
from fastvid.train.config.config import Config
from fastvid.train.ranks.elastic import Member

# Dense 16-bit matrix throughput in TFLOP/s by the device's name, the first that it contains (NVIDIA data sheets; with
# sparsity they print twice as much).
PEAKS: Final = (
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("A10", 125.0),
    ("V100", 125.0),
    ("T4", 65.0),
)


def peak_tflops(device: torch.device, amp: str) -> float | None:
    """Peak of a device under mixed precision; None where it is not known, or without mixed precision."""
    if device.type != "cuda" or amp == "off":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS if part in name), None)


@dataclass(frozen=True)
class Telemetry:
    """What a "train" row says besides loss and rate.

    Attributes:
        world_size: Ranks.
        device: Of this rank.
        flops_per_clip: Of forward and backward; None where they were not counted.
        peak: TFLOP/s of one device; None where it is not known.
    """

    world_size: int
    device: torch.device
    flops_per_clip: int | None
    peak: float | None

    @classmethod
    def of(cls, config: Config, member: Member, model: nn.Module) -> Telemetry:
        """Of a run; counts the model's operations."""
        peak = config.run.peak_tflops or peak_tflops(member.device, config.run.amp)
        flops = clip_flops(config, model) if member.leads else None
        return cls(member.world.size, member.device, flops, peak)

    def numbers(self, speed: Mapping[str, float], seconds: float, exposed_s: float) -> dict[str, Any]:
        """Numbers of a stretch of steps.

        Args:
            speed: `fastvid.train.records.metrics.Stopwatch.numbers` of it.
            seconds: Its length.
            exposed_s: Seconds of it that this rank waited for the others.
        """
        each = speed["clips_per_s"] / self.world_size
        row: dict[str, Any] = {
            "clips_per_s_per_gpu": each,
            "exposed_percent": 100 * exposed_s / max(seconds, 1e-9),
            "memory_gib": memory_bytes(self.device) / 2**30,
        }
        if self.flops_per_clip is not None:
            tflops = each * self.flops_per_clip / 1e12
            row["tflops_per_gpu"] = tflops
            if self.peak:
                row["mfu_percent"] = 100 * tflops / self.peak
        return row


def clip_flops(config: Config, model: nn.Module) -> int | None:
    """Operations of forward and backward of one clip; None for a model of several streams."""
    data = config.data
    if data.streams != ("rgb",):
        return None
    crop = next((one for one in data.spatial if hasattr(one, "output")), None)
    if crop is None:
        return None
    try:
        return model_cost(model, (1, 3, data.frames.num_frames, *crop.output)).training_flops
    except (RuntimeError, NotImplementedError, TypeError):
        # A model of the user's may do what the meta device cannot.
        return None


def memory_bytes(device: torch.device) -> int:
    """Most that was allocated on a CUDA device; on the CPU, most that the process held."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # Linux counts in kilobytes, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
