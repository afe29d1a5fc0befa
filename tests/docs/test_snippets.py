"""The commands and code in the documentation work.

The ``bash`` and ``python`` blocks of a page run in order, in one folder. ``console`` blocks need a cluster or large
data sets: their fastvid commands are parsed, and on the pages of `DATA_SETS` they run as well, on a few videos in the
form of the data set. There only the folders ``/data`` and ``/shards`` are moved, and what trains is a dry run.

Whole pages take minutes: `make soak` runs all, every change only the README's example and `QUICK`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench.__main__ import BENCHES
from fastvid.cli.main import command_parser, find_command
from fastvid.train.config import config as recipes
from tests.datasets import make_clip
from tests.sharding.shardtools import make

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

RUN = """
import json, subprocess, sys
for number, (kind, code) in enumerate(json.load(sys.stdin)):
    print(f"--- block {number}:", code, sep="\\n", flush=True)
    if kind == "bash":
        subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True)
    else:
        exec(compile(code, f"block {number}", "exec"), {"__name__": "__main__"})
"""


def blocks(path: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(path.read_text())


@pytest.fixture(scope="module")
def mine(videos, tmp_path_factory):
    """A folder after the first command of the tutorial."""
    folder = work_folder(tmp_path_factory.mktemp("mine"), videos)
    run([("bash", "fastvid shard videos/ --out shards/mine")], folder)
    return folder


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    for number in range(4):
        for name in ("juggling", "walking"):
            (folder / name).mkdir(exist_ok=True)
            make_clip(folder / name / f"{name}{number}.mp4", frames=8 + number, size="80x80")
    return folder


def environment() -> dict[str, str]:
    bin_folder = str(Path(sys.executable).parent)
    return os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "FASTVID_LOG": "WARNING",
    }  # fmt: skip


def work_folder(tmp_path: Path, videos: Path | None) -> Path:
    if videos is not None:
        shutil.copytree(videos, tmp_path / "videos")  # pages may change their videos
        shutil.copytree(ROOT / "tests/sharding/lerobot/fixture/v3", tmp_path / "robot")
        (tmp_path / "tars").mkdir()
        with tarfile.open(tmp_path / "tars" / "00000.tar", "w") as tar:
            for number, clip in enumerate(sorted(videos.rglob("*.mp4"))[:3]):
                (tmp_path / "caption.txt").write_text(f"caption {number}")
                tar.add(clip, f"{number:05d}.mp4")
                tar.add(tmp_path / "caption.txt", f"{number:05d}.txt")
    # The commands of an installation, but for this checkout.
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, module in (("fastvid", "fastvid"), ("torchrun", "torch.distributed.run")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (commands / name).chmod(0o755)
    return tmp_path


def run(code: list[tuple[str, str]], folder: Path) -> None:
    variables = environment()
    variables["PATH"] = f"{folder / 'bin'}:{variables['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=folder, env=variables, input=json.dumps(code), capture_output=True, text=True,
        check=False, timeout=560,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def write_ucf101(data: Path) -> None:
    lists = data / "ucfTrainTestlist"
    lists.mkdir(parents=True)
    (lists / "classInd.txt").write_text("1 Archery\n2 Rowing\n")
    names = [f"{name}/v_{name}_g0{group}_c01.avi" for name in ("Archery", "Rowing") for group in (1, 2)]
    for name in names:
        make(data / "UCF-101" / name, "-c:v", "mpeg4", size="80x60", frames=10)
    for split in (1, 2, 3):
        train, test = names[split % 2 :: 2], names[1 - split % 2 :: 2]
        (lists / f"trainlist0{split}.txt").write_text("".join(f"{n} {1 + n.startswith('R')}\r\n" for n in train))
        (lists / f"testlist0{split}.txt").write_text("".join(f"{n}\r\n" for n in test))


def write_kinetics(data: Path) -> None:
    for split, table in (("train", "train"), ("val", "validate")):
        rows = ["label,youtube_id,time_start,time_end,split"]
        for number, label in enumerate(("archery", "tai chi", "archery", "tai chi")):
            rows.append(f"{label},-{split}{number},{number},{number + 10},{table}")
            name = f"-{split}{number}_{number:06d}_{number + 10:06d}.mp4"
            make(data / "kinetics400" / split / label / name, size="80x60", frames=10)
        (data / "kinetics400" / f"{table}.csv").write_text("\n".join(rows) + "\n")


WEIGHTS = """
import torch
from fastvid.models.zoo import build
torch.save(build("tsm-r50", 400, 8).state_dict(), "kinetics.pth")
"""
DATA_SETS = {"cluster": (write_ucf101, write_kinetics)}
QUICK = ("index",)
RUNNABLE = [page for page in PAGES if page.stem not in DATA_SETS and {k for k, _ in blocks(page)} & {"bash", "python"}]


@pytest.mark.soak
@pytest.mark.parametrize("page", sorted(DATA_SETS))
def test_all_commands_of_a_data_set_run(page, tmp_path):
    folder = work_folder(tmp_path, None)
    for write in DATA_SETS[page]:
        write(folder / "data")
    code, ran = [("python", WEIGHTS)], []
    for kind, text in blocks(ROOT / "docs" / f"{page}.md"):
        if kind == "python":
            code.append((kind, text))
            ran.append(text)
        for line in text.replace("\\\n", " ").splitlines() if kind == "console" else ():
            if line.startswith("fastvid ") and "--engine ray" not in line:
                moved = re.sub(r"(?<![\w.])/(?=(data|shards)/)", f"{folder}/", line)
                code.append(("bash", moved))
                ran.append(line.split()[1])
            if line.startswith("torchrun "):
                recipe = line.partition(" -m fastvid.train ")[2].replace("/shards/", f"{folder}/shards/")
                batch = "data.global_batch_size=2 data.eval_batch_size=2"
                code.append(("bash", f"fastvid train {recipe} {batch} --dry-run"))
                ran.append("train")
    assert ran[-1] == "train"
    assert ran.count("shard") == 2
    run(code, folder)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=() if page.stem in QUICK else pytest.mark.soak) for page in RUNNABLE],
)
def test_all_blocks_of_a_page_run(page, mine, tmp_path):
    folder = shutil.copytree(mine, tmp_path / "work", symlinks=True)
    if page.stem == "data":
        shutil.rmtree(folder / "shards")
    run([(kind, text) for kind, text in blocks(page) if kind in ("bash", "python")], folder)


def test_the_readme_example_runs(mine, tmp_path):
    folder = shutil.copytree(mine, tmp_path / "work", symlinks=True)
    (python,) = [text for kind, text in blocks(ROOT / "README.md") if kind == "python"]
    # Replace what this test lacks: a CUDA device, a training step, splits, and that key.
    here = python.replace('device="cuda"', 'device="cpu"').replace(', split="train"', "")
    here = here.replace("archery/v_001", "walking/walking0").replace("global_batch_size=64", "global_batch_size=4")
    here = here.replace("RandomResizedCrop(224)", "RandomResizedCrop(64)")
    setup = "def step(video, label): assert video.shape[1:] == (3, 8, 64, 64), video.shape\n"
    run([("python", setup + here)], folder)


def commands(path: Path) -> list[list[str]]:
    found = []
    for kind, text in blocks(path):
        if kind in ("console", "bash"):
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0] in ("fastvid", "torchrun", "python") and "|" not in words:
                    found.append(words)
    return found


COMMANDS_TOLD = [(page, words) for page in [ROOT / "README.md", *PAGES] for words in commands(page)]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS_TOLD, ids=[f"{page.stem}-{' '.join(words)[:60]}" for page, words in COMMANDS_TOLD]
)
def test_documented_commands_have_valid_options(page, words):
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        parsed = get_args_parser().parse_args(words[1:])
        assert parsed.module
        assert parsed.training_script == "fastvid.train"
        words = ["fastvid", "train", *parsed.training_script_args]
    if words[:2] == ["fastvid", "bench"]:
        words = ["python", "-m", *words[1:]]
    if words[:3] == ["python", "-m", "bench"]:
        assert words[3] in BENCHES
        parse(importlib.import_module(BENCHES[words[3]]), words[4:])
        return
    assert words[0] == "fastvid"
    parser = command_parser(words[1], find_command(words[1]))
    parser.exit_on_error = False
    parser.parse_args(words[2:])
    if words[1] == "train":
        recipe, *changes = [word for word in words[2:] if not word.startswith("--")]
        if recipe != "mine.py":
            recipes.load(recipe, changes)


def parse(module: object, words: list[str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    parser.parse_args(words)
