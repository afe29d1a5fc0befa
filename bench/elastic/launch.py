"""Run the documentation's launch script on four simulated hosts with a slow network; one loses power and comes back.

Runs ``docker/slurm/train.sbatch`` unchanged. Each host is a network namespace of this machine with its own host name,
connected by a bridge with rate-limited ports; this needs root. Two Slurm commands are emulated: ``scontrol show
hostnames`` prints the names, and ``srun`` starts its command on every host.

After a tenth of the run the last host's link goes down and its processes are killed, as in a power cut, without notice
to the others. When the others train again, it comes back with the same ``srun`` command. Afterwards the samples must be
those of an undisturbed single-process run, and the weights equal up to float64 rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.common.harness import Record, options
from bench.common.hosts import Hosts
from bench.common.rounds import children
from bench.elastic import training_job
from fastvid.errors import JobError, UsageError

log = logging.getLogger(__name__)

SCHEMA: Final = "fastvid-bench-launch/1"
ROOT: Final = Path(__file__).parents[2]
SCRIPT: Final = ROOT / "docker" / "slurm" / "train.sbatch"
_JOB: Final = "1000001"  # a Slurm job id; the script derives the rendezvous port from it
_ENDING_S: Final = 60.0

_SRUN: Final = """#!/bin/sh
# Starts a command on every host and waits. Skips srun's own options, which configure failure handling.
while [ "${{1#--}}" != "$1" ]; do shift; done
printf '%s\\n' "$@" > {here}/words
for number in {numbers}; do
    {here}/bin/node "$number" "$@" &
done
wait
"""
_NODE: Final = """#!/bin/sh
# node NUMBER COMMAND...: runs the command on that host. The process id stays the same through every exec.
number=$1
shift
echo $$ > {here}/pid-$number
exec >> {here}/node-$number.log 2>&1
case $number in
{cases}
esac
"""
_CASE: Final = (
    "{number}) exec {prefix} unshare --uts --mount sh -c"
    ' \'hostname "$0" && mount --bind {here}/hosts /etc/hosts && exec "$@"\' {name} "$@" ;;'
)


add_arguments = options(
    script=(SCRIPT, "launch script"),
    nodes=(4, "hosts"),
    network=(50.0, "Mbit/s per port"),
    epochs=(40, "epochs, 4 steps each"),
    pause=(0.2, "seconds added to each step"),
    patience=(180.0, "limit for each event in seconds"),
    json="launch.json",
)


def run(args: argparse.Namespace) -> int:
    """Run the job and write the result; exit code 1 if it does not end as it must."""
    if not args.script.is_file():
        raise UsageError("launch script not found", file=args.script, hint="pass --script FILE from a checkout")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fastvid-launch-") as folder:
        here = Path(folder)
        shards = training_job.make_dataset(here)
        truth = training_job.train_alone(shards, here / "undisturbed", epochs=args.epochs)
        out = here / "run"
        recipe = training_job.write_recipe(shards, out, epochs=args.epochs, pause_s=args.pause)
        with Hosts(args.nodes) as hosts:
            hosts.limit(int(args.network * 1e6))
            with LaunchJob(hosts, args.script, [str(recipe)], here) as job:
                events = disturb(job, out, args)
            received = [_received(hosts, number) for number in range(args.nodes)]
        found = training_job.outcome(out)
        starts = [row for row in training_job.rows(out) if row["kind"] == "start"]
        record = Record(SCHEMA, args, "nodes", script=args.script.name, network_mbit=args.network, events=events)
        record["worlds"] = [row["world_size"] for row in starts]
        record["samples"] = found["samples"]
        record["lineage_exact"] = found["lineage"] == truth["lineage"] and found["samples"] == truth["samples"]
        record["weights_differ_by"] = training_job.difference(truth["weights"], found["weights"])
        record["received_megabytes"] = received
        record["seconds"] = round(time.monotonic() - began, 1)
        record["passed"] = passed(record)
    record.finish()
    return 0 if record["passed"] else 1


def passed(record: dict[str, Any]) -> bool:
    """Return whether the job trained on all hosts, on one fewer, on all again, and ended with the right result."""
    worlds, nodes = record["worlds"], record["nodes"]
    through = worlds[0] == worlds[-1] == nodes and nodes - 1 in worlds
    return bool(through and record["lineage_exact"] and record["weights_differ_by"] < training_job.LIMIT)


def disturb(job: LaunchJob, out: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start and disturb the job; return each event with the seconds until the job trains again or has ended."""
    last = args.nodes - 1
    events: list[dict[str, Any]] = []

    def timed(at: str, nodes: int, act: Callable[[], None], reached: Callable[[], bool]) -> None:
        log.info("%s", at)
        began = time.monotonic()
        act()
        job.until(reached, at, args.patience)
        events.append({"at": at, "seconds": round(time.monotonic() - began, 1), "nodes": nodes})

    def trained_by(nodes: int) -> Callable[[], bool]:
        def reached() -> bool:
            starts = [row for row in training_job.rows(out) if row["kind"] == "start"]
            return bool(starts) and starts[-1]["world_size"] == nodes and training_job.rows_after_start(out) > 0

        return reached

    timed("script start to first step", args.nodes, job.start, trained_by(args.nodes))
    tenth = args.epochs * training_job.STEPS_AN_EPOCH // 10
    job.until(lambda: training_job.count(out, "train") >= tenth, "a tenth of the run", args.patience)
    timed(f"{job.names[last]} loses power", last, lambda: job.cut_power(last), trained_by(last))
    timed(f"{job.names[last]} comes back", args.nodes, lambda: job.come_back(last), trained_by(args.nodes))
    timed("the rest of the run", args.nodes, lambda: None, lambda: training_job.is_finished(out))
    return events


