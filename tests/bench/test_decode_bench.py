"""The decode benchmark: all contenders do the same work, deliver the right frames, and use their best settings."""

import json
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import pytest

from bench import __main__ as command
from bench.common.footage import SAMPLINGS
from bench.decode import contest
from bench.decode.rivals import KNOBS, library_of, rival
from fastvid.tune.measure import (
    Contender,
    Corpus,
    FastvidRunner,
    fastvid,
    measure,
    parse_sampling,
    sample_frames,
)
from tests.datasets import pack


@pytest.fixture(scope="module")
def corpus(videos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "compact"
    samples = [
        (f"v{frames}", videos.textured("compact", size=(256, 320), frames=frames).data, 0) for frames in (40, 70)
    ]
    pack(folder, [samples])
    return Corpus(str(folder), "tsn8")


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_frames_of_a_clip_follow_the_sampling(sampling):
    rng = np.random.default_rng(0)
    for num_frames in (1, 7, 61, 300):
        frames = sample_frames(num_frames, sampling, rng)
        assert len(frames) == {"tsn8": 8, "dense16x4": 16, "dense32x2": 32}[sampling]
        assert (np.diff(frames) >= 0).all()
        assert frames[0] >= 0
        assert frames[-1] < num_frames
    stride = parse_sampling(sampling)[1]
    if stride is not None:
        assert set(np.diff(sample_frames(300, sampling, rng)).tolist()) == {stride}


class OneFrameLate(FastvidRunner):
    """Delivers the frame after each requested one."""

    def decode(self, request):
        last = self._dataset[request.sample].num_frames - 1
        return super().decode(type(request)(**fields(request, np.minimum(request.frames + 1, last))))


def fields(request, frames):
    return {"sample": request.sample, "frames": frames, "box": request.box, "size": request.size}


def test_wrong_frames_are_detected(corpus):
    right = fastvid(corpus, 1)
    assert contest.check(right, corpus) is None
    late = Contender("late", {}, partial(OneFrameLate, corpus, "rgb", "memory"), 1)
    assert "wrong frame" in contest.check(late, corpus)


def test_an_error_in_a_worker_ends_the_measurement():
    class Fails:
        def __call__(self, task, /):
            raise ValueError(f"task {task}")

    with pytest.raises(ValueError, match="task"):
        measure([Contender("fails", {}, Fails, 2)], 4, 1)


@pytest.mark.parametrize("name", KNOBS)
def test_rivals_deliver_the_same_pictures(corpus, name):
    package = library_of(name)
    # Do not import it here: torchcodec may need an FFmpeg that its rival locates first.
    if find_spec(package) is None:
        pytest.skip(f"could not import {package!r}: it is not installed")
    if "blocks" in name and tuple(map(int, version("torchcodec").split(".")[:2])) < (0, 17):
        pytest.skip("needs the blocks of torchcodec 0.17")
    settings = {knob: values[0] for knob, values in KNOBS[name].items()}
    for knob, values in KNOBS[name].items():
        for value in values:
            assert contest.check(rival(name, corpus, settings | {knob: value}, 1, False), corpus) is None


def test_chosen_videos_give_the_same_clips_in_every_encoding(corpus, videos, tmp_path):
    default = tmp_path / "default"
    pack(
        default,
        [[(key, videos.textured("pyramid", size=(256, 320), frames=int(key[1:])).data, 0) for key in ("v70", "v40")]],
    )
    keys = ("v40", "v70")
    one, other = (
        [(found.dataset.key(request.sample), request.frames.tolist(), request.box) for request in found.requests]
        for found in (Corpus(folder, "tsn8", keys=keys) for folder in (str(default), corpus.folder))
    )
    assert one == other


def test_crops_fit_into_the_smallest_video(corpus, videos, tmp_path):
    sizes = {"large": (256, 320), "small": (90, 82)}
    pack(tmp_path, [[(key, videos.textured("compact", size=size).data, 0) for key, size in sizes.items()]])
    small = Corpus(str(tmp_path), "tsn8")
    assert {request.size for request in small.requests} == {(82, 82)}
    assert contest.check(fastvid(small, 1), small) is None
    assert {request.size for request in corpus.requests} == {(224, 224)}


def test_the_command_records_all_contenders(corpus, tmp_path, capsys):
    rivals = ["pyav", "pyav kept open"]
    result = tmp_path / "decode.json"
    once = [word for name in ("rounds", "sweep-rounds", "repeats", "workers") for word in (f"--{name}", "1")]
    options = [*once, "--installed", "--sampling", "tsn8", "--data", corpus.folder, "--json", str(result)]
    assert command.main(["decode", *options, "--rivals", *rivals]) == 0
    (row,) = json.loads(result.read_text())["rows"]
    assert [entry["name"] for entry in row["contenders"]] == ["fastvid"] * 4 + ["libavcodec alone"] + rivals
    for entry in row["contenders"][:4]:
        assert entry["share_of_floor"]["wall"] > 0
    assert row["packets_a_clip"]["planned"] < row["packets_a_clip"]["from_keys"]
    shown = capsys.readouterr().out
    assert "packets per clip" in shown
    assert "goal met" in shown or "goal MISSED" in shown
    assert row["goal"]["rival"] in {entry["label"] for entry in row["contenders"][5:]}
    assert all(entry["megabytes_kept"] is not None for entry in row["contenders"][5:])
    for name in rivals:
        swept = {tuple(entry["settings"].items()) for entry in row["sweeps"][name]}
        assert len(swept) >= len(KNOBS[name])


def test_the_command_without_a_benchmark_or_data_fails_with_usage(capsys):
    assert command.main([]) == 2
    assert command.main(["--help"]) == 0
    assert "decode" in capsys.readouterr().out
    assert command.main(["decode"]) == 1
    assert "--data" in capsys.readouterr().err
