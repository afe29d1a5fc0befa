"""The scale benchmark: real ranks, parts that add up to the step, merged files, hosts on a limited network."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from bench import __main__ as command
from bench.common.hosts import Hosts
from bench.scaling import scale
from fastvid.errors import UsageError
from tests.datasets import make_clip, pack
from tests.train.small import RECIPE


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scale")
    clip = make_clip(folder / "clip.mp4", frames=8, size="48x48")
    samples = [(f"clip{n:02d}", clip, n % 2) for n in range(16)]
    pack(folder / "shards", [samples], columns={"split": ["train"] * 16})
    recipe = folder / "recipe.py"
    recipe.write_text(RECIPE.format(data=str(folder / "shards"), out=str(folder / "run")))
    return recipe


@pytest.fixture(scope="module")
def record(recipe):
    out = recipe.parent / "scale.json"
    words = [sys.executable, "-m", "bench", "scale", str(recipe), "run.seed=3", "--ranks", "1", "2", "--clips", "2"]
    words += ["--steps", "6", "--sync", "ddp", "kavg:2", "--json", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "slowest rank: " in done.stdout
    return json.loads(out.read_text())


@pytest.mark.soak
def test_every_rank_reports_all_parts_and_they_add_up_to_the_step(record):
    assert [world["world_size"] for world in record["worlds"]] == [1, 2]
    assert record["changes"] == ["run.seed=3"]
    for world in record["worlds"]:
        assert [rank["rank"] for rank in world["ranks"]] == list(range(world["world_size"]))
        assert [row["strategy"] for row in world["analysis"]["rows"]] == ["ddp", "kavg:2"]
        for row in world["analysis"]["rows"]:
            assert sum(row["parts_seconds"][part] for part in scale.PARTS) == pytest.approx(row["step_seconds"])
            assert row["clips_per_second"] == pytest.approx(2 * world["world_size"] / row["step_seconds"])
        for rank in world["ranks"]:
            assert len(rank["step_seconds"]) == 6
            assert len(rank["strategies"]["kavg:2"]["train_seconds"]) == 3  # rounds of two steps
            assert rank["load"]["bytes_per_clip"] > 0
    two = record["worlds"][1]
    sent = [entry["bytes"] for entry in two["ranks"][0]["all_reduces"]]
    assert set(two["bucket_bytes"]) <= set(sent)
    assert sum(two["bucket_bytes"]) == 4 * two["parameters"]


@pytest.mark.soak
def test_only_files_of_the_same_recipe_are_merged(record, tmp_path):
    worlds = record["worlds"]
    for name, changes in (("a", ["run.seed=3"]), ("b", ["run.seed=4"])):
        one = record | {"changes": changes, "worlds": [worlds[name == "b"]]}
        (tmp_path / f"{name}.json").write_text(json.dumps(one))
    with pytest.raises(UsageError, match=r"changes is \['run.seed=4'\]"):
        scale.joined([tmp_path / "a.json", tmp_path / "b.json"])
    (tmp_path / "c.json").write_text('{"schema": "fastvid-bench-decode/1"}')
    with pytest.raises(UsageError, match="schema is not fastvid-bench-scale/1"):
        scale.joined([tmp_path / "a.json", tmp_path / "c.json"])
    (tmp_path / "b.json").write_text(json.dumps(record | {"worlds": worlds[1:]}))
    together = scale.joined([tmp_path / "b.json", tmp_path / "a.json"])
    assert together["worlds"] == worlds
    assert together["prediction"] == record["prediction"]


def test_the_command_without_a_task_fails_with_a_hint(capsys):
    assert command.main(["scale"]) == 1
    assert "pass a recipe, --join or --model" in capsys.readouterr().err


needs_hosts = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"), reason="hosts need root and iproute2"
)
SEND = """
import socket, sys
if sys.argv[1] == "listen":
    server = socket.create_server((sys.argv[2], 5000)); print("ready", flush=True)
    peer, _ = server.accept(); size = 0
    while part := peer.recv(65536): size += len(part)
    print(size)
else:
    socket.create_connection((sys.argv[2], 5000), timeout=float(sys.argv[3])).sendall(bytes(2_000_000))
"""


@needs_hosts
def test_hosts_reach_each_other_within_the_rate_limit_but_not_when_disconnected():
    with Hosts(3) as hosts:
        hosts.limit(16_000_000)
        listen = hosts.command(2, [sys.executable, "-c", SEND, "listen", hosts.addresses[2]])
        send = hosts.command(0, [sys.executable, "-c", SEND, "send", hosts.addresses[2]])

        def delayed_packets():
            """Return how often the limit delayed a packet of the first host."""
            show = hosts.command(0, ["tc", "-s", "qdisc", "show", "dev", "cable"])
            said = subprocess.run(show, capture_output=True, text=True, check=True).stdout
            return int(re.search(r"overlimits (\d+)", said)[1])

        assert delayed_packets() == 0
        with subprocess.Popen(listen, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout.readline() == "ready\n"
            subprocess.run([*send, "60"], check=True)
            assert server.stdout.readline() == "2000000\n"
        assert delayed_packets() > 0
        hosts.cut(2)
        assert subprocess.run([*send, "2"], check=False, stderr=subprocess.DEVNULL).returncode != 0
        names = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
        assert f"fastvid-{os.getpid()}" in names
    names = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert f"fastvid-{os.getpid()}" not in names
