"""Runs of strategies on several ranks: their specification, and the processes that execute one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.common.ports import reserved_port
from bench.strategies.slow_network import SlowLink

ROOT: Final = Path(__file__).parents[2]
TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class RunSpec:
    """Specification of a run."""

    sync: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    clips: int = 9600
    look_clips: int = 9600
    batch: int = 32
    hidden: int = 256
    clip_s: float = 0.0  # seconds that a rank computes on a clip, a sleep or counted
    straggler: float = 1.0
    links: Sequence[SlowLink] = (SlowLink(),)
    counted: bool = False
    dataset_clips: int = 32768
    seed: int = 0


class Ranks:
    """Processes of one process group, reused between runs because they take seconds to start."""

    def __init__(
        self, size: int, prefixes: Sequence[Sequence[str]] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._stack = contextlib.ExitStack()
        port = self._stack.enter_context(reserved_port())
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        shared |= {"FASTVID_LOG": "WARNING", **dict(environment or {})}
        self._processes = [
            subprocess.Popen(
                [*(prefixes[rank] if prefixes else ()), sys.executable, "-m", "bench.strategies.rank_run"],
                cwd=ROOT,
                env=os.environ | shared | {"RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # kernels share cores between sessions, so a rank is slowed like any process
            )
            for rank in range(size)
        ]

    def run(self, spec: RunSpec) -> list[dict[str, Any]]:
        """Execute a run; return the result of each rank."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(spec)) + "\n")
            process.stdin.flush()
        answers = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"rank {rank} exited with code {process.wait()}")
            answers.append(json.loads(line))
        return answers

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._stack.close()
