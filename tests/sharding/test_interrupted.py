"""Commands that are killed, or divided into parts, make what one undisturbed run makes: a table of them."""

import hashlib
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow.parquet as pq
import pytest

from fastvid.cli.main import main
from fastvid.errors import FastvidError, JobError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.sharding.change.edit import remove_samples
from fastvid.sharding.change.history import collect_garbage
from fastvid.sharding.change.repack import compact_shards
from fastvid.sharding.change.takedown import audit_removals, read_receipts
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.engines.local import LocalEngine
from fastvid.sharding.job.index import index_tars
from fastvid.sharding.job.job import run_job
from fastvid.sharding.job.status import read_status
from fastvid.sharding.lerobot.jobs import index_lerobot
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.storage import LocalStorage
from tests import forks
from tests.datasets import make_clip, pack
from tests.sharding.lerobot.tools import V3
from tests.sharding.shardtools import ledger, make, tar_of
from tests.skips import soak_but

TWIN, KEY = "walk/twin.mp4", "run/2"


def removed(store):
    remove_samples(store, Dataset(store.url).keys.to_pylist()[:3:2])


def compacted(store):
    removed(store)
    compact_shards(store)


@dataclass(frozen=True)
class Command:
    """A command, where to kill it, and what it returns.

    `words`: RAW, CSV, MORE, TARS, BASE, OTHER and ROBOTS stand for what `world` makes, ROBOT for a LeRobot dataset, OUT
    for the folder that is written. `part`: where the first of two parts is killed; none if the command has no parts.
    `before`: what is done to OUT, which is then a copy of BASE; otherwise OUT is new.
    """

    words: str
    points: str
    code: int = 0
    part: str = ""
    before: Callable[[LocalStorage], object] | None = None


