"""Contract tests for storages. A test class inherits a contract and defines how to open a storage and place files."""

import os
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastvid.errors import StorageError, UsageError

ODD_NAMES = (
    "a b+c.bin",
    "50%.bin",
    "a%20b.bin",
    "sub/é ü.bin",
    "x#y?z=1&w.bin",
    "~t'()!*,;@$.bin",
    "sub/more/x.bin",
)


class StorageContract:
    """The contract for reading.

    A subclass defines two fixtures: `storage` is opened on an empty folder; `place` is a function (name, data) that
    writes or replaces a file there without using `storage`.
    """

    refuses_replaced = True
    """Whether reads of a replaced file raise; otherwise they continue with the old file."""

    def test_ranges_are_exact_in_any_order_and_number(self, storage, place):
        data = os.urandom(100_000)
        place("a/b.bin", data)
        draw = random.Random(0)
        ranges = [(draw.randrange(90_000), draw.randrange(10_000)) for _ in range(100)]
        ranges += [(0, 100_000), (0, 0), (99_999, 1), (0, 1)]
        views = [memoryview(bytearray(length)) for _, length in ranges]
        storage.read_into("a/b.bin", [(offset, view) for (offset, _), view in zip(ranges, views, strict=True)])
        assert [bytes(view) for view in views] == [data[offset : offset + length] for offset, length in ranges]
        storage.read_into("a/b.bin", [])

    def test_read_raises_when_the_file_ends_inside_a_range(self, storage, place):
        place("a.bin", bytes(1000))
        for offset, length, got in ((990, 20, 10), (1000, 5, 0), (5000, 5, 0)):
            with pytest.raises(
                StorageError, match=rf"ends inside the range {offset}\+{length} after {got} bytes.*a.bin"
            ):
                storage.read_into("a.bin", [(0, memoryview(bytearray(10))), (offset, memoryview(bytearray(length)))])

    def test_whole_files_are_read_and_mapped(self, storage, place):
        for name, data in (("full", os.urandom(70_000)), ("empty", b"")):
            place(name, data)
            assert storage.exists(name)
            assert storage.size(name) == len(data)
            assert storage.read(name) == data
            mapped = storage.map(name)
            assert mapped.readonly
            assert bytes(mapped) == data

    def test_error_names_the_missing_file(self, storage):
        assert not storage.exists("nothing")
        for call in (storage.read, storage.size, storage.map):
            with pytest.raises(StorageError, match=r"does not exist.*nothing"):
                call("nothing")
        with pytest.raises(StorageError, match=r"does not exist.*nothing"):
            storage.read_into("nothing", [(0, memoryview(bytearray(1)))])

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_unusual_names_are_used_literally(self, storage, place, name):
        place(name, name.encode())
        assert storage.read(name) == name.encode()
        assert storage.size(name) == len(name.encode())

    def test_names_outside_the_folder_are_rejected(self, storage):
        for name in ("../x", "a/../../x", "/etc/passwd"):
            with pytest.raises(UsageError, match="leads outside its folder"):
                storage.read(name)
            with pytest.raises(UsageError, match="leads outside its folder"):
                storage.read_into(name, [])

    def test_replaced_file_is_never_mixed_with_the_old_one(self, storage, place):
        old, new = b"o" * 50_000, b"n" * 50_000
        place("a.bin", old)
        part = memoryview(bytearray(100))
        storage.read_into("a.bin", [(0, part)])
        place("a.bin", new)
        views = [memoryview(bytearray(1000)) for _ in range(20)]
        ranges = [(number * 2000, view) for number, view in enumerate(views)]
        if self.refuses_replaced:
            with pytest.raises(StorageError, match="replaced"):
                storage.read_into("a.bin", ranges)
        else:
            storage.read_into("a.bin", ranges)
            assert {bytes(view) for view in views} == {b"o" * 1000}
        assert storage.read("a.bin") == new

    def test_threads_read_concurrently(self, storage, place):
        data = [os.urandom(5000) for _ in range(4)]
        for number, content in enumerate(data):
            place(f"{number}.bin", content)

        def wrong(start):
            found = []
            for step in range(12):
                number = (start + step) % 4
                views = [memoryview(bytearray(500)) for _ in range(4)]
                storage.read_into(f"{number}.bin", [(at * 1100, view) for at, view in enumerate(views)])
                good = [data[number][at * 1100 : at * 1100 + 500] for at in range(4)]
                if [bytes(view) for view in views] != good or bytes(storage.map(f"{number}.bin")) != data[number]:
                    found.append(number)
            return found

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(wrong, range(4))) == [[]] * 4

    def test_storage_is_picklable_and_reopens_after_close(self, storage, place):
        place("a.bin", b"abc")
        copy = pickle.loads(pickle.dumps(storage))
        assert copy.url == storage.url
        assert copy.read("a.bin") == storage.read("a.bin") == b"abc"
        storage.close()
        view = memoryview(bytearray(1))
        storage.read_into("a.bin", [(0, view), (1, view), (2, view)])
        assert bytes(view) == b"c"
        copy.close()

    def test_gap_is_positive_and_below_1_mib(self, storage):
        assert 0 < storage.gap < 2**20


