"""The bytes of shards, and what is committed with them.

Tars and sidecars count by their bytes, Parquet files by their content, because the library that writes them puts its
version inside. What `copy` takes as it is and what `index` finds are the same on every machine. What an encoder writes
belongs to its build, so those digests are filed by build; what `copy` puts into another container, by PyAV's muxer.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import av
import pyarrow.parquet as pq

import fastvid
from tests.golden.films import film
from tests.golden.seams import PROFILES, command, encoder

NAME = "shards"
ENCODED = tuple(name for name, profile in PROFILES.items() if not profile.copies)
ALL = tuple(PROFILES)
# What a job says of itself: words may change, the time and the place do.
_UNTOLD = ("path", "message", "seconds")


def raw(folder: Path) -> Path:
    """Four films in two classes, one of them a single frame."""
    for name, data in {
        "left/long": film(41, 96, 64, seed=1),
        "left/tall": film(20, 64, 96, seed=2, key_every=7),
        "right/one": film(1, 64, 48, seed=3),
        "right/wide": film(25, 176, 64, seed=4),
    }.items():
        path = folder / "raw" / f"{name}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder / "raw"


def digest(data: bytes) -> str:
    """Of one file."""
    return hashlib.sha256(data).hexdigest()[:32]


def contents(folder: Path) -> dict[str, str]:
    """A digest for each file of a dataset that its sources decide."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".tar", ".idx", ".pkt"):
            found[path.name] = digest(path.read_bytes())
        elif path.suffix == ".parquet":
            table = pq.read_table(path)
            kept = [name for name in table.schema.names if path.name != "ledger.parquet" or name not in _UNTOLD]
            rows = table.select(kept).to_pylist()
            # Versions of pyarrow differ in how they name what is inside a list.
            columns = [f"{name} {table.schema.field(name).type}".partition("<")[0] for name in kept]
            found[path.name] = digest(json.dumps([columns, rows], default=bytes.hex).encode())
    for path in sorted((folder / "generations").iterdir()):
        found[f"generation {int(path.stem)}"] = digest(json.dumps(_generation(path), sort_keys=True).encode())
    return found


def _generation(path: Path) -> dict[str, Any]:
    """A generation's record without words for people, and without what depends on the build."""
    record: dict[str, Any] = json.loads(path.read_text())
    del record["note"], record["annotations_sha256"]
    for shard in record["shards"]:
        del shard["encoder"]
    return record


def sharded(source: Path, out: Path, profile: str, *, samples_per_shard: int = 3) -> dict[str, str]:
    """A dataset by a profile."""
    report = fastvid.shard([source], out=out, profile=profile, samples_per_shard=samples_per_shard)
    found = contents(out) | {"packed": f"{report.packed} of {report.ledger.num_rows}"}
    shutil.rmtree(out)
    return found


def indexed(source: Path, folder: Path) -> dict[str, str]:
    """A tar as other tools write it, with films, labels and captions, made a dataset."""
    folder.mkdir()
    with tarfile.open(folder / "00000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, path in enumerate(sorted(source.rglob("*.mp4"))):
            for suffix, data in {
                "mp4": path.read_bytes(),
                "cls": str(number % 2).encode(),
                "txt": f"film {number}".encode(),
                "json": json.dumps({"number": number, "fps": 25}).encode(),
            }.items():
                member = tarfile.TarInfo(f"{number:05d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    command("index", folder / "00000.tar")
    return contents(folder)


def rebuilt(source: Path, folder: Path) -> dict[str, str]:
    """Sidecars that were lost, made of the tars alone."""
    fastvid.shard([source], out=folder, profile="copy", samples_per_shard=3)
    for path in folder.glob("data-*"):
        if path.suffix != ".tar":
            path.unlink()
    command("index", folder)
    return contents(folder)


def changed(source: Path, folder: Path) -> dict[str, str]:
    """A dataset to which videos were added, from which one was removed, and which was then compacted."""
    fastvid.shard([source / "left"], out=folder / "data", profile="copy")
    command("add", folder / "data", source / "right", "--prefix", "more", "--samples-per-shard", 1)
    command("remove", folder / "data", "--keys", "tall")
    command("compact", folder / "data")
    return contents(folder / "data")


def made_by(profile: str) -> tuple[str, str]:
    """Whose bytes the real videos become by a profile: as one word, and for people."""
    if not PROFILES[profile].copies:
        return encoder()
    version = ".".join(map(str, av.library_versions["libavformat"]))
    return f"libavformat {version}", f"PyAV's libavformat {version}"


def cases(folder: Path) -> Mapping[str, Callable[[], Any]]:
    """What is the same with every build."""
    source = raw(folder)
    return {
        "copy": lambda: sharded(source, folder / "copy", "copy"),
        "rebuilt": lambda: rebuilt(source, folder / "rebuilt"),
        "index": lambda: indexed(source, folder / "index"),
        "add, remove, compact": lambda: changed(source, folder / "changed"),
    }


def encoded(folder: Path) -> Mapping[str, Callable[[], Any]]:
    """What this build of ffmpeg writes: films by each profile that encodes."""
    source = raw(folder)
    return {profile: lambda profile=profile: sharded(source, folder / profile, profile) for profile in ENCODED}


def corpus(footage: Path, folder: Path) -> Mapping[str, Callable[[], Any]]:
    """All real videos that are in order, by each profile."""
    return {
        profile: lambda profile=profile: sharded(footage / "clean", folder / profile, profile, samples_per_shard=24)
        for profile in ALL
    }
