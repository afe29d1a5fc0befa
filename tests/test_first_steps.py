"""The first steps of a user, command by command: doctor, shard, verify, index, look, load."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastvid
from fastvid.errors import UsageError
from tests.makers import encode, read_numbers
from tests.makers import paint as paint_numbers

CLASSES = ("falling", "rising")
FRAMES = 40


def run(*arguments: object) -> str:
    """Run a fastvid command, which must succeed, and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "fastvid", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def raw_videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two classes with two videos each; every frame shows its number."""
    folder = tmp_path_factory.mktemp("raw")
    for name in CLASSES:
        (folder / name).mkdir()
        for number in range(2):
            options = ["-c:v", "libx264", "-preset", "veryfast", "-pix_fmt", "yuv420p"]
            encode(folder / name / f"v{number}.mp4", paint_numbers(FRAMES, (256, 320)), options)
    return folder


@pytest.fixture(scope="module")
def sharded(raw_videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset made from them by one command."""
    folder = tmp_path_factory.mktemp("sharded") / "mine"
    assert "4 packed" in run("shard", raw_videos, "--out", folder)
    return folder


def test_doctor_reports_the_default_path_as_usable():
    found = json.loads(run("doctor", "--json"))
    assert found["ffmpeg"]["missing"] is None
    assert found["decoders"]["pyav"]["missing"] is None
    assert {row["range"] for row in found["parity"]} == {"limited", "full"}
    assert all(row["frames"] for row in found["parity"])


def test_a_sharded_folder_verifies_and_returns_the_requested_frames(sharded: Path):
    run("verify", sharded)
    assert "4" in run("inspect", sharded)
    dataset = fastvid.open(str(sharded))
    assert dataset.classes == CLASSES
    for key in dataset.keys.to_pylist():
        numbers = [0, 7, 17, FRAMES - 1]
        pictures = dataset[key].frames(numbers).data
        assert read_numbers(pictures[..., 1]) == numbers


def test_indexing_the_tars_alone_gives_an_equal_dataset(sharded: Path, tmp_path: Path):
    tars = tmp_path / "tars"
    tars.mkdir()
    for tar in sharded.glob("*.tar"):
        (tars / tar.name).symlink_to(tar)
    run("index", tars, "--out", tmp_path / "indexed")
    run("verify", tmp_path / "indexed")
    first, second = fastvid.open(str(sharded)), fastvid.open(str(tmp_path / "indexed"))
    assert first.keys == second.keys
    for key in first.keys.to_pylist():
        assert np.array_equal(first[key].frames([3, 30]).data, second[key].frames([3, 30]).data)
    for name in ("fps", "width", "height", "duration"):
        assert first.column(name) == second.column(name), name


def test_samples_are_selected_by_class_and_by_the_facts_of_their_videos(sharded: Path):
    first = fastvid.open(str(sharded))
    rate, seconds = float(first[0].fps), FRAMES / float(first[0].fps)
    chosen = fastvid.open(
        str(sharded),
        where=f"class = '{CLASSES[1]}' and fps = {rate} and duration between {seconds - 0.01} and {seconds + 0.01}"
        f" and width = {first[0].width} and height = {first[0].height}",
    )
    assert chosen.keys.to_pylist() == [key for key in first.keys.to_pylist() if key.startswith(CLASSES[1])]
    with pytest.raises(UsageError, match="no sample matches"):
        fastvid.open(str(sharded), where=f"duration > {seconds + 0.01}")


def test_the_loader_delivers_the_frames_and_labels_of_a_sharded_folder(sharded: Path):
    dataset = fastvid.open(str(sharded))
    loader = fastvid.ClipLoader(
        dataset,
        frames=fastvid.Uniform(4),
        spatial=fastvid.CenterCrop((256, 320)),
        global_batch_size=2,
        shuffle=True,
        device="cpu",
    )
    seen = []
    for batch in loader:
        assert batch.video.shape == (2, 3, 4, 256, 320)
        seen += list(zip(batch.key, batch.label.tolist(), strict=True))
    assert sorted(seen) == [(f"{name}/v{n}", label) for label, name in enumerate(CLASSES) for n in range(2)]
