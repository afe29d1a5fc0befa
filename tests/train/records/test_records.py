"""Records of a run: metrics files, lineage, strategies' waits, speed, the report page."""

import json
import math
import re
import resource
import time

import torch

from fastvid.load.batch.batch import Batch
from fastvid.runtime.processes import World
from fastvid.runtime.values import json_text
from fastvid.train.loop.strategy import Strategy, build_strategy
from fastvid.train.parts.replica import Lineage
from fastvid.train.records import records as metrics
from fastvid.train.records.records import METRICS_FILE, Exposure, Recorder, Telemetry
from fastvid.train.run import run_report as report
from tests.train import toy


def test_reading_skips_an_incomplete_line_of_a_killed_writer(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = metrics.Recorder(path)
    first.write("train", samples=8, loss=1.0)
    first.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "sam')
    second = metrics.Recorder(path)
    second.write("train", samples=16, loss=math.nan)
    second.close()
    assert metrics.read(path) == [
        {"kind": "train", "samples": 8, "loss": 1.0},
        {"kind": "train", "samples": 16, "loss": None},
    ]


def test_rows_that_a_full_disk_refuses_are_written_later_and_end_no_run(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    recorder = metrics.Recorder(path)
    recorder.write("train", samples=8)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # Ten more bytes fit: like a full disk, this leaves half a line.
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
        recorder.write("train", samples=16)
        recorder.write("train", samples=24)
        full = path.read_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full == before
    assert caplog.text.count("metrics cannot be written") == 1
    recorder.write("train", samples=32)
    recorder.close()
    assert [json.loads(line)["samples"] for line in path.read_text().splitlines()] == [8, 16, 24, 32]


def test_numbers_that_are_not_finite_are_null_in_json():
    value = {"eval": {"loss": math.nan, "rows": [(1.5, -math.inf)]}, "over": True, "name": "NaN", "samples": 3}
    read = {"eval": {"loss": None, "rows": [[1.5, None]]}, "over": True, "name": "NaN", "samples": 3}
    assert json_text(value, indent=1) == json.dumps(read, indent=1)


class Waiting(Strategy):
    """A strategy with a time limit of its own."""

    def __init__(self, member, *, timeout_s=60.0):
        super().__init__(member)
        self.timeout_s = timeout_s


def test_a_strategy_waits_as_long_as_the_run_unless_its_option_says_otherwise():
    alone = toy.ALONE
    name = f"{__name__}:Waiting"
    assert [build_strategy(name, alone, options, timeout_s=20.0).timeout_s for options in ({}, {"timeout_s": 7.0})] == [
        20.0,
        7.0,
    ]
    build_strategy("ddp", alone, {}, timeout_s=20.0)


def test_curve_excludes_lost_work():
    def train(samples, loss):
        return {"kind": "train", "samples": samples, "loss": loss}

    rows = [
        {"kind": "start", "samples": 0}, train(8, 3.0), {"kind": "eval", "samples": 8}, train(16, 2.0), train(24, 1.0),
        {"kind": "start", "samples": 8}, train(17, 2.5), train(24, 1.5),
    ]  # fmt: skip
    assert [(row["samples"], row["loss"]) for row in metrics.curve(rows)] == [(8, 3.0), (17, 2.5), (24, 1.5)]
    assert metrics.curve(rows, "eval") == [{"kind": "eval", "samples": 8}]


def test_stopwatch_excludes_pauses_and_measures_waiting(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    watch = metrics.Stopwatch()

    def slow():
        nonlocal now
        for _ in range(2):
            now += 0.75
            yield 1

    for _ in watch.timed(slow()):
        now += 0.25
        watch.count(8)
    with watch.paused():
        now += 3.0
    assert watch.numbers() == {"clips_per_s": 8.0, "step_ms": 1000.0, "wait_percent": 75.0}


def test_lineage_can_be_summed_over_ranks_and_steps_and_differs_for_different_positions():
    one, parts, swapped, restored = (Lineage() for _ in range(4))
    for batch in toy.ToyLoader(World()):
        one.add(0, *Lineage.of(batch))
        swapped.add(0, *Lineage.of(Batch(batch, key=tuple(reversed(batch.key)))))
    for rank in (2, 0, 1):
        for batch in toy.ToyLoader(World(rank, 3)):
            parts.add(0, *Lineage.of(batch))
    assert one.state_dict() == parts.state_dict()
    restored.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert restored.state_dict() == one.state_dict()
    assert one.epochs[0][0] == swapped.epochs[0][0]
    assert one.epochs[0][1] != swapped.epochs[0][1]


def test_speed_is_per_rank_and_against_the_peak(tmp_path):
    telemetry = Telemetry(toy.toy_config(tmp_path, peak_tflops=100.0), toy.ALONE, toy.net())
    # A kernel of 3 * 2 * 3 * 3 on 1 x 2 x 2 places into 4 channels, and 16 * 5 of the last layer; 6 for each.
    assert telemetry.flops_per_clip == 6 * (54 * 4 * 4 + 16 * 5)
    # Communication that is not measured has no column.
    assert "exposed_percent" not in telemetry.numbers({"clips_per_s": 80.0}, seconds=10.0, exposed_s=None)
    telemetry.world_size, telemetry.flops_per_clip = 4, 2_000_000_000_000
    found = telemetry.numbers({"clips_per_s": 80.0}, seconds=10.0, exposed_s=0.5)
    # 20 clips per second and rank, at 2 TFLOP each.
    assert found["clips_per_s_per_gpu"] == 20.0
    assert found["tflops_per_gpu"] == 40.0
    assert found["mfu_percent"] == 40.0
    assert found["exposed_percent"] == 5.0
    assert found["memory_gib"] > 0
    peaks = {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA GH200 480GB": 989,
        "NVIDIA L4": 121,
        "NVIDIA L40": 181,
        "NVIDIA A10G": None,
    }
    assert {device: metrics.peak_tflops(device) for device in peaks} == peaks


def test_exposed_time_starts_after_the_last_gradient(monkeypatch):
    now = iter([10.0, 10.25, 20.0, 21.0])
    monkeypatch.setattr("fastvid.train.records.records.time.perf_counter", lambda: next(now))
    model = toy.net()
    exposure = Exposure(model, torch.device("cpu"))
    model(torch.zeros(1, 3, 2, 4, 4, dtype=torch.float64)).sum().backward()
    exposure.backward_ended()
    with exposure.waiting():
        pass
    assert exposure.take() == 1.25
    assert exposure.take() == 0.0


def write_rows(folder, *rows):
    recorder = Recorder(folder / METRICS_FILE)
    for kind, values in rows:
        recorder.write(kind, **values)
    recorder.close()
    return folder


START = ("start", {"samples": 0, "world_size": 1, "checkpoint": None})
STEP = ("train", {"samples": 8, "epoch": 0, "loss": 1.0, "clips_per_s": 80.0, "step_ms": 100.0, "wait_percent": 5.0})


def write_run(folder, worlds):
    rows, samples = [], 0
    for world, speed in worlds:
        rows.append(("start", START[1] | {"samples": samples, "world_size": world}))
        for step in range(3):
            samples += 10
            told = {"samples": samples, "epoch": samples // 31, "loss": 1.0 / samples, "clips_per_s": speed + step}
            rest = {"lr": 0.1, "grad_norm": 1.0, "step_ms": 50.0, "wait_percent": 10.0, "exposed_percent": 4.0}
            rows.append(("train", told | rest))
    last = ("eval", {"samples": samples, "epoch": 0, "top1_percent": 50.0, "loss": 1.0})
    return write_rows(folder, *rows, last)


def test_efficiency_is_relative_to_the_smallest_world(tmp_path):
    run = report.RunMetrics.read(write_run(tmp_path, ((2, 99.0), (8, 319.0))))
    rows = report.efficiency([run])
    assert [row[0] for row in rows] == [2, 8]
    # Medians of 100 and 320: 50 and 40 per rank.
    assert [row[2] for row in rows] == [50.0, 40.0]
    assert [row[3] for row in rows] == [100.0, 80.0]


def test_report_shows_one_run_or_compares_two(tmp_path):
    one, two = (write_run(tmp_path / name, ((1, 10.0), (2, 19.0))) for name in ("one", "two"))
    text = report.page([one])
    assert text.count("<figure>") == 7
    assert text.count('class="bars"') == 1
    # A step takes 50 ms, of which 10 % is waiting for data and 4 % communication.
    assert [f'class="value">{value} ms<' in text for value in ("43", "5", "2")] == [True] * 3
    assert "waiting for other ranks" in text
    assert "efficiency" in text
    assert text.index("training loss") < text.index("held-out loss")
    assert "http" not in text.replace("http-equiv", "")
    both = report.page([one, two])
    assert both.count("<figure>") == 7
    assert 'class="bars"' not in both
    for name in ("one", "two"):
        assert f"<td>{name}</td>" in both
        assert both.count(f'<th class="num">{name}</th>') == 7
    with toy.refused("does not contain a run"):
        report.page([tmp_path / "none"])


def test_report_leaves_out_what_was_not_measured(tmp_path):
    text = report.page([write_rows(tmp_path / "one", START, STEP)])
    assert "waiting for other ranks" not in text
    assert [f'class="value">{value} ms<' in text for value in ("95", "5")] == [True, True]
    assert "held-out" not in text
    both = report.page([write_rows(tmp_path / "other", START), tmp_path / "one"])
    assert re.findall("<th[^>]*>([^<]+)", both.partition("<figure>")[0]) == ["run", "clips/s", "waiting for data"]
    assert re.findall("<td[^>]*>([^<]+)", both.partition("<figure>")[0])[:3] == ["other", "-", "-"]


def test_curves_are_over_clips_until_the_length_of_an_epoch_is_known(tmp_path):
    step = write_rows(tmp_path / "a", START, STEP)
    assert '<div class="across">clips</div>' in report.page([step])
    assert report.RunMetrics.read(step).curve("train", "loss") == [(8, 1.0)]
    told = write_rows(tmp_path / "b", ("start", START[1] | {"metric": "top1_percent", "samples_per_epoch": 32}), STEP)
    assert '<div class="across">epochs</div>' in report.page([told])
    assert report.RunMetrics.read(told).curve("train", "loss") == [(0.25, 1.0)]
    both = report.page([step, told])
    assert '<div class="across">epochs</div>' not in both


def test_report_of_a_run_without_steps_says_so(tmp_path):
    for rows in ((), (START,)):
        text = report.page([write_rows(tmp_path / str(len(rows)), *rows)])
        assert "No step is recorded yet." in text
        assert ("<table>" in text) == bool(rows), "a table of starts only if there are any"
    assert "No step is recorded" not in report.page([write_rows(tmp_path / "one", START, STEP)])
    with toy.refused("there is no report of a sweep", "read its results.json"):
        report.page([write_rows(tmp_path / "sweep", ("start", {"visits": 0}), ("eval", {"model": 0}))])
