"""The example of several labels learns them, continues when started again, and is evaluated by the command."""

import json
import sys
from pathlib import Path

import pytest

from fastvid.cli.main import main as fastvid_command
from fastvid.train import fit
from fastvid.train.records import records as metrics
from tests.datasets import REPOSITORY, make_clip, pack
from tests.examples import kit
from tests.train.tasks.own import FILTERS, LABELS


def test_the_model_learns_resumes_and_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = [make_clip(tmp_path / f"{n}.mp4", size="64x64", filters=FILTERS[n]) for n in range(4)]
    samples = [(f"clip{n:02d}", kinds[n % 4], 0) for n in range(32)]
    columns: dict[str, list[object]] = {
        "split": ["train"] * 24 + ["val"] * 8, "labels": [LABELS[n % 4] for n in range(32)]
    }  # fmt: skip
    pack(tmp_path / "shards", [samples], classes=("jump", "wave"), columns=columns)
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    example = kit.load("multi_label")
    url, out = str(tmp_path / "shards"), tmp_path / "run"
    assert fit(example.recipe(url, str(out), epochs=2)).finished
    score = fit(example.recipe(url, str(out), epochs=20)).score
    assert score is not None
    assert score.numbers["map_percent"] == 100
    rows = metrics.read(out / "metrics.jsonl")
    assert [row["samples"] for row in rows if row["kind"] == "start"] == [0, 2 * 24]
    capsys.readouterr()
    words = [str(REPOSITORY / "examples" / "multi_label.py"), f"run.out={out}", f"data.path={url}"]
    assert fastvid_command(["eval", *words, "--protocol", "3x1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["map_percent"], found["views"]) == (100, 3)
    sys.modules.pop("multi_label", None)
