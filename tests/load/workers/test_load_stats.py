"""Loader statistics, and the reuse of memory."""

import json
from types import SimpleNamespace

import pytest

from fastvid.load.clips.crops import CenterCrop
from fastvid.load.clips.sampling import Segments
from fastvid.load.order.draws import Draws
from fastvid.load.stats import Counters, LoaderStats
from fastvid.load.workers.engine import BatchPipeline
from tests.load.fakes import FakeDataset, fake
from tests.load.loaders import clip_loader
from tests.load.tools import video


def make(**options):
    standard = {"frames": Segments(3, jitter=False), "spatial": CenterCrop(16), "global_batch_size": 8}
    standard |= {"decoder": fake(), "num_threads": 2}
    return clip_loader(FakeDataset(80), **standard | options)


def spent(**seconds):
    return LoaderStats(total=Counters(**{f"{name}_seconds": value for name, value in seconds.items()}))


@pytest.mark.parametrize(
    ("threads", "seconds", "verdict"),
    [
        (0, {"wait": 2, "compute": 98, "decode": 500}, "compute-bound: 2% of the time is spent waiting for data"),
        (2, {"wait": 2, "compute": 98, "decode": 50}, "; the loader could deliver 4.0 times as much"),
        (0, {"fill": 3}, "nothing measured yet: the verdict needs two batches of one iteration"),
    ],
)
def test_verdict_of_a_run_that_does_not_wait(threads, seconds, verdict):
    stats = spent(**seconds)
    stats.num_threads = threads
    assert stats.verdict().endswith(verdict)


EIGHT = {"num_threads": 2, "cores": 2, "num_frames": 8}


@pytest.mark.parametrize(
    ("facts", "seconds", "counts", "advice"),
    [
        ({}, {"decode": 90, "fetch": 5, "finish": 5}, {}, "60% of the time is spent waiting, 90% of it on decode; "),
        ({}, {"fetch": 9, "decode": 1}, {}, "put the shards on faster storage"),
        ({"num_threads": 2, "cores": 8}, {"decode": 190}, {}, "raise num_threads from 2 to 8"),
        ({"num_threads": 4, "cores": 4}, {"decode": 80}, {}, "threads are busy for only 20% of the time"),
        (EIGHT, {"decode": 190}, {"packets": 2600, "clips": 100}, "intra: 8 packets per clip instead of 26"),
        (EIGHT, {"decode": 190}, {"packets": 800, "clips": 100}, "use more cores (num_threads), or a GPU"),
        ({"num_threads": 2, "cores": 2}, {"fetch": 190}, {"requests": 700, "clips": 100}, "(7 reads per clip)"),
        ({"num_threads": 2, "cores": 2}, {"finish": 190}, {}, "convert on the device"),
        ({"num_threads": 2, "cores": 2}, {"copy": 90, "wait": 10}, {}, "copy-bound: 90% of the time"),
    ],
)
def test_verdict_names_the_most_useful_change(facts, seconds, counts, advice):
    stats = spent(**{"wait": 60, "compute": 40, **seconds})
    stats.total.compute_seconds = 100 - stats.total.wait_seconds
    for name, value in facts.items():
        setattr(stats, name, value)
    for name, value in counts.items():
        setattr(stats.total, name, value)
    verdict = stats.verdict()
    assert advice in verdict
    if "data-bound" in verdict:
        assert "with free data the run would be 2.5 times as fast" in verdict


def test_stats_file_gets_a_json_line_per_batch(tmp_path):
    path = tmp_path / "stats.jsonl"
    for _ in range(2):
        list(make(stats_file=path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["position"] for line in lines] == list(range(8, 81, 8)) * 2
    assert [line["total"]["clips"] for line in lines] == list(range(8, 81, 8)) * 2
    assert {line["step"]["clips"] for line in lines} == {8}
    assert lines[-1]["verdict"].startswith(("data-bound", "compute-bound"))
    whole = sum(sum(8 + frame % 5 for frame in range(n)) for n in FakeDataset(80).lengths)
    assert lines[-1]["total"]["bytes_whole"] == whole
    assert 0 < lines[-1]["total"]["bytes_read"] <= whole


def test_live_view_shows_rates_and_stages(capsys):
    # Without a handler of logs, as in a program that sets none up.
    list(make(show_stats=True))
    shown = capsys.readouterr().err
    assert all(text in shown for text in ("epoch 0, 80/80 clips", "decode", "skipped: none"))


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock that the loader's own thread reads by the constant `now`."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("fastvid.load.loader.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_cached_measures_the_ceiling_and_keeps_the_position(clock):
    loader = make()
    next(iter(loader))
    state = loader.state_dict()
    starts = []
    for batch in loader.cached(2):
        clock.now += 2.0
        starts.append(batch.start)
    assert starts == [8, 16] * 4 + [8]
    assert loader.state_dict() == state
    assert loader.stats.ceiling == 8 / 2.0
    assert [batch.start for batch in loader] == list(range(8, 80, 8))


def test_wait_and_compute_seconds_add_up_to_wall_clock_time(clock, monkeypatch):
    def slow(run, timeout):
        clock.now += 0.25
        return plain(run, timeout)

    plain = BatchPipeline.next
    monkeypatch.setattr(BatchPipeline, "next", slow)
    loader = make()
    for _ in loader:
        clock.now += 2.0
    total = loader.stats.total
    # Ten batches: the first fills the queue, and the time after the last is not between two batches.
    assert (total.fill_seconds, total.wait_seconds, total.compute_seconds) == (0.25, 9 * 0.25, 9 * 2.0)


def test_counts_are_exact_and_the_step_is_the_last_batch():
    loader = make()
    for number, _ in enumerate(loader):
        assert loader.stats.step.clips == 8
        assert loader.stats.step.batches == 1
        assert loader.stats.total.clips == 8 * (number + 1)
    total = loader.stats.total
    lengths = FakeDataset(80).lengths
    shown = (Segments(3, jitter=False).draw(video(length), Draws(0, 0, 0)) for length in lengths)
    assert total.packets == sum(len(set(frames.tolist())) for frames in shown)
    assert total.packets_from_keys == total.packets  # every fake packet is a key packet
    assert total.requests == 80
    row = total.as_dict()
    assert row["clips"] == 80
    assert row["skips"] == {}
