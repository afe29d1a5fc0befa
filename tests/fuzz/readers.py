"""Readers of what others have written, fed with damaged inputs.

python -m tests.fuzz.readers NAME FOLDER FIRST COUNT

Each try ends in success or in an error of fastvid, within `SECONDS` and `MEMORY`. Where `Reader.checked`, success must
mean the same content. What happened is added to FOLDER/outcomes.json; FOLDER/at is the number of the present try.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import resource
import shutil
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

import fastvid
from fastvid.errors import FastvidError, StateError
from fastvid.format.annotations import map_table, write_table
from fastvid.load.loader import ClipLoader
from fastvid.models.weights import read_state_dict
from fastvid.sharding.change.takedown import read_receipts
from fastvid.sharding.job.index import are_own, restore_dataset
from fastvid.sharding.job.ledger import read_blocked, read_ledger
from fastvid.sharding.lerobot import read as lerobot
from fastvid.sharding.sources.annotations import read_annotations
from fastvid.sharding.sources.tables import Columns
from fastvid.sharding.sources.tars import read_tar, sample_keys
from fastvid.storage import LocalStorage, RemoteOptions, open_storage
from fastvid.storage.cache import UNIT, UnitCache
from fastvid.train.config import config as recipes
from fastvid.train.config import overrides
from fastvid.train.records.checkpoint import decode
from tests.fuzz import damage
from tests.storage.faulty import FaultyServer
from tests.storage.local_server import RawServer

SECONDS, MEMORY = 5.0, 2**30
"""What one try may take."""


class Reader(ABC):
    """A reader of files; the corpus is a folder for each input."""

    checked: ClassVar = False  # whether all that is read is verified
    places: ClassVar[tuple[str, ...]] = ("**/*",)  # patterns of the files that are damaged

    @abstractmethod
    def corpus(self, folder: Path) -> None:
        """Write valid inputs: subfolders of a folder."""

    @abstractmethod
    def read(self, folder: Path) -> Any:
        """Read an input and return its content, which can be compared."""

    def damage(self, name: str, data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
        """Return a damaged file."""
        return damage.damaged(name, data, draw, others)


class LeRobot(Reader):
    """Metadata of LeRobot datasets of both versions, and their signals."""

    places = ("meta/**/*", "data/**/*")

    def corpus(self, folder: Path) -> None:
        from tests.sharding.lerobot.tools import as_version_2, copied

        copied(folder / "v3")
        as_version_2(folder / "v2")

    def read(self, folder: Path) -> Any:
        found = lerobot.read_lerobot(f"lerobot:{folder}")
        sources = lerobot.episode_sources(found)
        lerobot.episode_shards(found, sources, 2)
        json.dumps(lerobot.extras_of(found))
        return repr(sources), lerobot.read_signals_of(found, found.episodes).to_pydict()


ROWS = "path,label,split,start,end,caption\na.mp4,run,train,0.5,1.5,hello\nb.mp4,walk,val,1,2,there\n"
OBJECTS = [
    {"path": "a.mp4", "label": "run", "segments": [[0.5, 1.5], [2, 3]], "embedding": [0.5, 1.0]},
    {"path": "b.mp4", "labels": ["run", "walk"], "start": "00:01:02.500", "end": 70, "caption": "there"},
]
TABLES: Mapping[str, str] = {
    "csv:rows.csv": ROWS,
    "json:rows.json": json.dumps(OBJECTS),
    "jsonl:rows.jsonl": "\n".join(map(json.dumps, OBJECTS)),
    "hf:metadata.csv": "file_name,caption\na.mp4,hello\n",
    "list:list.txt": "a.mp4 0\nb.mp4 1\nc d.mp4 1\n",
    "kinetics:kinetics.csv": "label,youtube_id,time_start,time_end,split\nrun,abcdefghijk,1,11,train\n",
    "ava:ava.csv": "abc,0902,0.077,0.151,0.283,0.811,80,1\nabc,0903,0.077,0.151,0.283,0.811,9,1\n",
    "charades:charades.csv": "id,subject,actions,length\nAB12C,X1,c092 11.90 21.20;c147 0.00 12.60,24.83\n",
    "panda70m:panda.csv": (
        "videoID,url,timestamp,caption,matching_score\n"
        "ab,https://x/ab,\"[['0:00:08.475', '0:00:16.849']]\",\"['a']\",[0.5]\n"
    ),
    "webvid:webvid.csv": "videoid,contentUrl,duration,page_dir,name\n21,https://x/21.mp4,PT00H00M10S,p/q,a name\n",
    "activitynet_captions:net.json": json.dumps(
        {"v_a": {"duration": 82.7, "timestamps": [[0.8, 19.9], [2, 3]], "sentences": ["a", "b"]}}
    ),
    "youcook2:cook.json": json.dumps(
        {"database": {"Gx": {"subset": "training", "annotations": [{"segment": [90, 102], "sentence": "s"}]}}}
    ),
}


class Annotations(Reader):
    """Annotation files of every format, and words of --columns."""

    def corpus(self, folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for spec, text in TABLES.items():
            form, _, name = spec.partition(":")
            (folder / form).mkdir()
            (folder / form / name).write_text(text)
            if form in ("csv", "json", "jsonl"):
                (folder / form / "columns.txt").write_text("caption=caption,path=path")
        (folder / "parquet").mkdir()
        pq.write_table(
            pa.Table.from_pylist([OBJECTS[0], OBJECTS[0] | {"path": "c.mp4"}]), folder / "parquet/rows.parquet"
        )

    def read(self, folder: Path) -> Any:
        form, columns = folder.name, folder / "columns.txt"
        mapping = columns.read_bytes().decode("utf-8", "surrogateescape") if columns.exists() else ""
        name = next(path for path in folder.iterdir() if path != columns)
        Columns.parse(mapping or None)
        found = read_annotations([f"{form}:{name}"], columns=mapping or None)
        return repr((list(found.rows), found.classes))


class Recipes(Reader):
    """Overrides of a recipe, and of the configurations in it."""

    intact: frozenset[str] = frozenset()
    config: Any = None

    def corpus(self, folder: Path) -> None:
        (folder / "one").mkdir()
        config = recipes.load(recipes.names()[0])
        flat = recipes.flatten(recipes.to_json(config))
        lines = [f"{key}={flat.get(key)}" for key in overrides.keys(config)]
        more = [
            "data.mixture.second.path=x",
            "sync=kavg",
            "sync_options.period=4",
            "task=regression",
            "optim.base_lr=1e-3",
        ]
        (folder / "one/changes.txt").write_text("\n".join([*lines, *more]))

    def read(self, folder: Path) -> Any:
        self.config = self.config or recipes.load(recipes.names()[0])
        lines = (folder / "changes.txt").read_bytes().decode("utf-8", "surrogateescape").split("\n")
        self.intact = self.intact or frozenset(lines)
        changed = [line for line in lines if line not in self.intact]
        # Each alone: the first that is wrong ends the rest.
        return [repr(recipes.to_json(overrides.apply(self.config, [line]))) for line in changed]


def _videos(folder: Path) -> list[bytes]:
    from tests.datasets import make_clip

    return [make_clip(folder.parent / f"clip{number}.mp4", frames=6 + number, size="64x48") for number in range(3)]


def _made(folder: Path, command: str, name: str, *words: str) -> list[bytes]:
    """Make a dataset of three videos by a command, and return the videos."""
    from fastvid.cli.main import main

    (folder.parent / "videos").mkdir()
    videos = _videos(folder)
    for number, data in enumerate(videos):
        (folder.parent / f"videos/{number}.mp4").write_bytes(data)
    assert main([command, str(folder.parent / "videos"), "--out", str(folder / name), "--workers", "1", *words]) == 0
    return videos


def _content(dataset: fastvid.VideoDataset) -> Any:
    """Return everything that a dataset says, and its packets."""
    found: list[Any] = [dataset.annotations.to_pydict(), dataset.classes, dataset.streams, dataset.labels.tolist()]
    for number in range(len(dataset)):
        video = dataset[number]
        found.append((video.key, video.num_frames, video.fps, video.frames([0]).data.tobytes()))
    return found


class Generations(Reader):
    """The records, annotations, sidecars and tars of a dataset. They are sealed."""

    checked = True
    sealed = False

    def corpus(self, folder: Path) -> None:
        from tests.datasets import pack

        one, two, three = _videos(folder)
        pack(folder / "set", [[("a", one, 0), ("b", two, 1)], [("c", three, 1)]])

    def read(self, folder: Path) -> Any:
        return _content(fastvid.open(folder))

    def damage(self, name: str, data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
        # What fits its checksums is believed; here it must not.
        made = damage.damaged(name, data, draw, others)
        return made if made != data else data + b"\0"


class Resealed(Generations):
    """Records of a dataset whose publisher lies."""

    checked = False
    places = ("dataset.json", "generations/*.json")

    def read(self, folder: Path) -> Any:
        from fastvid.cli.main import main

        assert main(["inspect", str(folder)]) in (0, 1, 2, 3)
        return super().read(folder)

    def damage(self, name: str, data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
        return damage.of_sealed(data, draw, others)


class Jobs(Reader):
    """Ledgers, lists of blocked sources, receipts, and lists of videos in place."""

    def corpus(self, folder: Path) -> None:
        from fastvid.sharding.change.takedown import SourceSelection, take_down
        from fastvid.sharding.job.ledger import block

        _made(folder, "index", "set", "--prove", "none")
        storage = LocalStorage(folder / "set")
        take_down(storage, SourceSelection(["0.mp4"]), reason="asked")
        block(storage, ["ab" * 32])

    places = ("ledger.parquet", "blocked.json", "receipts/*", "data-*.files", "data-*.pkt")

    def read(self, folder: Path) -> Any:
        storage = LocalStorage(folder)
        dataset = fastvid.open(folder)
        assert all(dataset[number].num_frames for number in range(len(dataset)))
        return read_ledger(storage)[0].to_pydict(), read_blocked(storage), repr(read_receipts(storage))


class Tars(Reader):
    """Tars of others and our own, without their sidecars."""

    def corpus(self, folder: Path) -> None:
        import tarfile

        one, two, _ = _made(folder, "shard", "own", "--profile", "copy")
        for path in (folder / "own").rglob("*"):
            if path.is_file() and path.suffix != ".tar":
                path.unlink()
        (folder / "others").mkdir()
        members = {
            "x/a.mp4": one, "x/a.json": b'{"label": "run", "n": [1, 2.5]}', "x/a.txt": b"hello", "x/b.left.mp4": two,
            "x/b.right.mp4": one, "x/b.cls": b"3", "x/" + "c" * 150 + ".mp4": two,
        }  # fmt: skip
        with tarfile.open(folder / "others/data.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))

    def read(self, folder: Path) -> Any:
        (path,) = folder.glob("*.tar")
        if folder.name == "own" and are_own([str(path)]):
            shutil.rmtree(folder.parent.parent / "made", ignore_errors=True)
            restore_dataset([str(path)], str(folder.parent.parent / "made"))
            return _content(fastvid.open(folder.parent.parent / "made"))
        samples = read_tar(memoryview(path.read_bytes()))
        return repr(samples), sample_keys({"data": samples})

    def damage(self, name: str, data: bytes, draw: random.Random, others: list[bytes]) -> bytes:
        # Most bytes are pictures: damage a header, or text.
        at = draw.choice([place for place in range(0, len(data), 512) if data[place + 257 : place + 262] == b"ustar"])
        part = damage.of_bytes(data[at : at + 1024], draw, others)
        return data[:at] + part + data[at + 1024 :] if draw.random() < 0.8 else damage.of_bytes(data, draw, others)


class Cache(Reader):
    """Files of a node's cache: mapped tables, units of videos, and sidecars of a dataset on a web server."""

    checked = True

    def corpus(self, folder: Path) -> None:
        import pyarrow as pa

        (folder / "table").mkdir()
        write_table(folder / "table/rows", pa.table({"key": [f"k{n}" for n in range(500)], "label": list(range(500))}))
        (folder / "units").mkdir()
        self._unit(folder / "units")
        (folder / "remote").mkdir()
        self._remote(folder / "remote")

    def read(self, folder: Path) -> Any:
        if folder.name == "table":
            (folder / "rows.verified").unlink(missing_ok=True)
            return map_table(folder / "rows").to_pydict()
        return self._unit(folder) if folder.name == "units" else self._remote(folder)

    def _unit(self, folder: Path) -> bytes:
        data = random.Random(1).randbytes(5000)

        def fetch(ranges: Any) -> None:
            for offset, view in ranges:
                view[:] = data[offset : offset + len(view)]

        found = memoryview(bytearray(3000))
        UnitCache(folder, 10 * UNIT).read("video", len(data), [(1000, found)], fetch)
        return bytes(found)

    def _remote(self, folder: Path) -> Any:
        os.environ["FASTVID_CACHE"] = str(folder)
        return _content(fastvid.open(SERVED.url))


