"""The GPU benchmark: a rehearsal on a CPU runs every section, and what it proves can fail."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from bench import __main__ as command
from bench.gpu import bundle, gpu, pack
from bench.gpu.conformance import _wanted, clip_of, digests, planes_of, rgb_of, spoiled, wrong_frames
from bench.gpu.gpu import PROOFS, judge, line
from bench.gpu.rivals import RIVALS
from bench.gpu.settings import MANIFEST, REFERENCE, Settings
from fastvid.decode.pyav import PyAvDecoder
from fastvid.errors import UsageError
from tests.datasets import make_clip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    footage = folder / "footage"
    footage.mkdir()
    for number in range(6):
        make_clip(footage / f"{number}.mp4", frames=20 + number, size="128x96", filters="rotate=a=t")
    words = ["--clips", "6", "--lines", "64", "--clip-seconds", "0.8", "--footage", str(footage)]
    assert command.main(["gpu", "--pack", str(folder / "pack"), *words]) == 0
    return folder / "pack"


@pytest.mark.soak
def test_a_pack_contains_odd_sizes_and_the_digests_of_every_frame(data: Path) -> None:
    rows = json.loads((data / MANIFEST).read_text())["datasets"]
    assert [row["name"] for row in rows] == ["compact-64", "intra-64", "hevc-64", "copy-86x64", "copy-170x96"]
    assert [(row["width"], row["height"]) for row in rows[3:]] == [(86, 64), (170, 96)]
    for name, dataset in Settings(data).datasets().items():
        frames = sum(dataset[number].num_frames for number in range(len(dataset)))
        assert np.load(data / REFERENCE / f"{name}.npy").shape == (frames, 32)


@pytest.mark.soak
def test_a_rehearsal_runs_every_section_and_meets_every_proof(data: Path, tmp_path: Path) -> None:
    assert command.main(["gpu", "--all", "--fake", "--data", str(data), "--out", str(tmp_path)]) == 0, (
        tmp_path / "gpu.log"
    ).read_text()[-3000:]
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert list(record["sections"]) == sorted(gpu.LIMITS)
    assert set(record["ended"].values()) == {None}
    verdicts = record["verdicts"]
    assert len(verdicts) == len(PROOFS)
    assert all(row["met"] for row in verdicts if row["met"] is not None)
    # A rehearsal claims nothing about a GPU.
    assert {row["value"] for row in verdicts if row["met"] is None} == {one.value for one in PROOFS if one.card}
    assert record["fake"] is True
    assert len(record["sections"]["lanes"]["sweep"]) > 6
    assert {row["decoder"] for row in record["sections"]["conformance"]["clips"]} == {"fake-planes", "fake-rgb"}
    for contest in record["sections"]["rivals"]["contests"]:
        named = [*(one["name"] for one in contest["contenders"]), *contest["refused"]]
        assert sorted(named) == sorted(["fake-planes", "fake-rgb", *RIVALS])


@pytest.mark.soak
def test_a_frame_that_differs_from_its_packed_digest_fails_a_proof(data: Path, tmp_path: Path, capsys) -> None:
    copy = tmp_path / "pack"
    shutil.copytree(data, copy)
    reference = copy / REFERENCE / "intra-64.npy"
    packed = np.load(reference)
    packed[3, 0] ^= 1
    np.save(reference, packed)
    words = ["gpu", "--only", "conformance", "--fake", "--data", str(copy), "--out", str(tmp_path / "out")]
    assert command.main(words) == 1
    assert "MISSED     proof conformance: PyAV's frames have the packed digests: 1" in capsys.readouterr().out


@pytest.mark.soak
def test_a_section_that_takes_too_long_is_stopped_and_fails(data: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(gpu.LIMITS, "pixels", 0.01)
    words = ["gpu", "--only", "pixels", "--fake", "--data", str(data), "--out", str(tmp_path)]
    # The section, and the one number that a rehearsal judges.
    assert command.main(words) == 2
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["ended"]["pixels"].startswith("stopped after its limit")


@pytest.mark.soak
def test_broken_decoders_are_refused_and_a_right_one_is_not(data: Path) -> None:
    dataset, decoder = Settings(data).smallest()[1], PyAvDecoder()
    length = dataset[0].num_frames
    clip = clip_of(dataset, 0, np.arange(length))
    planes = planes_of(decoder, clip)
    every, wanted = rgb_of(clip, planes), _wanted(length)
    assert wrong_frames(every[:, wanted], every, wanted) == (0, 0.0)
    broken = spoiled(every, wanted)
    assert len(broken) == 8
    for fault, frames in broken.items():
        assert wrong_frames(frames, every, wanted)[0] > 0, fault
    # One bit of one frame changes one digest.
    before = digests(planes)
    planes.v[2, 0, 0] ^= 1
    assert (digests(planes) != before).any(axis=1).nonzero()[0].tolist() == [2]


def test_a_number_that_was_not_measured_misses_its_bound() -> None:
    found = {"lanes": {"failed": 0, "nvdec_percent": 94.9, "frames_per_s": 20_000}}
    rows = {row["value"]: row for row in judge(["lanes"], found, fake=False)}
    assert {name: row["met"] for name, row in rows.items()} == {
        "failed": True,
        "nvdec_percent": False,
        "frames_per_s": True,
        "host_cores": False,
    }
    assert "not measured" in line(rows["host_cores"])
    assert line(rows["frames_per_s"]).startswith("met        goal ")
    assert [row["met"] for row in judge(["lanes"], found, fake=True)] == [True, None, None, None]


@pytest.mark.soak
def test_a_pack_that_is_too_large_or_has_no_data_is_refused(data: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    assert command.main(["gpu", "--all", "--fake", "--data", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "--pack" in capsys.readouterr().err
    with pytest.raises(UsageError, match="the folder exists"):
        pack.pack(tmp_path, data, clips=1, lines=[64], seconds=1.0)


@pytest.mark.soak
def test_a_bundle_has_what_a_stranger_needs_and_a_limit(tmp_path: Path, monkeypatch) -> None:
    added = tmp_path / "wheels"
    added.mkdir()
    (added / "one-1-py3-none-any.whl").write_bytes(b"")
    words = ["--clips", "2", "--lines", "64", "--clip-seconds", "0.8", "--wheels", str(added)]
    assert command.main(["gpu", "--bundle", str(tmp_path / "a.tar"), *words]) == 0
    with tarfile.open(tmp_path / "a.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"constraints.txt", "pack", "run.sh", "wheels"}
    assert len(list((tmp_path / "a" / "wheels").iterdir())) == 2
    assert os.access(tmp_path / "a" / "run.sh", os.X_OK)
    assert set(Settings(tmp_path / "a" / "pack").datasets()) > {"compact-64", "intra-64", "hevc-64"}
    monkeypatch.setattr(bundle, "LIMIT_MIB", 0.1)
    assert command.main(["gpu", "--bundle", str(tmp_path / "b.tar"), *words]) == 1
    assert not (tmp_path / "b.tar").exists()


def _run(folder: Path, programs: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the bundle's script where only these programs, and dirname, are found."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    shutil.copy(Path(bundle.__file__).with_name("run.sh"), folder)
    for name, text in {"dirname": f'exec {shutil.which("dirname")} "$@"', **programs}.items():
        (bin_folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_folder / name).chmod(0o755)
    command = ["/bin/sh", folder / "run.sh"]
    return subprocess.run(command, env={"PATH": str(bin_folder)}, capture_output=True, text=True, check=False)


_PYTHON = f'exec {sys.executable} "$@"'
_NO_NVDEC = f'case "$2" in *nvcuvid*) exit 1;; esac; {_PYTHON}'


@pytest.mark.parametrize(
    ("programs", "sentence"),
    [
        ({}, "python3 is no Python 3.11"),
        ({"python3": _PYTHON}, "no NVIDIA GPU: "),
        ({"python3": _PYTHON, "nvidia-smi": "echo No devices were found; exit 6"}, "no NVIDIA GPU: "),
        ({"python3": _NO_NVDEC, "nvidia-smi": "echo GPU 0"}, "no NVDEC library: libnvcuvid.so.1"),
        ({"python3": "", "nvidia-smi": "echo GPU 0"}, "no C compiler"),
    ],
)
def test_a_stranger_is_told_in_a_sentence_what_is_missing(tmp_path: Path, programs, sentence) -> None:
    done = _run(tmp_path, programs)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"run.sh: {sentence}")
    assert not (tmp_path / "venv").exists()
