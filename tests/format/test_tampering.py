"""A dataset whose files were swapped, replaced, damaged or cut is an error that names the file, never another clip."""

import contextlib
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import fastvid
from fastvid.errors import ChecksumError, FastvidError, FormatError
from fastvid.format.schema import PKT_HEADER_DTYPE, SHARD_SUFFIXES, PacketFlag
from fastvid.format.shard import Shard
from fastvid.storage import RemoteOptions, open_storage
from tests.datasets import edit_pkt, make_clip, pack
from tests.load.loaders import clip_loader
from tests.skips import soak_but
from tests.storage.faulty import FaultyServer


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return [make_clip(folder / f"{n}.mp4", frames=24 + n) for n in range(4)]


@pytest.fixture
def store(tmp_path, clips):
    """Two shards of two samples."""
    return packed(tmp_path / "set", clips)


def packed(folder, clips):
    samples = [(f"c/{n}", clip, n % 2) for n, clip in enumerate(clips)]
    return pack(folder, [samples[:2], samples[2:]])


def pixels(dataset):
    return [video.frames(range(len(video))).data.tobytes() for video in dataset]


def swap_files(store, suffixes):
    for suffix in suffixes:
        one, two = (store.path(f"data-00000{n}.{suffix}") for n in range(2))
        one.rename(f"{one}.kept")
        two.rename(one)
        os.rename(f"{one}.kept", two)


@pytest.mark.parametrize("suffixes", [SHARD_SUFFIXES, ("pkt",), ("tar",)])
def test_swapped_shards_are_an_error_that_names_the_shard(store, suffixes):
    swap_files(store, suffixes)
    dataset = fastvid.open(store.url)
    for key in ("c/0", "c/2"):
        with pytest.raises(FastvidError, match="data-00000") as caught:
            dataset[key].frames([0])
        assert caught.value.hint


def test_without_the_generation_a_swapped_shard_delivers_other_clips(store):
    """Positive control: nothing else distinguishes the two shards."""
    before = Shard(store, "data-000000").info(0)
    swap_files(store, SHARD_SUFFIXES)
    assert Shard(store, "data-000000").info(0) != before


def test_shards_created_anew_under_a_reader_are_an_error(store, clips):
    dataset = fastvid.open(store.url)
    expected = dataset["c/0"].frames([0]).data.tobytes()
    shutil.rmtree(store.root)
    packed(store.root, clips[::-1])
    for key in ("c/2", "c/3"):
        with pytest.raises(FormatError, match=r"data-000001\.pkt") as caught:
            dataset[key]
        assert "open the dataset again" in caught.value.hint
    # This shard was open: the old clip, or an error.
    with contextlib.suppress(ChecksumError, FormatError):
        assert dataset["c/0"].frames([0]).data.tobytes() == expected


def test_each_flipped_bit_of_the_packet_sidecar_is_an_error(store):
    name, expected = "data-000000.pkt", pixels(fastvid.open(store.url))
    good = store.read(name)
    draws = np.random.default_rng(0)
    flags = len(good) - 4  # of the last packet
    for position in [0, 4, 8, 40, 79, 80, 130, flags, *draws.integers(0, len(good), 60).tolist()]:
        bad = bytearray(good)
        bad[position] ^= 1 << int(draws.integers(8))
        store.write(name, bytes(bad))
        with pytest.raises(FormatError, match="data-000000") as caught:
            pixels(fastvid.open(store.url))
        assert caught.value.hint, position
    store.write(name, good)
    assert pixels(fastvid.open(store.url)) == expected


def test_wrong_flags_with_fitting_checksums_deliver_wrong_pixels(store):
    """Positive control: with checksums that fit, nobody notices packets that are wrongly left out."""
    expected = pixels(fastvid.open(store.url))

    def change(_streams, packets):
        packets["flags"][packets["flags"] == 0] = int(PacketFlag.DROPPABLE)

    edit_pkt(store, "data-000000", change)
    dataset = fastvid.open(store.url)
    video = dataset["c/0"]
    alone = [video.frames([frame]).data.tobytes() for frame in range(len(video))]
    assert b"".join(alone) != expected[0]