SHARD = "shard RAW --out OUT --short-side 64 --samples-per-shard 2 --workers 1"
COMMANDS = {
    "shard": Command(SHARD, "encode:5 tar:1 rename:3 sidecar:2 ledger:1 manifest committed", 3, "ledger:2"),
    "clips": Command(f"{SHARD} --annotations csv:CSV", "encode:3 ledger:2", 3, "ledger:2"),
    "dropped": Command(f"{SHARD} --drop-duplicates", "encode:3 manifest", 3, "encode:2"),
    "index": Command("index TARS --out OUT --workers 1", "ledger:3 committed", 3, "ledger:2"),
    "in place": Command("index RAW --out OUT --workers 1", "encode:3 ledger manifest", 3),
    "lerobot in place": Command("index ROBOT --out OUT --workers 1", "ledger:1 sidecar:1 manifest"),
    "lerobot": Command(
        "shard ROBOT --out OUT --workers 1 --short-side 64 --samples-per-shard 2", "ledger:1 sidecar:1 manifest",
        0, "ledger:2",
    ),
    "lerobot out": Command("export ROBOTS --to lerobot --out OUT", "export:1 export:2"),
    "transcode": Command(
        "transcode BASE --out OUT --profile intra --short-side 32 --samples-per-shard 1 --workers 1",
        "ledger:1", 0, "ledger:2",
    ),
    "subset": Command(f"subset BASE --out OUT --where key<>'{KEY}'", "rename shard:2 ledger manifest committed"),
    "merge": Command("merge BASE OTHER --out OUT", "rename shard:2 ledger manifest committed"),
    "wds": Command("export BASE --to wds --out OUT", "export:1 export:3"),
    "energon": Command("export BASE --to energon --out OUT", "export:1 export:3"),
    "hf": Command("export BASE --to hf --out OUT", "export:1 export:3"),
    "add": Command("add OUT MORE --workers 1 --samples-per-shard 1",
                   "encode:2 tar:1 ledger:2 manifest committed merged", 3, "ledger:2", lambda store: None),
    "remove": Command(f"remove OUT --keys {KEY}", "manifest committed", before=lambda store: None),
    "take down": Command(
        f"remove OUT --source {TWIN} --reason ticket", "receipt blocked manifest hidden", before=lambda store: None
    ),
    "compact": Command("compact OUT", "tar:1 compact manifest committed", before=removed),
    "gc": Command("gc OUT --yes", "gc:1 gc:5", before=compacted),
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Videos, of which two are equal and one is broken; more videos; tars of another tool; two datasets."""
    folder = tmp_path_factory.mktemp("world")
    for number in range(7):
        label = ("run", "jump", "run", "jump", "walk", "walk", "run")[number]
        make(folder / "raw" / label / f"{number}.mp4", "-preset", "ultrafast", frames=6 + number, rate="10")
    shutil.copy(folder / "raw" / "run" / "0.mp4", folder / "raw" / TWIN)
    (folder / "raw" / "run" / "text.mp4").write_text("no video")
    rows = [f"{('run', 'jump')[n % 2]}/{n}.mp4,{start},{start + 0.2:.1f}" for n in range(3) for start in (0, 0.2, 0.4)]
    (folder / "clips.csv").write_text("\n".join(["path,start,end", *rows, "run/0.mp4,90,91"]))
    for name in ("fly/a.mp4", "run/b.mp4", "run/c.mp4", "fly/d.mp4"):
        make(folder / "more" / name, "-preset", "ultrafast", frames=8 + ord(name[4]) % 7)
    (folder / "more" / "text.mp4").write_text("no video")
    videos = [(folder / "raw" / "jump" / f"{n}.mp4").read_bytes() for n in (1, 3)] + [b"no video"]
    for number in range(4):
        members = [(f"{number}-{place}.mp4", video) for place, video in enumerate(videos)]
        tar_of(folder / "tars" / f"{number:05d}.tar", members)
    options = {"profile": PROFILES["compact"].changed(short_side=64), "samples_per_shard": 2}
    run_job(str(folder / "raw"), str(folder / "base"), workers=1, **options)
    clip = make_clip(folder / "clip.mp4")
    index_lerobot(f"lerobot:{V3}", folder / "robots", workers=1)
    pack(folder / "other", [[("o/0", clip, 0)], [("o/1", clip, 1)]], classes=("walk", "up"))
    return folder


def run(world, out, command, *more, fault="", start=forks.fastvid):
    names = {"RAW": "raw", "MORE": "more", "TARS": "tars", "BASE": "base", "OTHER": "other", "ROBOTS": "robots"}
    paths = {name: str(world / path) for name, path in names.items()} | {"OUT": str(out), "ROBOT": f"lerobot:{V3}"}
    words = [paths.get(word, word.replace("CSV", str(world / "clips.csv"))) for word in command.words.split()]
    return start(*words, *more, fault=fault)


def prepared(world, out, command):
    if command.before is not None:
        command.before(LocalStorage(shutil.copytree(world / "base", out)))
    return out


def state(out, command):
    """What a command made: all files, of the ledger the rows without times; of a changed dataset, what it contains."""
    if command.before is None:
        files = {name: LocalStorage(out).read(name) for name in LocalStorage(out).list() if name != "ledger.parquet"}
        return files, ledger(out) if (out / "ledger.parquet").exists() else None
    # The commit record counts its swaps, which are part of the names of compacted shards.
    dataset, hashes = Dataset(str(out)), [hashlib.sha256(path.read_bytes()).hexdigest() for path in out.glob("*.tar")]
    store = LocalStorage(out)  # which does not list what a killed process was writing
    records = {name: store.read(name) for name in [*store.list("blocked.json"), *store.list("removals/")]}
    return sorted(hashes), dataset.annotations.to_pylist(), dataset.classes, ledger(out), records


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """What each command makes, the seconds that it takes, and the folder."""
    made = {}

    def of(name):
        if name not in made:
            folder, command = tmp_path_factory.mktemp("undisturbed"), COMMANDS[name]
            out, begun = prepared(world, folder / "out", command), time.monotonic()
            done = run(world, out, command)
            assert done.returncode == command.code, done.stderr
            made[name] = state(out, command), time.monotonic() - begun, out
        return made[name]

    return of


POINTS = [(name, point) for name, command in COMMANDS.items() for point in command.points.split()]
MIDDLE = [(name, points[len(points) // 2]) for name, points in ((n, c.points.split()) for n, c in COMMANDS.items())]


@pytest.mark.parametrize(("name", "point"), soak_but(POINTS, *MIDDLE))
def test_a_killed_command_is_completed_by_the_same_command(name, point, world, undisturbed, tmp_path):
    """Kill each command once, and in ``make soak`` at all of its points."""
    command, (expected, *_) = COMMANDS[name], undisturbed(name)
    out = prepared(world, tmp_path / "out", command)
    killed = run(world, out, command, fault=point)
    assert killed.returncode == -9, killed.stderr
    if command.before is not None:
        assert verify_dataset(str(out), workers=1).ok
    elif point != "committed" and "export" not in command.words:
        with pytest.raises(FastvidError, match="there is no dataset"):
            Dataset(str(out))
    if name == "add":
        with pytest.raises(JobError, match="unfinished"):
            collect_garbage(LocalStorage(out))
    again = run(world, out, command)
    assert again.returncode in (command.code, 0), again.stderr
    assert state(out, command) == expected
    assert not (out / "ledger-parts").exists()
    if name == "take down":
        store = LocalStorage(out)
        compacted(store)
        collect_garbage(store)
        assert audit_removals(store.url, read_receipts(store), names=[TWIN, "run/0"]).ok


KILLS = [(name, number) for number in range(13) for name in COMMANDS]
STOPPED = [("shard", 0), ("in place", 0), ("subset", 0), ("hf", 0), ("add", 0), ("remove", 0), ("take down", 0),
           ("compact", 0), ("gc", 0), ("merge", 0)]  # fmt: skip


@pytest.mark.parametrize(("name", "number"), soak_but(KILLS, *STOPPED))
def test_a_command_killed_at_any_moment_is_completed_by_the_same_command(name, number, world, undisturbed, tmp_path):
    """Kill some commands once, and in ``make soak`` each of them 13 times. A busy machine may let one end before."""
    command, (expected, seconds, _) = COMMANDS[name], undisturbed(name)
    out = prepared(world, tmp_path / "out", command)
    process = run(world, out, command, start=lambda *words, fault: forks.start("fastvid", *words))
    time.sleep(random.Random(f"{name} {number}").uniform(0.02, 0.95) * seconds)
    process.kill()
    assert forks.wait(process) in (-signal.SIGKILL, command.code)
    if command.before is not None:
        assert verify_dataset(str(out), workers=1).ok
    # A finished export or index of tars is refused, like any folder that is not empty.
    is_finished = name in ("wds", "energon", "hf", "lerobot out", "index") and out.exists()
    is_finished = is_finished and state(out, command) == expected
    again = run(world, out, command)
    assert is_finished or again.returncode in (command.code, 0), again.stderr
    assert state(out, command) == expected


LIMITED = """
import os, resource, sys
from fastvid.cli.main import main
shown, (end, start) = os.dup(2), os.pipe()  # what it says goes to a file, too
os.dup2(start, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), -1))
code = main(sys.argv[2:])
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
os.dup2(shown, 2)
os.close(start)
os.write(2, os.read(end, 65536))
sys.exit(code)
"""


@pytest.mark.parametrize("name", soak_but(COMMANDS, "in place", "subset", "add", "compact"))
def test_a_command_that_may_not_write_says_so_and_is_completed_by_the_same_command(name, world, undisturbed, tmp_path):
    command, (expected, *_) = COMMANDS[name], undisturbed(name)
    for limit in (0, 4096):
        out = prepared(world, tmp_path / str(limit), command)
        done = run(
            world, out, command, start=lambda *words, fault, limit=limit: forks.run("-c", LIMITED, limit, *words)
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode in (1, 2) or state(out, command) == expected, done.stderr
        assert done.returncode != 1 or "File too large" in done.stderr
        if command.before is not None:
            assert verify_dataset(str(out), workers=1).ok
        assert run(world, out, command).returncode in (command.code, 0)
        assert state(out, command) == expected


JUMPING = """
import os, random, sys, time
from fastvid.cli.main import main
real, flush, jumps = time.time, os.fsync, random.Random(0)
time.time = lambda: real() + jumps.uniform(-1e9, 1e9)
time.time_ns = lambda: int(time.time() * 1e9)
os.fsync = lambda file: (time.sleep(0.2), flush(file))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("name", soak_but(COMMANDS, "add", "compact", "gc"))
def test_a_clock_that_jumps_by_decades_and_a_slow_disk_change_nothing(name, world, undisturbed, tmp_path):
    command, (expected, *_) = COMMANDS[name], undisturbed(name)
    out = prepared(world, tmp_path / "out", command)
    done = run(world, out, command, start=lambda *words, fault: forks.run("-c", JUMPING, *words))
    assert done.returncode == command.code, done.stderr
    assert state(out, command) == expected


