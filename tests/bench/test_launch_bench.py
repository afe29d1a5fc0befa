"""The launch benchmark: simulated hosts with their own names, emulated Slurm commands, failures, the verdict."""

import argparse
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench.common.hosts import Hosts
from bench.elastic import launch
from fastvid.errors import JobError, UsageError
from tests.load.tools import until

needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))), reason="hosts need root and iproute2"
)
RECORD = {"nodes": 4, "worlds": [4, 3, 4], "lineage_exact": True, "weights_differ_by": 4e-16}


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"worlds": [4]}, False),
        ({"worlds": [4, 3]}, False),
        ({"worlds": [3, 4]}, False),
        ({"lineage_exact": False}, False),
        ({"weights_differ_by": 1e-6}, False),
    ],
)
def test_a_job_passes_only_if_it_lost_and_regained_a_host_with_the_right_result(change, good):
    assert launch.passed(RECORD | change) == good


@needs_hosts
def test_srun_runs_its_command_on_every_host_and_host_names_resolve(tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text(
        'set -euo pipefail\nfirst=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        'srun --kill-on-bad-exit=0 sh -c "hostname; getent hosts $first; echo $1 of $SLURM_JOB_NUM_NODES"\n'
    )
    with Hosts(3) as hosts, launch.LaunchJob(hosts, script, ["two words"], tmp_path) as job:
        name = os.uname().nodename
        job.start()
        logs = [tmp_path / f"node-{number}.log" for number in range(3)]
        until(lambda: all(log.exists() and "two words of 3" in log.read_text() for log in logs), 200)
        assert job.words()[:2] == ["sh", "-c"]
    for number, log in enumerate(logs):
        host, first, said = log.read_text().splitlines()
        assert host == f"gpu{number + 1:02d}"
        assert first.split() == [hosts.addresses[0], "gpu01"]
        assert said == "two words of 3"
    assert os.uname().nodename == name
    assert "gpu01" not in Path("/etc/hosts").read_text()


@needs_hosts
def test_a_failing_script_raises_an_error_with_the_hosts_logs_and_removes_the_hosts(tmp_path):
    script = tmp_path / "job.sbatch"
    script.write_text('srun sh -c "echo no such recipe; sleep 0.2"\nexit 3\n')
    with pytest.raises(JobError, match="the script exited with code 3 before this event: the first step") as caught:
        start_and_wait(script, tmp_path)
    assert "no such recipe" in str(caught.value)
    names = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert f"fastvid-{os.getpid()}" not in names


def start_and_wait(script: Path, folder: Path) -> None:
    with Hosts(2) as hosts, launch.LaunchJob(hosts, script, [], folder) as job:
        job.start()
        job.until(lambda: False, "the first step", 60)


def test_a_missing_launch_script_is_refused(tmp_path):
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    with pytest.raises(UsageError, match="launch script not found"):
        launch.run(parser.parse_args(["--script", str(tmp_path / "train.sbatch")]))