class Http(Reader):
    """What a web server answers. Its bytes are verified above, where their checksums are known."""

    BODY = random.Random(2).randbytes(3000)

    def corpus(self, folder: Path) -> None:
        head = (
            'HTTP/1.1 {}\r\nContent-Length: {}\r\nETag: "abc"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n{}\r\n'
        )
        answers = {
            "head": head.format("200 OK", len(self.BODY), "Accept-Ranges: bytes\r\n"),
            "whole": head.format("200 OK", len(self.BODY), ""),
            "part": head.format("206 Partial Content", 1000, f"Content-Range: bytes 500-1499/{len(self.BODY)}\r\n"),
        }
        for name, text in answers.items():
            (folder / name).mkdir()
            (folder / name / "answer.txt").write_bytes(text.encode())

    def read(self, folder: Path) -> Any:
        answer = (folder / "answer.txt").read_bytes()
        body = {"head": b"", "whole": self.BODY, "part": self.BODY[500:1500]}[folder.name]
        options = RemoteOptions(stall_seconds=0.5, connect_seconds=0.5, patience_seconds=0.001, cache="")
        with RawServer(answer + body, ends=True) as server:
            storage = open_storage(f"{server.endpoint}/set", options=options)
            if folder.name == "head":
                return storage.size("a.bin")
            if folder.name == "whole":
                return storage.read("a.bin")
            part = bytearray(1000)
            storage.read_into("a.bin", [(500, memoryview(part))])
            return bytes(part)


