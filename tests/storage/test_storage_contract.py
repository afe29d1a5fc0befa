"""All storages fulfil the same contract."""

import itertools
import os

import pytest

from fastvid.errors import StorageError
from fastvid.storage import LocalStorage, RemoteOptions, local, open_storage
from tests.storage.contract import StorageContract, WritingContract
from tests.storage.faulty import FaultyServer
from tests.storage.gcs import GcsServer

QUICK = RemoteOptions(stall_seconds=5, patience_seconds=10, cache="")


class ReadOnlyContract(StorageContract):
    """Plain HTTP."""

    def test_writing_and_listing_are_rejected(self, storage, place):
        place("x", b"x")

        def create():
            with storage.create("x"):
                pass

        calls = (lambda: storage.write("x", b""), lambda: storage.swap("x", b"", None), lambda: storage.delete("x"))
        for call in (*calls, create):
            with pytest.raises(StorageError, match="cannot write over HTTP"):
                call()
        with pytest.raises(StorageError, match="cannot list files over HTTP"):
            storage.list()
        assert storage.read("x") == b"x"


class TestLocal(WritingContract):
    refuses_replaced = False  # the old file stays open

    @pytest.fixture
    def storage(self, tmp_path, monkeypatch):
        monkeypatch.setattr(local, "MAX_OPEN_FILES", 2)  # handles are evicted while other threads read by them
        return LocalStorage(tmp_path / "folder")


class TestS3(WritingContract):
    @pytest.fixture
    def storage(self, s3, monkeypatch):
        monkeypatch.setattr("fastvid.storage.client.PART_BYTES", 5 * 2**20)  # the minimum of S3
        bucket = s3.bucket()
        store = open_storage(f"s3://{bucket}/some folder/set", options=QUICK)
        yield store
        store.close()
        assert s3.uploads(bucket) == 0


class TestCachedS3(WritingContract):
    @pytest.fixture
    def storage(self, s3, tmp_path):
        store = open_storage(f"s3://{s3.bucket()}", options=RemoteOptions(cache=tmp_path / "cache", cache_bytes=10**8))
        yield store
        store.close()


class TestGcs(WritingContract):
    @pytest.fixture
    def storage(self, obstore, tmp_path, monkeypatch):
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr("fastvid.storage.client.PART_BYTES", 5 * 2**20)
        with GcsServer() as server:
            monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(server.account(tmp_path / "account.json")))
            store = open_storage("gs://bucket/some folder", options=QUICK)
            yield store
            store.close()
            assert not server.uploads


class TestHttp(ReadOnlyContract):
    @pytest.fixture
    def server(self):
        with FaultyServer() as server:
            yield server

    @pytest.fixture
    def storage(self, obstore, server, monkeypatch):
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        store = open_storage(server.url, options=QUICK)
        yield store
        store.close()

    @pytest.fixture
    def place(self, server):
        return server.files.__setitem__


class TestWeb(ReadOnlyContract):
    folders, seconds = itertools.count(), itertools.count(1_700_000_000)

    @pytest.fixture
    def folder(self, web):
        return f"set {next(self.folders)}"

    @pytest.fixture
    def storage(self, obstore, web, folder):
        store = open_storage(f"{web.url}/{folder}/", options=QUICK)
        yield store
        store.close()

    @pytest.fixture
    def place(self, web, folder):
        def put(name, data):
            disk = LocalStorage(web.folder / folder)
            disk.write(name, data)
            # A server may derive the tag from the size and the modification time in seconds.
            os.utime(disk.path(name), (second := next(self.seconds), second))

        return put
