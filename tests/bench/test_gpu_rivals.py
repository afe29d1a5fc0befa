"""Rivals of the GPU decoders: used as their packages define, refused by name if wrong or missing."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.gpu import rivals, stand_ins
from bench.gpu.settings import BACKENDS, Notes, Settings
from fastvid.tune.measure import Corpus
from tests.datasets import pack


@pytest.fixture(scope="module")
def folder(videos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rivals") / "compact"
    samples = [(f"v{n}", videos.textured("compact", size=(64, 96), frames=n).data, 0) for n in (40, 70)]
    pack(folder, [samples])
    return folder


@pytest.fixture
def posing(monkeypatch):
    """Install the stand-ins for one test; return what they were created with."""
    for name in ("PyNvVideoCodec", "torchcodec", "torchcodec.decoders", "nvidia.dali"):
        monkeypatch.setitem(sys.modules, name, None)
    stand_ins.install()
    created = {}
    for kind in (stand_ins.SimpleDecoder, stand_ins.ThreadedDecoder, stand_ins.VideoDecoder, stand_ins.Pipeline):
        init = kind.__init__

        def spy(self, *arguments, _init=init, _name=kind.__name__, **options):
            created[_name] = options
            _init(self, *arguments, **options)

        monkeypatch.setattr(kind, "__init__", spy)
    return created


def corpus(folder, sampling="dense8x2"):
    return Corpus(str(folder), sampling, repeats=rivals._CHUNK // 2, crop=48)


def contest(folder, sampling="dense8x2"):
    settings = Settings(folder.parent, fake=True)
    return rivals._contest(
        settings, corpus(folder, sampling), {"ours": BACKENDS[0]}, Notes(folder.parent / "notes.json")
    )


def test_each_rival_shows_the_right_frames_and_has_a_ratio(folder, posing):
    row = contest(folder)
    assert row["refused"] == {}
    assert [one["name"] for one in row["contenders"]] == ["ours", *rivals.RIVALS]
    assert all(one["rate"] > 0 and one["fastvid_is_faster_by"]["ours"] > 0 for one in row["contenders"])


def test_rivals_that_fail_or_are_missing_are_named_with_the_reason(folder, posing, monkeypatch):
    right = stand_ins.VideoDecoder.get_frames_at

    def late(self, indices):
        return right(self, [min(index + 1, len(self._frames) - 1) for index in indices])

    monkeypatch.setattr(stand_ins.VideoDecoder, "get_frames_at", late)
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", None)
    row = contest(folder, "tsn8")
    assert [one["name"] for one in row["contenders"]] == ["ours", "DALI fn.decoders.video"]
    assert row["refused"].keys() == rivals.RIVALS.keys() - {"DALI fn.decoders.video"}
    assert "frames are wrong" in row["refused"]["torchcodec kept open"]
    assert row["refused"]["PyNvVideoCodec SimpleDecoder"].startswith("ModuleNotFoundError: import of PyNvVideoCodec")
    assert "constant distance" in row["refused"]["DALI fn.readers.video"]


def signature(path, name):
    """Return the arguments of a class, and of its methods, from the source of a package that needs a driver."""
    (kind,) = (
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    methods = [node for node in kind.body if isinstance(node, ast.FunctionDef)]
    return {one.name: [argument.arg for argument in one.args.args] for one in methods}


@pytest.mark.parametrize("name", ["SimpleDecoder", "ThreadedDecoder"])
def test_pynvvideocodec_has_the_arguments_that_are_used(name, folder, posing):
    (home,) = (Path(path, "PyNvVideoCodec") for path in sys.path if Path(path, "PyNvVideoCodec", "decoders").is_dir())
    real, posed = signature(home / "decoders" / f"{name}.py", name), getattr(stand_ins, name)
    contest(folder)
    assert posing[name].keys() - {"start_frame"} < set(real["__init__"])
    used = {one: list(inspect.signature(getattr(posed, one)).parameters) for one in vars(posed) if one[0] != "_"}
    assert used == {one: real[one] for one in used}


def test_torchcodec_has_the_arguments_that_are_used(folder, posing):
    contest(folder)
    for name in ("torchcodec", "torchcodec.decoders"):
        sys.modules.pop(name)
    from bench.common.linked import video_decoder

    assert posing["VideoDecoder"].keys() < inspect.signature(video_decoder()).parameters.keys()
    assert list(inspect.signature(video_decoder().get_frames_at).parameters) == ["self", "indices"]


@pytest.mark.parametrize("kind", [rivals.Dali, rivals.Reader])
def test_dali_builds_the_graphs(kind, folder):
    pytest.importorskip("nvidia.dali")
    from nvidia.dali import fn, pipeline, types

    job = SimpleNamespace(corpus=corpus(folder))
    with pipeline.Pipeline(batch_size=1, num_threads=1, device_id=None):
        node = kind.graph(job, fn, types)[0]
        assert node.device == "gpu"
        with pytest.raises(KeyError, match="framez"):
            fn.decoders.video(node, device="mixed", framez=[0])
