"""Detection of unsafe elastic jobs, and stop signals."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fastvid.errors import UsageError
from fastvid.train.ranks import UNSHARED_STORE, StopSignal, check_rendezvous

SHARED = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
LINE = f"export {UNSHARED_STORE}=1"


@pytest.mark.parametrize(
    ("command", "environment", "safe"),
    [
        ("torchrun --nnodes 1:4 -m fastvid.train x", SHARED, False),
        ("python -m torch.distributed.run --nnodes=2:8 train.py", SHARED, False),
        ("torchrun --nn 1:2 x", SHARED, False),
        ("torchrun train.py", SHARED | {"PET_NNODES": "1:4"}, False),
        ("", SHARED | {"PET_NNODES": "1:4"}, False),
        ("torchrun --nnodes 1:4 x", {"TORCHELASTIC_USE_AGENT_STORE": "False"}, True),
        ("torchrun --nnodes 4 x", SHARED, True),
        ("torchrun --nnodes 4:4 x", SHARED, True),
        ("torchrun --nproc-per-node 2 x", SHARED, True),
        ("torchrun --nnodes 2 x", SHARED | {"PET_NNODES": "1:4"}, True),  # the flag wins over the variable
        ("", {}, True),
    ],
)
def test_an_elastic_worker_without_the_variable_fails_with_the_line_to_add(
    command: str, environment: dict[str, str], *, safe: bool
) -> None:
    with contextlib.nullcontext() if safe else pytest.raises(UsageError) as error:
        check_rendezvous(environment, command.split())
    assert safe or LINE in (error.value.hint or "")


def test_node_range_and_variable_are_detected_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os\n"
        "from fastvid.errors import UsageError\n"
        "from fastvid.train.ranks import agent_command, check_rendezvous\n"
        "try:\n"
        "    check_rendezvous(os.environ, agent_command())\n"
        "    print('went on', flush=True)\n"
        "except UsageError as error:\n"
        "    print('stopped:', error.hint, flush=True)\n"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "localhost:0", "--rdzv-conf", "last_call_timeout=1", str(script)]  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if name != UNSHARED_STORE} | {"PYTHONPATH": str(root)}
    said = {}
    for variable in ({}, {UNSHARED_STORE: "1"}):
        result = subprocess.run(command, env=clean | variable, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, result.stderr
        said[bool(variable)] = result.stdout.strip()
    assert LINE in said[False]
    assert said[False].startswith("stopped:")
    assert said[True] == "went on"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_recorded_and_handlers_are_restored(number: signal.Signals) -> None:
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.received == number
        # A second signal has its original effect.
        assert {s: signal.getsignal(s) for s in before} == before
    assert {s: signal.getsignal(s) for s in before} == before
