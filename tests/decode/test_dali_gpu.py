"""DALI on a GPU: the graph is defined here, and its frames come from the same graph on the CPU."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("nvidia.dali")

from fastvid.decode import dali, engines
from fastvid.decode.backends import backend
from fastvid.decode.clips import read_clip, reader_of
from fastvid.decode.request import Box, ClipRequest, DeviceRgb, Rgb
from fastvid.decode.tiles import reduced
from fastvid.errors import DecodeError
from fastvid.format.mp4 import index_mp4
from fastvid.format.packets import PacketTable
from fastvid.format.schema import Codec, StreamFlag
from fastvid.sharding.encode.profiles import PROFILES
from tests import fake_cuda
from tests.conformance.outputs import arrays, decoded, empties, empty, numbers, read
from tests.sharding.shardtools import encode, make


class Twin:
    """A pipeline of the CPU that poses as one of a GPU, with memory that it uses again.

    Attributes:
        dropped: Numbers of frames of each sample that are left as they were in memory.
        grey: Level of all frames, or None.
        runs: How often it ran.
    """

    def __init__(self, cuda, build, *settings, pictures=False):
        *rest, _gpu = settings
        self.pipeline, self.cuda, self.settings = build(*rest, None, pictures=pictures), cuda, settings
        self.dropped, self.grey, self.runs, self.memory = (), None, 0, {}
        self.feed_input = self.pipeline.feed_input

    def run(self, handle):
        self.runs += 1
        (stream,) = [one for one in self.cuda.streams if one.cuda_stream == handle]
        outputs = [[torch.from_numpy(np.asarray(one).copy()) for one in output] for output in self.pipeline.run()]
        with self.cuda.stream(stream):
            for place, (rgb, video) in enumerate(zip(*outputs, strict=True)):
                for frame in range(len(video)) if self.grey else self.dropped:
                    before = self.memory.get(place)
                    level = self.grey or (0 if before is None else int(before.values[frame].flatten()[0]))
                    rgb[:, frame], video[frame] = level, level
                outputs[0][place] = self.cuda.wrap(rgb, stream.index).add_(0)
                outputs[1][place] = self.memory[place] = self.cuda.wrap(video, stream.index)
        return [SimpleNamespace(at=output.__getitem__) for output in outputs]


class PictureTwin(Twin):
    """The same for JPEG pictures, whose output lies in the memory of the run before."""

    def run(self, handle):
        self.runs += 1
        (stream,) = [one for one in self.cuda.streams if one.cuda_stream == handle]
        (pictures,) = self.pipeline.run()
        with self.cuda.stream(stream):
            for place in range(len(pictures)):
                rgb = torch.from_numpy(np.asarray(pictures.at(place)).copy())
                reused = self.memory.get(place)
                if reused is None or reused.shape != rgb.shape:
                    self.memory[place] = self.cuda.wrap(rgb, stream.index).add_(0)
                else:
                    reused.copy_(rgb)
        return [SimpleNamespace(at=self.memory.__getitem__)]


@pytest.fixture
def twins(monkeypatch):
    """Let decoders of a GPU build twins; returns them."""
    cuda, made, build = fake_cuda.install(monkeypatch), [], dali._pipeline

    def pipeline(*settings, pictures=False):
        if settings[-1] is None:
            return build(*settings, pictures=pictures)
        made.append((PictureTwin if pictures else Twin)(cuda, build, *settings, pictures=pictures))
        return made[-1]

    monkeypatch.setattr(dali, "_pipeline", pipeline)
    monkeypatch.setattr(dali, "_tensor", lambda tensor: tensor)
    monkeypatch.setattr(engines, "capabilities", lambda device_id: {Codec.H264: 5})
    yield SimpleNamespace(made=made, cuda=cuda)
    assert not cuda.races


@pytest.fixture
def decoder(twins):
    decoder = backend("dali-gpu").open(device_id=1)
    yield decoder
    decoder.close()


def test_frames_are_those_of_the_cpu(decoder, twins, videos):
    video = videos.painted("vp9")
    clips = [
        *(video.clip([number, 60, number]) for number in range(6)),
        video.clip([3, 60], size=(48, 80), flip=True),
        video.clip([3, 60], box=Box(14, 34, 50, 98)),
    ]
    outputs = [empty(clip, DeviceRgb, "cuda:1") for clip in clips]
    twins.cuda.syncs.clear()
    assert decoder.decode(clips, outputs) == [None] * len(clips)
    assert not [what for _, what in twins.cuda.syncs if what.startswith("device")]
    host = backend("dali-cpu").open()
    for clip, output in zip(clips, outputs, strict=True):
        assert (arrays(output)[0] == arrays(decoded(host, clip, Rgb))[0]).all()
    assert len(twins.made) == 2  # one that resizes and one that does not
    assert {(one.settings[1], one.settings[2], one.settings[3]) for one in twins.made} == {(4, 4, 1)}
    stream = decoder._stream.stream
    assert (stream.index, stream.priority) == (1, -1)


def test_waits_until_the_output_is_writable(decoder, twins, videos):
    clip, training = videos.painted("vp9").clip([5, 20]), torch.cuda.Stream("cuda:1")
    (output,) = empties([clip], DeviceRgb, "cuda:1")
    for ordered in (True, False):
        writable = torch.cuda.Event()
        with torch.cuda.stream(training):
            output.data.sum()
            writable.record()
        assert decoder.decode([clip], [DeviceRgb(output.data, writable if ordered else None)]) == [None]
        assert bool(twins.cuda.races) is not ordered
        training.synchronize()
    twins.cuda.races.clear()


def test_frame_that_dali_does_not_write_is_an_error(decoder, twins, videos):
    clips = [videos.painted("vp9").clip([number, 60]) for number in range(3)]
    outputs = [empty(clip, DeviceRgb, "cuda:1") for clip in clips]
    assert decoder.decode(clips, outputs) == [None] * 3
    twins.made[0].dropped = (1,)
    for error in decoder.decode(clips, outputs):
        assert isinstance(error, DecodeError)
        assert "DALI did not write frame 60" in str(error)
    twins.made[0].dropped = ()
    assert [numbers(decoder, clip, DeviceRgb, "cuda:1") for clip in clips] == [[0, 60], [1, 60], [2, 60]]


@pytest.mark.parametrize("level", [0x5A, 0xA5])
def test_grey_frames_of_the_level_of_the_mark_are_delivered(decoder, twins, videos, level):
    clip = videos.painted("vp9").clip([7, 60])
    assert numbers(decoder, clip, DeviceRgb, "cuda:1") == [7, 60]
    twins.made[0].grey = level
    for _ in range(3):
        assert (arrays(decoded(decoder, clip, DeviceRgb, "cuda:1"))[0] == level).all()
    assert twins.made[0].runs == (7 if level == 0x5A else 4)


@pytest.mark.parametrize("resized", [False, True])
@pytest.mark.parametrize("kind", ["video", "image"])
def test_graph_of_a_gpu_is_defined(resized, kind, monkeypatch):
    asked, operator = [], getattr(dali._fn.decoders, kind)
    monkeypatch.setattr(dali._fn.decoders, kind, lambda *a, **kw: asked.append(kw) or operator(*a, **kw))
    monkeypatch.setattr(dali._Pipeline, "build", lambda self: None)
    pipeline = dali._pipeline(resized, 6, 5, 0, pictures=kind == "image")
    wanted = {"device": "mixed", "affine": False}
    wanted |= {"pad_mode": "none"} if kind == "video" else {"adjust_orientation": False}
    assert asked[0].items() >= wanted.items()
    assert kind == "video" or asked == [wanted]
    assert (pipeline.max_batch_size, pipeline.num_threads, pipeline.device_id) == (6, 5, 0)
    assert pipeline.exec_dynamic
    assert not pipeline.set_affinity


def test_threads_follow_clips_and_lanes_follow_engines(twins):
    one = backend("dali-gpu")
    assert (one.open(max_clips=7)._num_threads, one.open(max_clips=7, num_threads=2)._num_threads) == (7, 2)
    assert one.lanes(16, 3) == 5


def test_size_that_dali_caches_no_decoder_for_is_warned_about_once(decoder, videos, caplog, monkeypatch):
    monkeypatch.setattr(dali, "_padded", set())
    odd, even = videos.textured("vp9", size=(90, 160)), videos.textured("vp9")
    with caplog.at_level(logging.WARNING):
        for video in (even, odd, odd):
            decoder.decode([video.clip([3])], [empty(video.clip([3]), DeviceRgb, "cuda:1")])
    (line,) = [record.getMessage() for record in caplog.records if record.name == dali.__name__]
    assert "an NVDEC decoder for every clip of 160x90 vp9" in line


def test_machine_whose_gpu_fails_says_why(monkeypatch):
    fake_cuda.install(monkeypatch)

    def full(device_id):
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(engines, "capabilities", full)
    why = backend("dali-gpu").why_unavailable(0)
    assert why == "check of decoder 'dali-gpu' failed: RuntimeError: CUDA error: out of memory"
    assert torch.cuda.is_available()


def test_jpeg_pictures_are_decoded_one_by_one(decoder, twins, videos, monkeypatch):
    monkeypatch.setattr(dali, "_PICTURES", 5)  # fewer than the pictures of a call, so that memory is used again
    painted, textured = videos.painted("mjpeg"), videos.textured("mjpeg")
    for frames in ([7, 60, 7, 3], [69, 0], list(range(12))):
        assert numbers(decoder, painted.clip(frames), DeviceRgb, "cuda:1") == frames
    host = backend("pyav").open()
    crops = [{}, {"size": (48, 80), "flip": True}, {"box": Box(14, 34, 50, 98)}]
    clips = [textured.clip([9, 3, 9], **crop) for crop in crops]
    outputs = [empty(clip, DeviceRgb, "cuda:1") for clip in clips]
    twins.cuda.syncs.clear()
    assert decoder.decode(clips, outputs) == [None] * len(clips)
    assert not [what for _, what in twins.cuda.syncs if what.startswith("device")]
    for clip, output in zip(clips, outputs, strict=True):
        off = np.abs(arrays(output)[0].astype(int) - arrays(decoded(host, clip, Rgb))[0])
        assert off.mean() < backend("dali-gpu").bound
    assert {one.settings[1:] for one in twins.made} == {(5, 4, 1)}


def test_jpeg_tiles_that_a_crop_shows_are_those_of_the_whole_pictures(decoder, twins, tmp_path):
    pytest.importorskip("PIL.Image", reason="tiles are written by Pillow")
    source = make(tmp_path / "a.mp4", size="192x96", frames=6)
    data = encode(source, replace(PROFILES["tiles"], short_side=96, multiple=2))[0]
    info, records = index_mp4(data, conforms=True)
    request = ClipRequest(0, np.array([4, 1]), Box(36, 70, 40, 50), (40, 50))
    cut, whole = (
        read_clip(request, replace(info, flags=flags), PacketTable(records), reader_of(data))
        for flags in (info.flags, StreamFlag.NONE)
    )
    assert (reduced(cut).info.height, reduced(cut).info.width) == (48, 64)
    found = [arrays(decoded(decoder, clip, DeviceRgb, "cuda:1"))[0] for clip in (cut, whole)]
    assert (found[0] == found[1]).all()


def test_a_broken_jpeg_fails_alone_and_limited_range_is_refused(decoder, twins, videos):
    painted = videos.painted("mjpeg")
    clips = [painted.clip([number]) for number in (3, 4, 5)]
    start, size = int(clips[1].starts[0]), int(clips[1].sizes[0])
    clips[1].data[start + size // 2 : start + size] = bytes(size - size // 2)
    outputs = [empty(clip, DeviceRgb, "cuda:1") for clip in clips]
    errors = decoder.decode(clips, outputs)
    assert [error is None for error in errors] == [True, False, True]
    assert "\n" not in str(errors[1])
    assert read(outputs[0]) + read(outputs[2]) == [3, 5]
    clip = videos.painted("mjpeg-limited").clip([3])
    (error,) = decoder.decode([clip], [empty(clip, DeviceRgb, "cuda:1")])
    assert "nvJPEG takes all pictures as full range" in str(error)
