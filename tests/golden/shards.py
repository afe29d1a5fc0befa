"""Digests of shards and of the files committed with them.

Tars and sidecars are compared by bytes, Parquet files by content, because they contain the writer's version. Videos
that `copy` packs unchanged and the results of `index` are the same on every machine. Encoded bytes depend on the
encoder's build, so those digests are stored by build.
"""

import hashlib
import io
import json
import shutil
import tarfile

import pyarrow.parquet as pq

import fastvid
from tests.golden.films import film
from tests.golden.seams import PROFILES, command

NAME = "shards"
ENCODED = tuple(name for name, profile in PROFILES.items() if not profile.copies)
# Columns of the ledger that may change: wording, duration and location.
_UNTOLD = ("path", "message", "seconds", "source_tag")


def raw(folder):
    """Write four films in two classes, one of them a single frame; return their folder."""
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


def digest(data):
    """Return the digest of one file."""
    return hashlib.sha256(data).hexdigest()[:32]


def contents(folder):
    """Return a digest of each file of a dataset that is determined by its sources."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".tar", ".idx", ".pkt"):
            found[path.name] = digest(path.read_bytes())
        elif path.suffix == ".parquet":
            table = pq.read_table(path)
            kept = [name for name in table.schema.names if path.name != "ledger.parquet" or name not in _UNTOLD]
            rows = table.select(kept).to_pylist()
            # Versions of pyarrow name the element type of a list differently.
            columns = [f"{name} {table.schema.field(name).type}".partition("<")[0] for name in kept]
            found[path.name] = digest(json.dumps([columns, rows], default=bytes.hex).encode())
    for path in sorted((folder / "generations").iterdir()):
        found[f"generation {int(path.stem)}"] = digest(json.dumps(_generation(path), sort_keys=True).encode())
    return found


def _generation(path):
    """Return a generation's record without note, time and reason, and without values that depend on the build."""
    record = json.loads(path.read_text())
    for name in ("note", "time", "reason", "annotations_sha256", "sha256"):
        del record[name]
    for shard in record["shards"]:
        del shard["encoder"]
    return record


def sharded(source, out, profile):
    """Shard videos with a profile and return the digests."""
    # The films are smaller than the profiles' pictures.
    how = PROFILES[profile] if PROFILES[profile].copies else PROFILES[profile].changed(enlarge=True)
    report = fastvid.shard([source], out=out, profile=how, samples_per_shard=3)
    found = contents(out) | {"packed": f"{report.packed} of {report.ledger.num_rows}"}
    shutil.rmtree(out)
    return found


def indexed(source, folder):
    """Index a tar of another tool, with films, labels and captions, and return the digests."""
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


def rebuilt(source, folder):
    """Delete all sidecars, recompute them from the tars, and return the digests."""
    fastvid.shard([source], out=folder, profile="copy", samples_per_shard=3)
    for path in folder.glob("data-*"):
        if path.suffix != ".tar":
            path.unlink()
    command("index", folder)
    return contents(folder)


def changed(source, folder):
    """Add videos to a dataset, remove one, compact, and return the digests."""
    fastvid.shard([source / "left"], out=folder / "data", profile="copy")
    command("add", folder / "data", source / "right", "--prefix", "more", "--samples-per-shard", 1)
    command("remove", folder / "data", "--keys", "tall")
    command("compact", folder / "data")
    return contents(folder / "data")


def cases(folder):
    """Return the cases that are the same with every build."""
    source = raw(folder)
    return {
        "copy": lambda: sharded(source, folder / "copy", "copy"),
        "rebuilt": lambda: rebuilt(source, folder / "rebuilt"),
        "index": lambda: indexed(source, folder / "index"),
        "add, remove, compact": lambda: changed(source, folder / "changed"),
    }


def encoded(folder):
    """Return the cases of films encoded by this ffmpeg build, with each encoding profile."""
    source = raw(folder)
    return {profile: lambda profile=profile: sharded(source, folder / profile, profile) for profile in ENCODED}
