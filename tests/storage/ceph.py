"""A Ceph cluster of three processes in a folder, with its S3 gateway: one monitor, one store in memory, no copies."""

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

from bench.common.ports import reserved_port
from tests.storage.servers import started

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
KEYS = {
    "mon.": ("mon", "allow *"),
    "client.admin": ("mon", "allow *", "osd", "allow *"),
    "client.gateway": ("mon", "allow *", "osd", "allow *"),
    "osd.0": ("mon", "allow profile osd", "osd", "allow *"),
}
CONFIG = """
[global]
fsid = {fsid}
keyring = {folder}/keyring
mon host = v2:127.0.0.1:{monitor}
mon initial members = a
public addr = 127.0.0.1
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 2000
osd objectstore = memstore
memstore device bytes = 1073741824
run dir = {folder}
log file = {folder}/$name.log
admin socket = {folder}/$name.asok
pid file = {folder}/$name.pid
[mon.a]
mon data = {folder}/mon
[osd.0]
osd data = {folder}/osd
[client.gateway]
rgw frontends = beast endpoint=127.0.0.1:{gateway}
"""


def missing_programs() -> list[str]:
    """Return the required Ceph programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextlib.contextmanager
def ceph_gateway(folder: Path, *, key: str, secret: str) -> Iterator[str]:
    """Run a gateway with one user and yield its address."""
    with reserved_port() as monitor, reserved_port() as gateway:
        yield from _running(folder, monitor, gateway, key=key, secret=secret)


def _running(folder: Path, monitor: int, gateway: int, *, key: str, secret: str) -> Iterator[str]:
    fsid = str(uuid.uuid4())
    config = folder / "ceph.conf"
    config.write_text(CONFIG.format(fsid=fsid, folder=folder, monitor=monitor, gateway=gateway))
    for name in ("mon", "osd"):
        (folder / name).mkdir()

    def run(*command: str) -> None:
        with (folder / "setup.out").open("ab") as out:
            environment = os.environ | {"CEPH_CONF": str(config)}
            subprocess.run(command, stdout=out, stderr=out, env=environment, timeout=300, check=True)

    keyring = str(folder / "keyring")
    for number, (entity, caps) in enumerate(KEYS.items()):
        pairs = [part for at in range(0, len(caps), 2) for part in ("--cap", *caps[at : at + 2])]
        create = ["--create-keyring"] if number == 0 else []
        run("ceph-authtool", *create, keyring, "--gen-key", "-n", entity, *pairs)
    run("monmaptool", "--create", "--addv", "a", f"[v2:127.0.0.1:{monitor}]", "--fsid", fsid, f"{folder}/monmap")
    run("ceph-mon", "-c", str(config), "--mkfs", "-i", "a", "--monmap", f"{folder}/monmap", "--keyring", keyring)
    with contextlib.ExitStack() as running:
        running.enter_context(started(["ceph-mon", "-c", str(config), "-i", "a", "-f"], monitor, folder / "mon.out"))
        disk = str(uuid.uuid4())
        run("ceph", "-c", str(config), "osd", "new", disk)
        run("ceph-osd", "-c", str(config), "-i", "0", "--mkfs", "--osd-uuid", disk)
        running.enter_context(started(["ceph-osd", "-c", str(config), "-i", "0", "-f"], None, folder / "osd.out"))
        user = ("--uid=test", "--display-name=test", f"--access-key={key}", f"--secret={secret}")
        run("radosgw-admin", "-c", str(config), "user", "create", *user)
        command = ["radosgw", "-c", str(config), "-n", "client.gateway", "-f"]
        running.enter_context(started(command, gateway, folder / "gateway.out"))
        yield f"http://127.0.0.1:{gateway}"