@pytest.mark.parametrize(("field", "value"), [("codec", 0), ("range", 9), ("matrix", 3), ("fps_den", 0)])
def test_a_row_of_the_sidecar_that_cannot_be_is_a_format_error(store, field, value):
    edit_pkt(store, "data-000001", lambda streams, _: streams[field].__setitem__(1, value))
    with pytest.raises(FormatError, match=r"data-000001\.pkt, row=1") as caught:
        fastvid.open(store.url)["c/3"]
    assert caught.value.hint.startswith("run `fastvid index DIR`")


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_shards_swapped_after_the_loader_opened_them_are_an_error(store, workers):
    """Worker processes open shards themselves, so they compare them with those of the parent."""
    dataset = fastvid.open(store.url)
    loader = clip_loader(
        dataset,
        frames=fastvid.Uniform(2),
        spatial=fastvid.CenterCrop(32),
        global_batch_size=2,
        workers=workers,
        decoder="pyav",
        num_threads=1,
        shuffle=False,
    )
    assert [dataset.shard(shard).num_samples for shard in range(2)] == [2, 2]
    swap_files(store, SHARD_SUFFIXES)
    with pytest.raises(FormatError, match="data-000000"):
        next(iter(loader))
    loader.close()


CUT = """
import os, sys
import torch, fastvid
url, workers, cut = sys.argv[1], sys.argv[2], sys.argv[3] == "cut"
dataset = fastvid.open(url)
loader = fastvid.ClipLoader(dataset, frames=fastvid.Uniform(2), spatial=fastvid.CenterCrop(32), global_batch_size=1,
    decoder="pyav", shuffle=False, output=fastvid.Output(dtype=torch.uint8),
    workers=fastvid.Workers(workers, num_threads=1, prefetch=1))
for shard in range(2):
    dataset.shard(shard)
if cut:
    for shard in range(2):
        os.truncate(f"{url}/data-00000{shard}.pkt", 0)
try:
    print(sum(len(batch.key) for batch in loader))
except fastvid.errors.FastvidError as error:
    print(f"{type(error).__name__} {error}")
"""


@pytest.mark.parametrize("workers", soak_but(["thread", "process"], "thread"))
def test_a_sidecar_cut_under_a_reader_is_an_error_and_kills_nobody(store, workers):
    command = [sys.executable, "-c", CUT, store.url, workers]
    assert subprocess.run([*command, "whole"], capture_output=True, text=True, check=True).stdout == "4\n"
    run = subprocess.run([*command, "cut"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "data-000000" in run.stdout
    assert run.stdout.startswith(("StorageError", "FormatError"))


@pytest.mark.parametrize("part", ["index", "packets"])
def test_a_wrong_copy_in_the_node_cache_is_fetched_again_once(store, tmp_path, part):
    pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")
    options = RemoteOptions(cache=tmp_path / "cache")
    name, position = "data-000000.pkt", PKT_HEADER_DTYPE.itemsize + 3 if part == "index" else -4
    with FaultyServer(store) as server:

        def opened():
            shard = Shard(open_storage(server.url, options=options), "data-000000")
            return [shard.table(row).records.tobytes() for row in range(shard.num_samples)]

        def fetched():
            return sum(seen.method == "GET" for seen in server.log)

        expected = opened()
        (copy,) = (tmp_path / "cache").glob("??/[0-9a-f]*")
        bad = bytearray(copy.read_bytes())
        bad[position] ^= 1
        copy.write_bytes(bad)
        assert opened() == expected
        assert fetched() == 2
        assert copy.read_bytes() == store.read(name)
        assert opened() == expected
        assert fetched() == 2, "the copy in the cache is right again"
        # If the file in the store is wrong as well, this is an error instead of a loop.
        bad = bytearray(store.read(name))
        bad[position] ^= 1
        server.files[name] = bytes(bad)
        with pytest.raises(FormatError, match="checksum"):
            opened()
        assert fetched() == 4