class States(Reader):
    """States of loaders, checkpoints, and weights of models."""

    def corpus(self, folder: Path) -> None:
        for name in ("state", "checkpoint", "weights"):
            (folder / name).mkdir()
        (folder / "state/state.json").write_text(json.dumps(self._loader().state_dict()))
        torch.save({"version": 1, "model": {"a": torch.arange(4.0)}, "loader": {}}, folder / "checkpoint/state.pt")
        torch.save({"state_dict": self._model().state_dict()}, folder / "weights/model.pt")

    def _model(self) -> torch.nn.Module:
        return torch.nn.Linear(3, 2)

    def _loader(self) -> ClipLoader:
        from tests.load.fakes import FakeDataset
        from tests.load.tools import make

        made: ClipLoader = make(FakeDataset(40))
        return made

    def read(self, folder: Path) -> Any:
        if folder.name == "state":
            loader = self._loader()
            loader.load_state_dict(_json((folder / "state.json").read_bytes()))
            return loader.state_dict()
        if folder.name == "checkpoint":
            return repr(decode((folder / "state.pt").read_bytes(), "state.pt"))
        return repr(read_state_dict(folder / "model.pt"))


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # whoever keeps states reads them
        raise StateError("not JSON") from error


READERS: Mapping[str, Reader] = {
    "lerobot": LeRobot(), "annotations": Annotations(), "recipes": Recipes(), "generations": Generations(),
    "resealed": Resealed(), "jobs": Jobs(), "tars": Tars(), "cache": Cache(), "http": Http(), "states": States(),
}  # fmt: skip
SERVED = None


