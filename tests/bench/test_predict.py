"""Model files, predictions and their comparison with measured runs."""

import argparse
import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest

from bench.scaling import predict
from bench.scaling.model import (
    ClusterModel,
    Compute,
    Gradients,
    NetworkLink,
    SyncSpec,
    Topology,
    Workload,
    predict_step,
    ring,
)
from bench.scaling.model_file import load_model
from fastvid.errors import UsageError

MODELS = Path(predict.__file__).parent / "models"
SUMMIT = MODELS / "summit.toml"


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    predict.add_arguments(parser)
    return predict.run(parser.parse_args(words))


@pytest.fixture(scope="module")
def summit():
    return predict.predict(load_model(SUMMIT), draws=300)


def test_the_fitted_summit_step_matches_the_published_time_on_six_gpus(summit):
    raw = load_model(SUMMIT).raw
    clips = raw["workload"]["clips_per_epoch"]["value"] * raw["workload"]["epochs"]["value"]
    published = 49 * 3600 + 55 * 60
    assert abs(raw["compute"]["step_seconds"]["value"] / (published / (clips / 48)) - 1) < 1e-4
    row = next(row for row in summit["rows"] if row["gpus"] == 6 and row["strategy"] == "ddp")
    assert abs(row["train_seconds"]["p50"] / published - 1) < 1e-4
    # For all draws the calibrated computation reproduces the measured step.
    assert row["train_seconds"]["p95"] / row["train_seconds"]["p05"] - 1 < 1e-9


def test_every_summit_input_has_a_source_and_exactly_one_is_fitted():
    def walk(table: object, path: str) -> list[tuple[str, object]]:
        if isinstance(table, dict) and not {"value", "low", "values"} & set(table):
            return [leaf for key, value in table.items() for leaf in walk(value, f"{path}.{key}")]
        return [(path, table)]

    raw = load_model(SUMMIT).raw
    inputs = {key: raw[key] for key in ("workload", "gradients", "compute", "topology", "data")}
    leaves = walk(inputs, "summit")
    assert len(leaves) > 12
    assert [path for path, leaf in leaves if not (isinstance(leaf, dict) and leaf.get("source"))] == []
    assert [path for path, leaf in leaves if "FITTED" in leaf["source"]] == ["summit.compute.step_seconds"]
    assert all(reference["source"] for reference in raw["reference"])


def test_every_prediction_is_labelled_predicted(summit):
    assert summit["label"] == "predicted"
    assert all(row["label"] == "predicted" for row in summit["rows"] + summit["references"])
    assert predict.table(summit).startswith("PREDICTED, not measured: summit-tsm")


def test_predictions_depend_on_the_seed_only(tmp_path):
    files = []
    for seed in ("0", "0", "1"):
        files.append(tmp_path / f"{len(files)}.json")
        assert command("--model", str(SUMMIT), "--draws", "50", "--seed", seed, "--json", str(files[-1])) == 0
    first, again, other = (path.read_text() for path in files)
    assert first == again
    assert json.loads(first)["rows"] != json.loads(other)["rows"]


def test_the_template_model_can_be_predicted():
    report = predict.predict(load_model(MODELS / "template.toml"), draws=20)
    assert {row["clips_per_step"] for row in report["rows"]} == {1024}  # the batch does not grow with the GPUs


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("workload.epoch", "3", "workload has unknown epoch; known are clips_per_epoch, epochs"),
        ("compute.seconds", "3", "compute has unknown seconds"),
        ("workload.epochs", '"many"', r"got `str` - at `\$.workload\[\.\.\.\]`"),
        ("workload.epochs", "{low = 2, high = 1}", "low is 2.0 and high is 1.0"),
        ("workload.epochs", "{low = 0, high = 1, scale = 'log'}", "on a log scale"),
        ("workload.epochs", "{low = 2}", "a number of low"),
        ("workload.epochs", "inf", r"at `\$.workload"),
        ("workload.clips_per_gpu", "8.5", "workload.clips_per_gpu is 8.5, must be an integer"),
        ("workload.global_batch", "64", "set exactly one of them above 0"),
        ("topology.intra", "{points = [[2, 1, 1], [2, 2, 1.5]], latency_seconds = 1}", "points and also"),
        ("topology.inter", "{latency_seconds = 1}", "needs bytes_per_second or points - at"),
        ("predict.algorithms", '["star"]', r"'star' - at `\$.predict.algorithms\[0\]`"),
        ("predict.gpus", "[]", r"length >= 1 - at `\$.predict.gpus`"),
        ("compute.step_seconds", "1e-5", "shorter than"),
        ("workload.epochs", "[", "not valid TOML"),
    ],
)
def test_a_wrong_model_file_is_refused_with_its_name_and_key(name, value, message):
    with pytest.raises(UsageError, match=message) as caught:
        command("--model", str(SUMMIT), "--set", f"{name}={value}")
    assert caught.value.where == {"file": SUMMIT}


