"""Datasets on the Hugging Face Hub: the same clips, few requests, its limits respected, clear errors."""

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")
pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: the extra hub brings it")

import fastvid
from fastvid.errors import StorageError, UnavailableError, UsageError
from fastvid.sharding.in_place import index_videos
from fastvid.storage import RemoteOptions, open_storage
from tests.datasets import make_clip, pack
from tests.storage.hub_server import HubServer

FOLDER = "hf://datasets/me/films/set"
PATIENT = RemoteOptions(patience_seconds=30)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    clips = [make_clip(folder / f"{n}.mp4", frames=20 + n) for n in range(2)]
    return pack(folder / "set", [[(f"c{shard}{n}", clips[n % 2], n % 2) for n in range(4)] for shard in range(2)])


@pytest.fixture
def hub(local, monkeypatch):
    with HubServer() as server:
        for name in local.list():
            server.files[f"set/{name}"] = local.read(name)
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def clips(url):
    loader = fastvid.ClipLoader(
        fastvid.open(url), frames=fastvid.Segments(3), spatial=fastvid.CenterCrop(32), global_batch_size=2
    )
    return [(key, frames.sum().item()) for batch in loader for key, frames in zip(batch.key, batch.video, strict=True)]


@pytest.mark.parametrize("url", [FOLDER, "hf://datasets/me/films@main/set"])
def test_clips_are_those_of_the_local_dataset(hub, local, url):
    assert clips(url) == clips(local.url)
    asked = [path for method, path, *_ in hub.log if path.startswith("/api/datasets/me/films/revision")]
    resolved = [path for _, path, *_ in hub.log if "/resolve/" in path and path.endswith(".tar")]
    assert len(asked) + len(resolved) <= 5, "where a file is, is asked once in each storage"


def test_files_are_listed_and_read(hub, local):
    storage = open_storage(FOLDER, options=PATIENT)
    assert storage.list() == sorted(local.list())
    assert storage.list("data-000000") == sorted(local.list("data-000000"))
    assert storage.list("nothing/") == []
    for name in local.list():
        assert storage.read(name) == local.read(name)
        assert storage.size(name) == local.size(name)
    assert storage.version("data-000009.tar") is None
    view = memoryview(bytearray(100))
    storage.read_into("data-000000.tar", [(600, view)])
    assert bytes(view) == local.read("data-000000.tar")[600:700]
    with pytest.raises(StorageError, match="ends inside the range"):
        storage.read_into("data-000000.tar", [(local.size("data-000000.tar") - 50, view)])


def test_versions_of_a_listing_are_those_of_the_files(hub):
    storage = open_storage(FOLDER, options=PATIENT)
    for name, version in storage.entries():
        assert storage.version(name).same(version)


def test_videos_on_the_hub_are_indexed_in_place(hub, local, tmp_path):
    hub.files |= {f"raw/{n}.mp4": make_clip(tmp_path / f"{n}.mp4", frames=30 + n) for n in range(2)}
    assert index_videos(["hf://datasets/me/films/raw"], tmp_path / "set", workers=1).packed == 2
    dataset = fastvid.open(tmp_path / "set")
    assert sorted(dataset.num_frames.tolist()) == [30, 31]
    assert dataset[0].frames([0, 7]).data.shape[0] == 2


def test_an_address_that_expired_is_asked_for_again(hub, local):
    storage = open_storage(FOLDER, options=PATIENT)
    assert storage.read("data-000000.tar") == local.read("data-000000.tar")
    hub.expire = 2
    assert storage.read("data-000000.tar") == local.read("data-000000.tar")
    assert sum("/resolve/" in path for _, path, *_ in hub.log) == 3


@pytest.mark.parametrize(
    "headers",
    [{"Retry-After": "2"}, {"RateLimit": '"resolvers";r=0;t=2', "RateLimit-Policy": '"fixed window";q=5;w=300'}],
)
def test_the_hub_says_how_long_to_wait(hub, local, headers, monkeypatch):
    storage = open_storage(FOLDER, options=PATIENT)
    storage.version("data-000000.tar")
    waits = []
    monkeypatch.setattr("fastvid.storage.requests.pause", lambda seconds: waits.append(seconds) or True)
    hub.refusals.append((429, headers))
    assert storage.read("data-000000.tar") == local.read("data-000000.tar")
    assert max(waits) >= 1.9


def test_errors_say_what_to_do(hub):
    with pytest.raises(StorageError, match="repository does not exist") as error:
        open_storage("hf://datasets/me/other", options=PATIENT).list()
    assert "HF_TOKEN" in error.value.hint
    with pytest.raises(StorageError, match="no revision 'lost'"):
        open_storage("hf://datasets/me/films@lost", options=PATIENT).list()
    with pytest.raises(StorageError, match="file does not exist"):
        open_storage(FOLDER, options=PATIENT).read("nothing")
    with pytest.raises(UsageError, match="names no repository"):
        open_storage("hf://datasets/me")
    with pytest.raises(StorageError, match="cannot write to the Hub"):
        open_storage(FOLDER).write("x", b"")


def test_a_token_goes_to_the_hub_and_to_no_other_host(hub, local, monkeypatch):
    hub.token = "hf_secret"
    with pytest.raises(StorageError) as error:
        open_storage(FOLDER, options=PATIENT).list()
    assert "HF_TOKEN" in error.value.hint
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert open_storage(FOLDER, options=PATIENT).read("data-000001.tar") == local.read("data-000001.tar")
    assert {token for _, path, _, token in hub.log if path.startswith("/signed/")} == {""}


def test_an_outage_ends_with_the_patience(hub):
    hub.refusals.extend([(500, {})] * 50)
    impatient = open_storage(FOLDER, options=RemoteOptions(patience_seconds=0.5))
    with pytest.raises(UnavailableError, match=r"responded 500 \(\d+ attempts"):
        impatient.read("data-000000.tar")