@contextmanager
def served(folder: Path) -> Iterator[None]:
    """Serve a dataset while the block runs, for what a cache keeps of it."""
    from tests.datasets import pack

    global SERVED
    shutil.rmtree(folder / "served", ignore_errors=True)
    one, two, three = _videos(folder)
    local = pack(folder / "served", [[("a", one, 0), ("b", two, 1)], [("c", three, 1)]])
    with FaultyServer(local) as SERVED:
        yield


@dataclass
class Tries:
    """Tries of a reader, numbered: each has its own seed."""

    name: str
    folder: Path

    def __post_init__(self) -> None:
        self.reader, self.outcomes, self.failures = READERS[self.name], Counter[str](), list[str]()
        self.inputs = sorted(path for path in (self.folder / "corpus").iterdir())
        places = {path: [one for pattern in self.reader.places for one in path.glob(pattern)] for path in self.inputs}
        self.files = {
            path: sorted(one for one in found if one.is_file() and one.stat().st_size) for path, found in places.items()
        }
        self.data = {one: one.read_bytes() for found in self.files.values() for one in found}
        self.others = list(self.data.values())
        self.expected = {path: self.reader.read(path) for path in self.inputs}
        self.kept = {path: {one: one.read_bytes() for one in path.rglob("*") if one.is_file()} for path in self.inputs}

    def run(self, number: int) -> None:
        """Damage a file of an input, read the input, and put the file back."""
        draw = random.Random(f"{self.name} {number}")
        path = draw.choice(self.inputs)
        file = draw.choice(self.files[path])
        data = self.reader.damage(file.name, self.data[file], draw, self.others)
        file.write_bytes(data)
        begun = time.monotonic()
        try:
            same = self.reader.read(path) == self.expected[path]
            outcome = "same" if same else "other"
        except FastvidError:
            outcome = "refused"
        except BaseException:  # noqa: BLE001 - this is what must not happen
            outcome = "raw"
            self.failures.append(
                f"{self.name} {number} {file.relative_to(path.parent)}: {traceback.format_exc()[-1500:]}"
            )
        if time.monotonic() - begun > SECONDS:
            self.failures.append(f"{self.name} {number}: {time.monotonic() - begun:.1f} s")
        if outcome == "other" and self.reader.checked and data != self.data[file]:
            self.failures.append(f"{self.name} {number} {file.relative_to(path.parent)}: other content")
        self.outcomes[outcome] += 1
        for one, content in self.kept[path].items():
            if not one.exists() or one.read_bytes() != content:
                one.parent.mkdir(parents=True, exist_ok=True)
                one.write_bytes(content)


def main(name: str, folder: str, first: str, count: str) -> int:
    """Run tries and write what happened."""
    logging.disable()
    root = Path(folder)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere), served(root):
        if not (root / "corpus").exists():
            (root / "corpus").mkdir()
            READERS[name].corpus(root / "corpus")
        tries = Tries(name, root)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        for number in range(int(first), int(first) + int(count)):
            (root / "at").write_text(str(number))
            tries.run(number)
    record = {"outcomes": tries.outcomes, "failures": tries.failures}
    (root / "outcomes.json").write_text(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