class WritingContract(StorageContract):
    """The contract for reading and writing. `place` writes through a second storage of the same folder."""

    @pytest.fixture
    def place(self, storage):
        other = pickle.loads(pickle.dumps(storage))
        yield other.write
        other.close()

    def test_write_replaces_the_whole_file(self, storage):
        storage.write("a/x", b"old")
        storage.write("a/x", b"newer")
        assert storage.read("a/x") == b"newer"
        assert bytes(storage.map("a/x")) == b"newer"
        view = memoryview(bytearray(5))
        storage.read_into("a/x", [(0, view)])
        storage.write("a/x", b"third")
        storage.read_into("a/x", [(0, view)])
        assert bytes(view) == bytes(storage.map("a/x")) == b"third"

    @pytest.mark.parametrize("size", [0, 3, 12 * 2**20])
    def test_created_file_appears_when_the_block_ends(self, storage, size):
        block, piece = os.urandom(size // 3), bytearray(size // 3)
        with storage.create("a/new.bin") as file:
            for _ in range(3):
                piece[:] = block
                file.write(memoryview(piece))
                # Later changes of the buffer must not change the written bytes.
                piece[:] = bytes(len(piece))
            assert not storage.exists("a/new.bin")
            assert storage.list() == []
        assert storage.size("a/new.bin") == 3 * len(block)
        assert storage.read("a/new.bin") == block * 3

    @pytest.mark.parametrize("size", [3, 12 * 2**20])
    def test_old_file_remains_when_the_block_raises(self, storage, size):
        storage.write("x", b"old")

        def write_half(kind):
            with storage.create("x") as file:
                file.write(bytes(size))
                raise kind("half way")

        for kind in (ValueError, FileNotFoundError, KeyboardInterrupt):
            with pytest.raises(kind, match="half way"):
                write_half(kind)
        assert storage.read("x") == b"old"
        assert storage.list() == ["x"]

    def test_list_is_sorted_and_accepts_any_prefix(self, storage):
        names = sorted(["data-000000.tar", "data-000001.tar", "dataset.json", "generations/000001.json", *ODD_NAMES])
        for name in reversed(names):
            storage.write(name, b"x")
        assert storage.list() == names
        for prefix in (
            "data-0",
            "data",
            "generations/",
            "generations/0000",
            "sub",
            "sub/more/x.bin",
            "none",
            "no/ne",
        ):
            assert storage.list(prefix) == [name for name in names if name.startswith(prefix)]

    def test_delete_succeeds_when_the_file_is_missing(self, storage):
        storage.write("x", b"x")
        storage.delete("x")
        storage.delete("x")
        assert not storage.exists("x")
        assert storage.list() == []

    def test_swap_requires_the_expected_content(self, storage):
        assert not storage.swap("d.json", b"one", b"zero")
        assert not storage.exists("d.json")
        assert storage.swap("d.json", b"one", None)
        assert not storage.swap("d.json", b"two", None)
        assert not storage.swap("d.json", b"two", b"zero")
        assert not storage.swap("d.json", b"two", b"one and more")
        assert storage.read("d.json") == b"one"
        assert storage.swap("d.json", b"two", b"one")
        assert storage.read("d.json") == b"two"

    @pytest.mark.parametrize("start", [None, b"start"])
    def test_one_of_many_concurrent_swaps_succeeds(self, storage, start):
        for turn in range(5):
            name = f"{turn}.json"
            if start is not None:
                storage.write(name, start)
            others = [pickle.loads(pickle.dumps(storage)) for _ in range(4)]
            gate = threading.Barrier(len(others))

            def commit(number, others=others, gate=gate, name=name):
                gate.wait()
                return others[number].swap(name, b"%d" % number, start)

            with ThreadPoolExecutor(len(others)) as pool:
                done = list(pool.map(commit, range(len(others))))
            assert sum(done) == 1
            assert storage.read(name) == b"%d" % done.index(True)
            for other in others:
                other.close()

    def test_sweep_keeps_complete_files(self, storage):
        storage.write("x", b"x")
        storage.sweep()
        assert storage.read("x") == b"x"
