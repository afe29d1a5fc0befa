"""Batches of RGB and flow: the same frames and crop, and flow that matches the visible motion."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastvid.decode import pixels
from fastvid.errors import StateError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.clips.clip import stack_frames
from fastvid.load.clips.crops import CenterCrop, HorizontalFlip, Native, RandomCrop, RandomResizedCrop, Spatial
from fastvid.load.clips.sampling import Dense, Segments
from fastvid.load.clips.timed_sampling import AtFps
from fastvid.load.clips.views import Views
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.job.job import run_job
from tests import datasets, fake_cuda
from tests.load.loaders import clip_loader
from tests.load.tools import FixedCrop, FixedFrames, Own, channels_are_neighbours
from tests.makers import encode, texture

pytest.importorskip("cv2", reason="optical flow needs OpenCV")

HEIGHT, WIDTH, FRAMES = 64, 96, 8
RIGHT, UP = 3, 2  # pixels per frame
X264 = ["-c:v", "libx264", "-crf", "5", "-preset", "ultrafast"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three videos that drift to the right and up, with flow."""
    folder = tmp_path_factory.mktemp("drift")
    (folder / "raw").mkdir()
    for number in range(3):
        y, u, v = texture(1, (HEIGHT, WIDTH), seed=number)
        luma = np.stack([np.roll(y[0], (-UP * t, RIGHT * t), (0, 1)) for t in range(FRAMES)])
        chroma = (np.repeat(plane, FRAMES, 0) for plane in (u, v))
        encode(folder / "raw" / f"v{number}.mp4", (luma, *chroma), X264)
    profile = PROFILES["compact"].changed(short_side=HEIGHT)
    run_job(str(folder / "raw"), folder / "data", profile=profile, streams="rgb,flow", workers=1)
    return folder


def batches(folder, **options):
    return list(flow_loader(folder / "data", **options))


def flow_loader(url, **options):
    standard = {"frames": Segments(3), "spatial": RandomCrop(48), "global_batch_size": 3}
    standard |= {"streams": ("rgb", "flow"), "num_threads": 2}
    return clip_loader(Dataset(str(url)), **standard | options)


def middle(flow):
    """Return the median motion of each clip's interior: x and y."""
    inner = flow[..., 8:-8, 8:-8]
    x, y = inner[:, 0::2].reshape(len(flow), -1), inner[:, 1::2].reshape(len(flow), -1)
    return x.median(1).values.tolist(), y.median(1).values.tolist()


def test_flow_is_in_pixels_per_frame_to_the_right_and_down(folder):
    (batch,) = batches(folder)
    assert batch.video.shape == (3, 3, 3, 48, 48)
    assert batch.flow.shape == (3, 2, 3, 48, 48)
    assert batch.flow.dtype == torch.float32
    x, y = middle(batch.flow)
    assert x == pytest.approx([RIGHT] * 3, abs=0.3)
    assert y == pytest.approx([-UP] * 3, abs=0.3)


def test_flipping_a_clip_flips_its_flow(folder):
    (plain,) = batches(folder, shuffle=False, spatial=CenterCrop(48))
    (mirrored,) = batches(folder, shuffle=False, spatial=(CenterCrop(48), HorizontalFlip(1.0)))
    assert torch.equal(mirrored.video, plain.video.flip(-1))
    assert torch.equal(mirrored.flow[:, 0], -plain.flow[:, 0].flip(-1))
    assert torch.equal(mirrored.flow[:, 1], plain.flow[:, 1].flip(-1))
    assert mirrored.flow[:, 0].abs().max() > 1


def test_resizing_a_clip_scales_its_flow(folder):
    (same,) = batches(folder, spatial=CenterCrop((64, 96)))
    (half,) = batches(folder, spatial=CenterCrop((32, 48), short_side=32))
    (x, y), (half_x, half_y) = middle(same.flow), middle(half.flow)
    assert half_x == pytest.approx([value / 2 for value in x], abs=0.1)
    assert half_y == pytest.approx([value / 2 for value in y], abs=0.1)


@pytest.mark.parametrize("layout", ["BCTHW", "BTCHW"])
def test_a_stream_is_the_same_alone_and_with_the_other(folder, layout):
    options = {"spatial": (RandomResizedCrop(32), HorizontalFlip(0.5)), "flow_stack": 2, "layout": layout, "seed": 5}
    (both,) = batches(folder, **options)
    (pictures,) = batches(folder, **options, streams="rgb")
    (motion,) = batches(folder, **options, streams=("flow",))
    (swapped,) = batches(folder, **options, streams=("flow", "rgb"))
    assert torch.equal(swapped["rgb"], both.video)
    assert torch.equal(both.video, pictures.video)
    assert "flow" not in pictures
    assert torch.equal(both.flow, motion.flow)
    assert motion.video is motion.flow
    assert torch.equal(both.frame_index, motion.frame_index)
    assert both.key == pictures.key == motion.key
    assert both.flow.shape == ((3, 4, 3, 32, 32) if layout == "BCTHW" else (3, 3, 4, 32, 32))
    (turned,) = batches(folder, **options, channels_last=True)
    assert [channels_are_neighbours(batch.flow, layout) for batch in (turned, both)] == [True, False]
    assert torch.equal(turned.flow, both.flow)


