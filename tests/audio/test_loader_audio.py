"""`ClipLoader(audio=...)`: the sound of exactly the frames, the same for every world, worker and resume."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastvid
from fastvid.errors import ChecksumError, StateError, UsageError
from fastvid.videos.dataset import open as open_dataset
from tests.audio.footage import FPS
from tests.load.loaders import clip_loader

RATE = 16_000


def loader(dataset, **options):
    made = {"frames": fastvid.Segments(4), "spatial": fastvid.CenterCrop(64), "audio": fastvid.Audio(RATE)}
    made |= {"global_batch_size": 21, "seed": 3, "rank": 0, "world_size": 1, "last": "mask", "decoder": "pyav"}
    return clip_loader(dataset, **(made | {"num_threads": 2} | options))


def rows(batches) -> dict[int, tuple]:
    """Return each row by its position: key, frames, sound and mask with their padding."""
    found = {}
    for batch in batches:
        assert batch.audio.dtype == torch.float32
        parts = (batch.position.tolist(), batch.key, batch.frame_index.tolist(), batch.audio, batch.audio_mask)
        for position, key, frames, audio, mask in zip(*parts, strict=True):
            if position >= 0:
                assert position not in found
                found[position] = (key, frames, tuple(audio.shape), audio.numpy().tobytes(), mask.numpy().tobytes())
    return found


def epoch(dataset, world=1, state=None, **options) -> dict[int, tuple]:
    """Return the rows of the rest of an epoch in a world."""
    found = {}
    for rank in range(world):
        one = loader(dataset, rank=rank, world_size=world, **options)
        if state is not None:
            one.load_state_dict(state)
        part = rows(one)
        one.close()
        assert not found.keys() & part.keys()
        found |= part
    return found


@pytest.fixture(scope="module")
def undisturbed(parts):
    return epoch(parts, clips_per_video=3)


def test_sound_is_that_of_the_seconds_of_the_frames(parts, undisturbed):
    assert len(undisturbed) == 3 * len(parts)
    lengths = set()
    for key, frames, shape, sound, mask in undisturbed.values():
        clip = parts[key].audio(Fraction(min(frames), FPS), Fraction(max(frames) + 1, FPS), RATE, mono=True)
        found, heard = np.frombuffer(sound, np.float32), np.frombuffer(mask, bool)
        count = clip.data.shape[1]
        lengths.add(count)
        assert shape == (1, len(found))
        assert found[:count].tobytes() == clip.data.tobytes()
        assert heard[:count].tobytes() == clip.mask.tobytes()
        assert not found[count:].any()
        assert not heard[count:].any()
        assert heard.any() == (key != "mute")
    assert len(lengths) > 10  # of clips of different length


@settings(max_examples=12, deadline=None)
@given(world=st.sampled_from([2, 3, 5, 7]), steps=st.integers(0, 2), before=st.sampled_from([1, 2, 3]))
def test_sound_is_the_same_for_any_world_resumed_anywhere(parts, undisturbed, world, steps, before):
    first = loader(parts, rank=0, world_size=before, clips_per_video=3)
    state = first.state_dict()
    for _, _batch in zip(range(steps), first, strict=False):
        state = first.state_dict()
    first.close()
    assert len(state) == 5
    rest = epoch(parts, world, json.loads(json.dumps(state)), clips_per_video=3)
    assert rest == {position: row for position, row in undisturbed.items() if position >= state["position"]}


@pytest.mark.parametrize(
    "options",
    [
        {"workers": "process"},
        {"workers": "process", "num_fetchers": 2},
        {"num_fetchers": 2},
        {"num_threads": 1, "prefetch": 1},
    ],
    ids=["processes", "fetched for processes", "fetched", "one thread"],
)
def test_sound_is_the_same_with_any_workers(parts, undisturbed, options):
    assert epoch(parts, clips_per_video=3, **options) == undisturbed


@pytest.mark.parametrize(
    "batches",
    [fastvid.Buckets([(2, 48, 64), (3, 64, 64)], 5), fastvid.Packed(2_000, (1, 8, 8), bins=2, window=8)],
    ids=["buckets", "packed"],
)
def test_sound_of_planned_batches_is_that_of_the_frames(parts, batches):
    options = {"batches": batches, "global_batch_size": None, "frames": fastvid.AtFps(2), "shuffle": True}
    options |= {"spatial": fastvid.CenterCrop(None) if isinstance(batches, fastvid.Buckets) else fastvid.Native(8)}
    whole = epoch(parts, **options)
    assert len(whole) == len(parts)
    for world, workers in ((2, "thread"), (1, "process")):
        found = epoch(parts, world, workers=workers, **options)
        for position, (key, frames, _, sound, mask) in found.items():
            shown = [frame for frame in frames if frame >= 0]
            clip = parts[key].audio(Fraction(min(shown), FPS), Fraction(max(shown) + 1, FPS), RATE, mono=True)
            count = clip.data.shape[1]
            assert sound[: 4 * count] == clip.data.tobytes()
            assert mask[:count] == clip.mask.tobytes()
            assert not any(sound[4 * count :])
            assert whole[position][3][: 4 * count] == sound[: 4 * count]


def test_stereo_and_mono_tracks_have_two_channels(clicks):
    (batch,) = loader(clicks, frames=fastvid.Dense(8, 1), audio=fastvid.Audio(48_000, mono=False), global_batch_size=5)
    assert batch.audio.shape == (5, 2, 8 * 48_000 // FPS)
    mute = batch.key.index("mute")
    assert batch.audio_mask.any(1).tolist() == [row != mute for row in range(5)]
    assert not batch.audio[mute].any()
    assert batch.valid.all()


def test_mixture_of_datasets_with_and_without_sound(clicks, parts):
    mute = parts.select([parts.find("mute")])
    mixture = fastvid.Mixture([clicks, mute])
    (batch,) = loader(mixture, global_batch_size=6)
    assert batch.audio_mask.any(1).tolist() == [key != "mute" for key in batch.key]


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_damaged_sound_masks_its_row_or_is_an_error_that_names_it(clicks, copied, workers):
    video = clicks["alac-44100"]
    reader = video._shard.audio(video._row)._read
    data = bytearray(copied.read("data-000000.tar"))
    middle = reader.start + reader.size // 2
    data[middle : middle + 200_000] = bytes(200_000)
    copied.write("data-000000.tar", bytes(data))
    options = {"frames": fastvid.Uniform(4), "global_batch_size": 5, "workers": workers}
    dataset = open_dataset(copied.url)
    one = loader(dataset, on_error="skip", max_skip_rate=1.0, **options)
    (batch,) = one
    bad = batch.key.index("alac-44100")
    assert batch.valid.tolist() == [row != bad for row in range(5)]
    assert not batch.audio[bad].any()
    assert not batch.audio_mask[bad].any()
    assert not batch.video[bad].any()
    assert one.stats.total.skips == {"ChecksumError": 1}
    one.close()
    strict = loader(dataset, **options)
    with pytest.raises(ChecksumError, match="audio has checksum") as caught:
        list(strict)
    assert caught.value.where["key"] == "alac-44100"
    strict.close()


def test_a_state_belongs_to_one_kind_of_sound(clicks):
    state = loader(clicks).state_dict()
    loader(clicks).load_state_dict(state)
    for audio in (None, fastvid.Audio(8_000), fastvid.Audio(RATE, mono=False)):
        with pytest.raises(StateError, match="another audio"):
            loader(clicks, audio=audio).load_state_dict(state)


def test_wrong_arguments_are_refused(clicks):
    with pytest.raises(UsageError, match="audio= was given with views="):
        loader(clicks, views=fastvid.Views(2), frames=fastvid.Segments(4, jitter=False))
    with pytest.raises(UsageError, match="rate is 0"):
        fastvid.Audio(0)
    with pytest.raises(UsageError, match="mono is 'yes'"):
        fastvid.Audio(RATE, mono="yes")
    (batch,) = loader(clicks, audio=None, global_batch_size=5)
    with pytest.raises(AttributeError, match=r"ask for it by audio=Audio\(16_000\)"):
        _ = batch.audio


def test_statistics_count_the_time_and_bytes_of_sound(clicks):
    with_sound, without = loader(clicks), loader(clicks, audio=None)
    for one in (with_sound, without):
        list(one)
    assert with_sound.stats.total.audio_seconds > 0
    assert without.stats.total.audio_seconds == 0
    assert with_sound.stats.total.bytes_read > without.stats.total.bytes_read
