"""Speed metrics of a run, and the report page."""

import pytest
import torch

from fastvid.errors import UsageError
from fastvid.runtime.processes import World
from fastvid.train.ranks import Member
from fastvid.train.records.records import METRICS_FILE, Exposure, Recorder, Telemetry
from fastvid.train.run import run_report as report
from tests.train import toy


def test_speed_is_per_rank_and_against_the_peak():
    found = Telemetry(4, torch.device("cpu"), flops_per_clip=2_000_000_000_000, peak=100.0).numbers(
        {"clips_per_s": 80.0}, seconds=10.0, exposed_s=0.5
    )
    # 20 clips per second and rank, at 2 TFLOP each.
    assert found["clips_per_s_per_gpu"] == 20.0
    assert found["tflops_per_gpu"] == 40.0
    assert found["mfu_percent"] == 40.0
    assert found["exposed_percent"] == 5.0
    assert found["memory_gib"] > 0


def test_flops_of_a_toy_model_are_counted(tmp_path):
    model = toy.net()
    telemetry = Telemetry.of(toy.toy_config(tmp_path), Member(World(), torch.device("cpu")), model)
    # A kernel of 3 * 2 * 3 * 3 on 1 x 2 x 2 places into 4 channels, and 16 * 5 of the last layer; 6 for each.
    assert telemetry.flops_per_clip == 6 * (54 * 4 * 4 + 16 * 5)


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


def write_run(folder, worlds):
    recorder = Recorder(folder / METRICS_FILE)
    samples = 0
    for world, speed in worlds:
        recorder.write("start", samples=samples, world_size=world, checkpoint=None)
        for step in range(3):
            samples += 10
            recorder.write(
                "train", samples=samples, epoch=samples // 31, loss=1.0 / samples, lr=0.1, grad_norm=1.0, step_ms=50.0,
                clips_per_s=speed + step, wait_percent=10.0, exposed_percent=4.0,
            )  # fmt: skip
    recorder.write("eval", samples=samples, epoch=0, top1_percent=50.0, loss=1.0)
    recorder.close()
    return folder


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
    assert text.count("<figure>") == 6
    assert text.count('class="bars"') == 1
    # A step takes 50 ms, of which 10 % is waiting for data and 4 % communication.
    assert [f'class="value">{value} ms<' in text for value in ("43", "5", "2")] == [True] * 3
    assert "exposed communication" in text
    assert "efficiency" in text
    assert "http" not in text.replace("http-equiv", "")
    both = report.page([one, two])
    assert both.count("<figure>") == 6
    assert 'class="bars"' not in both
    for name in ("one", "two"):
        assert f"<td>{name}</td>" in both
        assert both.count(f'<th class="num">{name}</th>') == 6
    with pytest.raises(UsageError, match="does not contain a run"):
        report.page([tmp_path / "none"])