@pytest.mark.parametrize("streams", ["flow", ("rgb", "flow")])
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_every_view_equals_the_same_clip_decoded_alone(folder, streams, workers):
    sampler, crop, views = Segments(3, jitter=False), CenterCrop(32, short_side=40), Views(2, 10)
    options = {"shuffle": False, "streams": streams, "flow_stack": 2}
    (viewed,) = batches(folder, **options, frames=sampler, spatial=crop, views=views, workers=workers)
    assert viewed.flow.shape == (3, 20, 4, 3, 32, 32)
    for number in range(20):
        frames, cut = FixedFrames(sampler, number // 10, 2), FixedCrop(Spatial.of(crop), views, number % 10)
        spatial = (cut, HorizontalFlip(float(number % 10 >= 5)))
        (alone,) = batches(folder, **options, frames=frames, spatial=spatial)
        assert torch.equal(viewed.video[:, number], alone.video)
        assert torch.equal(viewed.flow[:, number], alone.flow)
        assert torch.equal(viewed.frame_index[:, number], alone.frame_index)


def test_a_stack_contains_the_flows_around_each_frame(folder):
    options = {"shuffle": False, "spatial": CenterCrop(48), "frames": Segments(2, jitter=False)}
    (stacked,) = batches(folder, **options, flow_stack=4)
    every = Dense(FRAMES, 1, jitter=False)
    (single,) = batches(folder, **{**options, "frames": every})
    for row in range(3):
        for place, frame in enumerate(stacked.frame_index[row].tolist()):
            for number, flow in enumerate(stack_frames(np.array([frame]), FRAMES, 4).tolist()):
                assert torch.equal(stacked.flow[row, 2 * number : 2 * number + 2, place], single.flow[row, :, flow])


@given(st.lists(st.integers(0, 29), min_size=1, max_size=5), st.integers(1, 12))
def test_stacks_are_consecutive_and_stay_inside_the_video(frames, stack):
    flows = stack_frames(np.array(frames, dtype=np.int64), 30, stack).reshape(len(frames), stack)
    assert flows.min() >= 0
    assert flows.max() <= 29
    assert set(np.diff(flows, axis=1).ravel().tolist()) <= {0, 1}
    for frame, row in zip(frames, flows.tolist(), strict=True):
        if frame - stack // 2 >= 0 and frame + stack <= 29:
            assert row == list(range(frame - stack // 2, frame - stack // 2 + stack))
        assert frame in row


def test_a_state_of_other_streams_is_refused(folder):
    state = flow_loader(folder / "data", flow_stack=2).state_dict()
    flow_loader(folder / "data", flow_stack=2).load_state_dict(state)
    for other in ({"streams": "rgb"}, {"flow_stack": 3}):
        with pytest.raises(StateError, match="another streams"):
            flow_loader(folder / "data", **other).load_state_dict(state)


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_clip_with_one_damaged_stream_is_skipped_and_counted_once(folder, workers, tmp_path):
    shutil.copytree(folder / "data", tmp_path / "data")
    datasets.damage(tmp_path / "data", Dataset(str(folder / "data")).key(1), stream="flow")
    loader = flow_loader(tmp_path / "data", shuffle=False, on_error="skip", workers=workers)
    (batch,) = loader
    assert batch.valid.tolist() == [True, False, True]
    # The stream that was decoded is zero, too.
    assert not batch.flow[1].any()
    assert not batch.video[1].any()
    assert batch.flow[0].any()
    assert loader.stats.total.skips == {"ChecksumError": 1}
    assert loader.stats.total.clips == 2


def test_invalid_stream_arguments_are_refused(folder, tmp_path):
    clip = datasets.make_clip(tmp_path / "clip.mp4", frames=4)
    datasets.pack(tmp_path / "plain", [[("clip", clip, 0)]])
    with pytest.raises(UsageError, match=r"the dataset has rgb[\s\S]*--streams rgb,flow"):
        flow_loader(tmp_path / "plain")
    for wrong in ({"streams": ()}, {"streams": ("flow", "flow")}, {"streams": "flow", "flow_stack": 0}):
        with pytest.raises(UsageError, match=r"streams are|flow_stack is"):
            flow_loader(folder / "data", **wrong)


@pytest.mark.parametrize("views", [None, Views(2)], ids=["one", "views"])
def test_flow_on_a_gpu_is_that_of_the_cpu(folder, monkeypatch, views):
    options = {"shuffle": False, "spatial": CenterCrop(32), "decoder": "pyav", "frames": Segments(2, jitter=False)}
    options |= {"views": views, "last": "mask", "global_batch_size": 2}
    here = batches(folder, **options)
    cuda = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(pixels, "_fused", lambda *_: None)  # a kernel needs a real device
    there = batches(folder, **options, device="cuda:1")
    assert not cuda.races
    assert {entry.what.split()[0] for entry in cuda.entries("copy")} == {"pinned"}
    assert len(cuda.entries("copy")) == 2 * 3
    assert not cuda.syncs
    for ours, theirs in zip(there, here, strict=True):
        assert torch.equal(ours.flow.cpu(), theirs.flow)
        assert torch.equal(ours.valid.cpu(), theirs.valid)


@pytest.mark.parametrize("streams", ["flow", ("rgb", "flow")])
def test_size_and_times_are_those_of_the_picture_and_lengths_may_not_differ(folder, streams):
    (batch,) = batches(folder, streams=streams, frames=AtFps(10, multiple=2), spatial=Native(16))
    assert batch.flow.shape == (3, 2, 4, 64, 96)
    assert batch.size.tolist() == [[HEIGHT, WIDTH]] * 3
    assert batch.seconds.tolist() == [[0, 2 / 25, 5 / 25, 7 / 25]] * 3
    with pytest.raises(UsageError, match=r"have the shapes \(\d, 48, 48\), \(\d, 48, 48\)"):
        batches(folder, streams=streams, frames=Own(lambda video, _: range(1 + int(video.key[-1]) % 2)))
