"""Speed metrics of a run: throughput per GPU, MFU, exposed communication and memory."""

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

# Dense 16-bit matrix throughput in TFLOP/s by substring of the device name, first match wins (NVIDIA data sheets, which
# print twice as much, with sparsity).
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
    """Return a device's peak TFLOP/s in mixed precision; None if unknown or with amp "off"."""
    if device.type != "cuda" or amp == "off":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS if part in name), None)


@dataclass(frozen=True)
class Telemetry:
    """Computes the speed and memory columns of a "train" row."""

    world_size: int
    device: torch.device
    flops_per_clip: int | None
    peak: float | None

    @classmethod
    def of(cls, config: Config, member: Member, model: nn.Module) -> Telemetry:
        """Return the telemetry of a run; on rank 0 this counts the model's FLOPs."""
        peak = config.run.peak_tflops or peak_tflops(member.device, config.run.amp)
        flops = clip_flops(config, model) if member.leads else None
        return cls(member.world.size, member.device, flops, peak)

    def numbers(self, speed: Mapping[str, float], seconds: float, exposed_s: float) -> dict[str, Any]:
        """Return the columns for a range of steps.

        `exposed_s`: seconds of exposed communication of this rank.
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
    """Return the FLOPs of forward and backward of one clip; None if they cannot be counted."""
    data = config.data
    if data.streams != ("rgb",):
        return None
    crop = next((one for one in data.spatial if hasattr(one, "output")), None)
    if crop is None or crop.output is None:
        return None
    try:
        return model_cost(model, (1, 3, data.num_frames, *crop.output)).training_flops
    except (RuntimeError, NotImplementedError, TypeError):
        # A user-defined model may use operations that the meta device does not support.
        return None


def memory_bytes(device: torch.device) -> int:
    """Return the peak bytes allocated on a CUDA device; on the CPU, the peak resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # In kilobytes on Linux, in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