PARTED = [name for name, command in COMMANDS.items() if command.part]


@pytest.mark.parametrize("name", soak_but(PARTED, "shard", "index", "add"))
def test_parallel_parts_one_of_them_killed_make_what_one_run_makes(name, world, undisturbed, tmp_path):
    command, (expected, *_) = COMMANDS[name], undisturbed(name)
    out, start = prepared(world, tmp_path / "out", command), forks.start_fastvid
    parts = [run(world, out, command, "--part", f"{n}/2", fault=(command.part, "")[n], start=start) for n in (0, 1)]
    said = [part.communicate(timeout=240) for part in parts]
    assert parts[0].returncode == -9, said
    assert parts[1].returncode in (0, command.code), said
    assert "part 1/2; run the command without --part" in said[1][0]
    status = read_status(str(out)).job
    assert (status.kind, status.command, status.state) == (
        "addition" if command.before else "job", command.words.split()[0], "interrupted",
    )  # fmt: skip
    whole = run(world, out, command)
    assert whole.returncode == command.code, whole.stderr
    assert "resuming the unfinished" in whole.stderr
    assert state(out, command) == expected
    # A part that is started late finds its work done.
    if command.before is not None:
        assert run(world, out, command, "--part", "1/2").returncode in (0, command.code)
        assert state(out, command) == expected
    assert not list(out.rglob("*.lock"))


