"""Section `facts`: the GPU, its driver and libraries, and which decoders run here."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from bench.gpu.settings import Notes, Settings
from fastvid.cli import doctor


def measure(settings: Settings, notes: Notes) -> None:
    """Record ``fastvid doctor``, nvidia-smi and the number of engines."""
    notes.put(nvidia_smi=nvidia_smi(), programs={name: shutil.which(name) for name in ("ffmpeg", "gcc", "nvidia-smi")})
    runs, reasons = settings.on_device()
    notes.put(decoders=len(runs), decoder_names=[one.name for one in runs], unavailable=reasons)
    if settings.fake:  # its test of the default pipeline takes longer than the rest of a rehearsal
        return
    found: dict[str, Any] = doctor.examine(parity=False)
    notes.put(doctor=found, engines=max((sum(gpu["nvdec"].get("h264", 0) for gpu in found["gpus"]), 0)))


def nvidia_smi() -> str | None:
    """Return the report of nvidia-smi on memory, utilisation and clocks; None without it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-q", "-d", "UTILIZATION,MEMORY,CLOCK"], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout
