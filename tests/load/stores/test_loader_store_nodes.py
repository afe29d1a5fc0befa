"""Eight processes on two nodes read one store that is slow and refuses requests beyond a rate."""

import json

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")

from tests import forks
from tests.datasets import make_clip, pack
from tests.load.stores import store_ranks
from tests.storage.faulty import FaultyServer

WORLD, NODES, EPOCHS = 8, 2, 2


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Four shards of 24 clips of about 60 kB."""
    folder = tmp_path_factory.mktemp("nodes")
    clips = [make_clip(folder / f"{n}.mp4", frames=60 + n, size="256x192") for n in range(3)]
    samples = [[(f"clip{shard}-{n:02d}", clips[(shard + n) % 3], n % 2) for n in range(24)] for shard in range(4)]
    return pack(folder / "set", samples)


def test_each_byte_leaves_the_store_once_an_epoch_and_no_refusal_is_seen(local, tmp_path):
    with FaultyServer(delay=0.05, rate=25) as server:
        for name in local.list():
            server.files[name] = local.read(name)
        size = sum(map(len, server.files.values()))
        ranks = []
        for rank in range(WORLD):
            node = tmp_path / f"node{rank * NODES // WORLD}"
            cache = {"FASTVID_CACHE": str(node), "FASTVID_CACHE_VIDEO": "1G"}
            arguments = (server.url, rank, WORLD, EPOCHS, tmp_path / f"{rank}")
            ranks.append(forks.Command("tests.load.stores.store_ranks", *arguments, **cache))
        errors = [rank.communicate(500.0)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * WORLD, errors
        log = server.gets()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    store_ranks.main(local.url, 0, 1, EPOCHS, str(tmp_path / "alone"))
    alone = json.loads((tmp_path / "alone.json").read_text())
    expected = [row for step in alone["steps"] for row in step]
    steps = zip(*(rank["steps"] for rank in found), strict=True)
    delivered = [row for step in steps for row in sorted(row for rank in step for row in rank)]
    assert delivered == expected
    assert [rank["skips"] for rank in found] == [{}] * WORLD
    assert any(one.status == 429 for one in log), "the control: the store did refuse requests"
    assert sum(one.body for one in log) <= 1.05 * EPOCHS * size
    assert sum(rank["bytes"] for rank in found) == sum(one.body for one in log)
    assert all(rank["dollars"] == pytest.approx(0.4e-6 * rank["requests"]) for rank in found)
