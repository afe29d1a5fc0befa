"""The GPU benchmark: a rehearsal on a CPU runs every section, and what it proves can fail."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from bench import __main__ as command
from bench.gpu import gpu, pack
from bench.gpu.conformance import _wanted, clip_of, digests, planes_of, rgb_of, spoiled, wrong_frames
from bench.gpu.gpu import PROOFS, judge
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
    verdicts = {verdict.proof.value: verdict for verdict in judge(["lanes"], found, fake=False)}
    assert {name: verdict.met for name, verdict in verdicts.items()} == {
        "failed": True,
        "nvdec_percent": False,
        "frames_per_s": True,
        "host_cores": False,
    }
    assert "not measured" in verdicts["host_cores"].line()
    assert verdicts["frames_per_s"].line().startswith("met        goal ")
    assert [verdict.met for verdict in judge(["lanes"], found, fake=True)] == [True, None, None, None]


@pytest.mark.soak
def test_a_pack_that_is_too_large_or_has_no_data_is_refused(data: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    assert command.main(["gpu", "--all", "--fake", "--data", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "--pack" in capsys.readouterr().err
    with pytest.raises(UsageError, match="the folder exists"):
        pack.pack(tmp_path, data, clips=1, lines=[64], seconds=1.0)
