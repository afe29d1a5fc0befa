"""Writing to an object store is atomic, even if responses are lost."""

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")

from fastvid.errors import StorageError
from fastvid.storage import RemoteOptions, client, open_storage
from tests.storage.lossy import LossyProxy

OPTIONS = RemoteOptions(patience_seconds=20, cache="")
PART = 5 * 2**20  # the least that S3 takes


@pytest.fixture
def bucket(s3):
    return s3.bucket()


@pytest.fixture
def storage(bucket, monkeypatch):
    monkeypatch.setattr(client, "PART_BYTES", PART)
    store = open_storage(f"s3://{bucket}/set", options=OPTIONS)
    yield store
    store.close()


@pytest.fixture
def lossy(s3, bucket, monkeypatch):
    """A storage that reaches the bucket through a lossy proxy, and the proxy."""
    with LossyProxy(s3.endpoint) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = open_storage(f"s3://{bucket}/set", options=OPTIONS)
        yield store, proxy
        store.close()


def test_large_file_is_uploaded_in_parts_and_appears_at_the_end(s3, bucket, storage):
    with storage.create("a.bin") as file:
        for _ in range(3):
            file.write(bytes(PART))
        assert s3.uploads(bucket) == 1
    assert s3.uploads(bucket) == 0
    made = [(method, path.partition("?")[0], "partNumber" in path) for method, path, _ in s3.requests(bucket)]
    assert made.count(("PUT", "set/a.bin", True)) == 3
    assert made[-1] == ("POST", "set/a.bin", False)
    storage.write("b.bin", bytes(2 * PART))  # what is given whole is one request
    assert s3.requests(bucket)[len(made) :] == [("PUT", "set/b.bin", 200)]


def test_swap_succeeds_when_its_response_is_lost(lossy):
    storage, proxy = lossy
    for data, expected in ((b"one", None), (b"two", b"one")):
        proxy.lose_next("PUT")
        assert storage.swap("d.json", data, expected)
        assert storage.read("d.json") == data
    assert len(proxy.lost) == 2


def test_swap_with_lost_response_would_fail_without_the_mark(lossy, monkeypatch):
    storage, proxy = lossy
    look = client.StoreClient._look
    monkeypatch.setattr(client.StoreClient, "_look", lambda self, name: (None, look(self, name)[1]))
    proxy.lose_next("PUT")
    assert not storage.swap("d.json", b"one", None)
    assert storage.read("d.json") == b"one"


def test_swap_fails_when_another_writer_wrote_equal_bytes(lossy, storage):
    behind, proxy = lossy
    # Both write the same record. The other writer is first, and the response that tells so is lost once.
    storage.write("d.json", b"start")
    reading = behind._client.get_range

    def overtaken(*asked):
        found = reading(*asked)
        assert storage.swap("d.json", b"commit 2", b"start")
        return found

    behind._client.get_range = overtaken
    proxy.lose_next("PUT")
    assert not behind.swap("d.json", b"commit 2", b"start")
    assert len(proxy.lost) == 1


def test_swap_succeeds_when_the_store_compares_tags_without_quotes(lossy, storage):
    behind, proxy = lossy
    proxy.compares_quotes = True
    assert behind.swap("d.json", b"one", None)
    assert behind.swap("d.json", b"two", b"one")
    assert not behind.swap("d.json", b"three", b"one")
    assert behind.read("d.json") == b"two"


@pytest.mark.parametrize(
    ("method", "within"),
    [("PUT", "a.bin"), ("PUT", "partNumber=1"), ("POST", "uploads"), ("POST", "uploadId"), ("POST", "delete")],
)
def test_write_is_retried_when_its_response_is_lost(lossy, monkeypatch, method, within):
    monkeypatch.setattr(client, "PART_BYTES", PART)
    storage, proxy = lossy
    proxy.lose_next(method, within)
    storage.write("a.bin", b"a")
    with storage.create("b.bin") as file:
        file.write(bytes(PART + 1))
    storage.write("c.bin", b"c")
    storage.delete("c.bin")
    assert storage.read("a.bin") == b"a"
    assert storage.size("b.bin") == PART + 1
    assert storage.list() == ["a.bin", "b.bin"]
    assert len(proxy.lost) == 1


def test_failed_completion_of_an_upload_raises_and_is_not_retried(lossy, monkeypatch):
    monkeypatch.setattr(client, "PART_BYTES", PART)
    storage, proxy = lossy
    proxy.garble = True
    proxy.lose_next("POST", "uploadId")

    def create():
        with storage.create("a.bin") as file:
            file.write(bytes(PART + 1))

    with pytest.raises(StorageError, match=r"a\.bin") as caught:
        create()
    assert "closed" not in str(caught.value)
    assert len(proxy.lost) == 1


def test_error_names_the_missing_bucket(s3):
    storage = open_storage("s3://no-such-bucket/x", options=OPTIONS)

    def create():
        with storage.create("a.bin") as file:
            file.write(b"x")

    calls = (lambda: storage.read("a"), lambda: storage.write("a", b"x"), storage.list, create)
    for call in calls:
        with pytest.raises(StorageError, match=r"bucket does not exist|NoSuchBucket"):
            call()
