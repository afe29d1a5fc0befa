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


def worlds(rate: float = math.inf) -> list[dict[str, object]]:
    """Return the measured worlds of a cluster with one GPU per node that behaves exactly like the model."""
    topology = Topology(1, NetworkLink(1e9, 1e-4), NetworkLink(1e9, 1e-4))
    cluster = ClusterModel(Workload(1, 1, clips_per_gpu=4), Gradients(5_000_000), Compute(0.05, 4), topology)
    found = []
    for size in (1, 2, 4):
        sizes = (65536, 26214400) if size > 1 else ()
        steps = {
            name: float(predict_step(cluster, size, SyncSpec.parse(name), "ring").seconds) for name in ("ddp", "kavg:4")
        }
        rank = {
            "local_world_size": 1,
            "step_seconds": [0.05, 0.05],
            "load": {"clips_per_second": rate / size},
            "all_reduces": [{"bytes": one, "seconds": [float(ring(size, one, topology))]} for one in sizes],
            "strategies": {name: {"train_seconds": [seconds]} for name, seconds in steps.items()},
        }
        ranks = [copy.deepcopy(rank) for _ in range(size)]
        found.append({"world_size": size, "clips_per_rank": 4, "parameters": 5_000_000, "machine": {}, "ranks": ranks})
    return found


def test_measurements_made_by_the_model_are_predicted_exactly():
    report = predict.beside_measured(worlds())
    assert report["largest_error"] < 1e-6
    assert [(row["ranks"], row["strategy"]) for row in report["rows"]] == [
        (ranks, name) for name in ("ddp", "kavg:4") for ranks in (1, 2, 4)
    ]
    for row in report["rows"]:
        assert np.isclose(row["predicted_efficiency"], row["measured_efficiency"])
        assert (row["measured_efficiency"] == 1.0) == (row["ranks"] == 1)
    assert predict.comparison(report).count("\n") == 6
    # One rank alone says nothing about links.
    assert predict.beside_measured(worlds()[:1]) is None


def test_measured_runs_never_influence_predictions():
    slow = worlds()
    for rank in (rank for world in slow for rank in world["ranks"]):
        for times in rank["strategies"].values():
            times["train_seconds"][0] *= 2
    before, after = predict.beside_measured(worlds()), predict.beside_measured(slow)
    for one, two in zip(before["rows"], after["rows"], strict=True):
        assert one["predicted_step_seconds"] == two["predicted_step_seconds"]
        assert np.isclose(two["relative_error"], -0.5)


def test_measured_loaders_limit_the_step():
    row = predict.beside_measured(worlds(40.0))["rows"][2]
    assert (row["ranks"], row["strategy"]) == (4, "ddp")
    assert np.isclose(row["predicted_step_seconds"], 4 * 4 / 40.0)