class LaunchJob:
    """A launch script on simulated hosts, with Slurm's commands emulated by scripts at the front of PATH."""

    def __init__(self, hosts: Hosts, script: Path, words: list[str], here: Path) -> None:
        self.hosts, self.script, self.arguments, self.here = hosts, script, words, here
        self.names = [f"gpu{number + 1:02d}" for number in range(len(hosts.addresses))]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> LaunchJob:
        lines = ["127.0.0.1 localhost"]
        lines += [f"{address} {name}" for address, name in zip(self.hosts.addresses, self.names, strict=True)]
        (self.here / "hosts").write_text("\n".join(lines) + "\n")
        place, numbers = shlex.quote(str(self.here)), range(len(self.names))
        cases = [
            _CASE.format(number=number, prefix=shlex.join(self.hosts.prefixes[number]), here=place, name=name)
            for number, name in enumerate(self.names)
        ]
        programs = {
            "scontrol": "#!/bin/sh\nprintf '%s\\n' " + " ".join(self.names) + "\n",
            "srun": _SRUN.format(here=place, numbers=" ".join(map(str, numbers))),
            "node": _NODE.format(here=place, cases="\n".join(cases)),
            "torchrun": f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"\n',
        }
        (self.here / "bin").mkdir()
        for name, code in programs.items():
            path = self.here / "bin" / name
            path.write_text(code)
            path.chmod(0o755)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            # The run is over; agents exit by themselves.
            with contextlib.suppress(subprocess.TimeoutExpired):
                codes = [process.wait(_ENDING_S) for process in self._processes]
                if any(codes):
                    raise JobError(f"the launch script and the restarted host exited with codes {codes}")
                return
        for number in range(len(self.names)):
            self._kill(number)
        for process in self._processes:
            process.kill()
            process.wait()
        if kind is None:
            raise JobError(f"the launch script did not exit within {_ENDING_S:g} s of the run's end", file=self.script)

    def start(self) -> None:
        """Start the script in the environment of a Slurm job with one GPU per node."""
        environment = os.environ | {
            "PATH": f"{self.here / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": _JOB,
            "SLURM_JOB_NODELIST": f"gpu[01-{len(self.names):02d}]",
            "SLURM_JOB_NUM_NODES": str(len(self.names)),
            "SLURM_GPUS_ON_NODE": "1",
        }
        self._start(["bash", str(self.script), *self.arguments], environment)

    def words(self) -> list[str]:
        """Return the command that the script passed to srun."""
        return (self.here / "words").read_text().splitlines()

    def cut_power(self, number: int) -> None:
        """Stop a host without sending any packet."""
        self.hosts.cut(number)
        self._kill(number)

    def come_back(self, number: int) -> None:
        """Restart a host with srun's command and the environment of the first host."""
        pairs = Path(f"/proc/{self._agent(0)}/environ").read_text().split("\0")
        self.hosts.join(number)
        environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        self._start([str(self.here / "bin" / "node"), str(number), *self.words()], environment)

    def until(self, reached: Callable[[], bool], what: str, patience: float) -> None:
        """Wait until `reached` returns True."""
        deadline = time.monotonic() + patience
        while not reached():
            if self._processes[0].poll() is not None and not reached():
                code = self._processes[0].returncode
                raise JobError(f"the script exited with code {code} before this event: {what}", hint=self._logs())
            if time.monotonic() > deadline:
                raise JobError(f"timeout after {patience:g} s: {what}", hint=self._logs())
            time.sleep(0.1)

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        self._processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL))

    def _agent(self, number: int) -> int:
        return int((self.here / f"pid-{number}").read_text())

    def _kill(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            agent = self._agent(number)
            # The process id of an exited host may belong to another process now.
            if str(self.here).encode() in _environment(agent):
                for pid in (agent, *children(agent)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def _logs(self) -> str:
        logs = sorted(self.here.glob("node-*.log"))
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in logs)


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _received(hosts: Hosts, number: int) -> float:
    """Return the megabytes received by a host's network device, by the kernel's count."""
    device = hosts.environment["GLOO_SOCKET_IFNAME"]
    words = hosts.command(number, ["cat", f"/sys/class/net/{device}/statistics/rx_bytes"])
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return round(int(done.stdout) / 1e6, 2)