def measurements() -> dict[str, object]:
    """Return the measurements of a cluster with one GPU per node that behaves exactly like the model."""
    topology = Topology(1, NetworkLink(1e9, 1e-4), NetworkLink(1e9, 1e-4))
    cluster = ClusterModel(
        Workload(1, 1, clips_per_gpu=4), Gradients(5_000_000), Compute(0.05, 4, backward_fraction=0.6), topology
    )
    return {
        "schema": predict.MEASUREMENTS,
        "machine": {"cpu": "none"},
        "ranks_per_node": 1,
        "workload": {"clips_per_rank": 4, "parameters": 5_000_000, "backward_fraction": 0.6},
        "local_steps": [{"ranks": ranks, "seconds": [0.05, 0.05]} for ranks in (1, 2, 4)],
        "all_reduces": [
            {"link": "inter", "ranks": ranks, "bytes": size, "seconds": [float(ring(ranks, size, topology))]}
            for ranks in (2, 4)
            for size in (65536, 26214400)
        ],
        "runs": [
            {
                "ranks": ranks,
                "strategy": name,
                "seconds_per_step": float(predict_step(cluster, ranks, SyncSpec.parse(name), "ring").seconds),
            }
            for ranks in (1, 2, 4)
            for name in ("ddp", "kavg:4")
        ],
    }


def test_measurements_made_by_the_model_are_predicted_exactly():
    report = predict.validate(measurements())
    assert report["largest_error"] < 1e-6
    assert [(row["ranks"], row["strategy"]) for row in report["rows"]] == [
        (ranks, name) for name in ("ddp", "kavg:4") for ranks in (1, 2, 4)
    ]
    for row in report["rows"]:
        assert np.isclose(row["predicted_efficiency"], row["measured_efficiency"])
        assert (row["measured_efficiency"] == 1.0) == (row["ranks"] == 1)


def test_measured_runs_never_influence_predictions():
    slow = measurements()
    for run in slow["runs"]:
        run["seconds_per_step"] *= 2
    before, after = predict.validate(measurements()), predict.validate(slow)
    for one, two in zip(before["rows"], after["rows"], strict=True):
        assert one["predicted_step_seconds"] == two["predicted_step_seconds"]
        assert np.isclose(two["relative_error"], -0.5)


def test_a_measured_loader_limits_the_step():
    starved = measurements() | {"loaders": [{"ranks": ranks, "clips_per_second": 40.0} for ranks in (1, 2, 4)]}
    row = predict.validate(starved)["rows"][2]
    assert (row["ranks"], row["strategy"]) == (4, "ddp")
    assert np.isclose(row["predicted_step_seconds"], 4 * 4 / 40.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other/1"}, r"Invalid enum value 'other/1' - at `\$.schema`"),
        ({"extra": 1}, "Object contains unknown field `extra`"),
        ({"workload": {"parameters": 1}}, r"missing required field `clips_per_rank` - at `\$.workload`"),
        ({"local_steps": [{"ranks": 1, "seconds": 0.1}]}, "runs has 2 ranks, but local_steps has only 1"),
        ({"local_steps": [{"ranks": 1, "seconds": []}]}, r"length >= 1 - at `\$.local_steps\[0\].seconds`"),
        ({"local_steps": [{"ranks": 1, "seconds": [math.nan]}]}, r"at `\$.local_steps\[0\].seconds\[0\]`"),
        ({"local_steps": [{"ranks": 1, "seconds": -0.1}]}, r"> 0.0 - at `\$.local_steps\[0\].seconds`"),
        ({"all_reduces": []}, "no link can be fitted"),
        (
            {"all_reduces": [{"link": "wifi", "ranks": 2, "bytes": 1, "seconds": 1}]},
            r"Invalid enum value 'wifi' - at `\$.all_reduces\[0\].link`",
        ),
        ({"runs": [7]}, r"Expected `object`, got `int` - at `\$.runs\[0\]`"),
    ],
)
def test_invalid_measurements_are_refused_naming_the_part(change, message):
    with pytest.raises(UsageError, match=message):
        predict.validate(measurements() | change)


def test_the_command_compares_a_file_of_measurements(tmp_path, capsys):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(copy.deepcopy(measurements())))
    assert command("--validate", str(path), "--json", str(tmp_path / "out.json")) == 0
    assert "ranks sync" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["schema"] == predict.VALIDATION
    path.write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        command("--validate", str(path))
