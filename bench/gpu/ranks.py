"""Section `ranks`: torchrun jobs on one device: one rank over NCCL, and two over gloo of which one is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bench
from bench.gpu.settings import NUM_FRAMES, Notes, Settings
from fastvid.runtime.faults import VARIABLE as FAULT
from fastvid.train.ranks import SHARED_DEVICE
from fastvid.train.records import records as metrics

_EPOCHS = 2
_BATCH = 2  # of both ranks together
_RECIPE = """
from fastvid.train import CenterCrop, Config, DataConfig, ModelConfig, OptimConfig, RandomCrop, RunConfig, Segments


def recipe() -> Config:
    return Config(
        data=DataConfig(
            path={path!r}, split=None, eval_split=None, frames=Segments({frames}), eval_frames=Segments({frames}),
            spatial=(RandomCrop({side}),), eval_spatial=(CenterCrop({side}),), global_batch_size={batch},
            decoder="pyav", num_threads=1,
        ),
        model=ModelConfig(name={model!r}, num_classes=400, options={options!r}),
        optim=OptimConfig(base_lr=0.001, base_batch_size={batch}),
        run=RunConfig(out="", epochs={epochs}, amp={amp!r}, checkpoint_every_s=0, log_every_steps=1),
    )
"""


def measure(settings: Settings, notes: Notes) -> None:
    """Train with one rank; beside it with two on the same device, kill them in the second epoch, and resume."""
    name, dataset = settings.smallest()
    values = {
        "path": str((settings.data / name).resolve()), "frames": NUM_FRAMES, "side": settings.crop(dataset),
        "batch": _BATCH, "model": settings.model, "options": dict(settings.model_options), "epochs": _EPOCHS,
        "amp": settings.amp,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        (folder / "recipe.py").write_text(_RECIPE.format(**values))
        steps = len(dataset) // _BATCH
        # Each process counts its own steps: after the restart fewer remain than this.
        fault = {FAULT: f"step:{steps + max(1, steps // 2)}"}
        with ThreadPoolExecutor(2) as pool:  # both spend most of their time on starting processes
            second = pool.submit(_torchrun, folder, "two", 2, **{SHARED_DEVICE: "1"}, **fault)
            code = _torchrun(folder, "one", 1)
            one = _summary(folder / "one")
            notes.put(dataset=name, one=one, one_exit_code=code, finished=int(one.get("over") is True))
            code = second.result()
        two = _summary(folder / "two")
        starts = [
            row["samples"] for row in metrics.read(folder / "two" / metrics.METRICS_FILE) if row["kind"] == "start"
        ]
        notes.put(two=two, two_exit_code=code, starts=starts)
        resumed = two.get("over") is True and len(starts) == 2 and starts[0] == 0 < starts[1]
        notes.put(resumed=int(resumed), same_lineage=int(bool(one) and one.get("lineage") == two.get("lineage")))


def _torchrun(folder: Path, out: str, ranks: int, **environment: str) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=1", "-m", "fastvid.train", str(folder / "recipe.py"), f"run.out={folder / out}"]
    root = str(Path(bench.__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    both = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environment
    return subprocess.run(command, cwd=folder, env=both, check=False).returncode


def _summary(out: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    except OSError:
        return {}
    return found