def test_rows_of_dropped_duplicates_name_the_original(undisturbed):
    out = undisturbed("dropped")[2]
    rows = [row for row in pq.read_table(out / "ledger.parquet").to_pylist() if row["status"] == "removed"]
    assert [(row["source_id"], row["message"]) for row in rows] == [(TWIN, "the same bytes as run/0.mp4")]
    assert "walk/twin" not in Dataset(str(out)).keys.to_pylist()


def test_finished_tars_are_not_indexed_again(world, tmp_path, monkeypatch):
    tried, real = [], LocalEngine.run
    assert run(world, tmp_path, COMMANDS["index"], fault="ledger:3").returncode == -9
    monkeypatch.setattr(
        LocalEngine, "run", lambda engine, tasks: real(engine, [tried.append(task) or task for task in tasks])
    )
    assert sum(index_tars([str(world / "tars")], str(tmp_path), workers=1).rejected.values()) == 4
    assert {task.source_id for task in tried} <= {"3-0", "3-1", "3-2"}
    with pytest.raises(UsageError, match="a dataset exists already"):
        index_tars([str(world / "tars")], str(tmp_path), part="0/2")


def test_a_folder_of_tars_is_a_job_until_its_files_are_deleted_and_refuses_changed_tars(world, tmp_path, capsys):
    folder = shutil.copytree(world / "tars", tmp_path / "tars")
    index_tars([str(folder)], workers=1, part="0/2")
    (folder / "00001.tar").write_bytes((folder / "00003.tar").read_bytes())
    with pytest.raises(JobError, match="unfinished job here has"):
        index_tars([str(folder)], workers=1)
    (folder / "00001.tar").write_bytes((world / "tars" / "00001.tar").read_bytes())
    shutil.rmtree(folder / "ledger-parts")
    assert forks.fastvid("index", folder, "--workers", "1", fault="committed").returncode == -9
    for said in ("8 packed", "rebuilt the sidecars of 4 shards"):
        assert main(["index", str(folder), "--workers", "1", "--allow-rejected"]) == 0
        assert said in capsys.readouterr().out
