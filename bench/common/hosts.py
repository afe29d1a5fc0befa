"""Simulated hosts on one machine: network namespaces joined by a bridge, with rates limited by tc.

Packets are real and counted by the kernel. Requires root, iproute2, and the kernel's veth, bridge and tbf. Latency is
not simulated here, because many kernels lack netem.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Sequence
from typing import Final

from fastvid.errors import UsageError

_DEVICE: Final = "cable"
# From the block reserved for documentation by RFC 5737, so no real network is affected.
_ADDRESS: Final = "192.0.2.{}"
# Burst size of tbf; must exceed the 64 KiB of a segment merged by the kernel.
_BURST_BYTES: Final = 131072
_QUEUE: Final = "2s"
_numbers = itertools.count()


class Hosts:
    """Network namespaces that exist while the context is open."""

    def __init__(self, count: int) -> None:
        if not 2 <= count <= 250:
            raise UsageError(f"{count} hosts, expected 2 to 250")
        group = f"fastvid-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{group}-switch"
        self._names = [f"{group}-{number}" for number in range(count)]
        self.prefixes = [["ip", "netns", "exec", name] for name in self._names]
        self.addresses = [_ADDRESS.format(number + 1) for number in range(count)]
        self.environment = {"GLOO_SOCKET_IFNAME": _DEVICE, "NCCL_SOCKET_IFNAME": _DEVICE}

    def __enter__(self) -> Hosts:
        try:
            _run("ip", "netns", "add", self._switch)
            _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
            for number, (name, address) in enumerate(zip(self._names, self.addresses, strict=True)):
                _run("ip", "netns", "add", name)
                port = f"port{number}"
                ends = (_DEVICE, "type", "veth", "peer", "name", port, "netns", self._switch)
                _run("ip", "-n", name, "link", "add", *ends)
                _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
                _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", _DEVICE)
                for device in ("lo", _DEVICE):
                    _run("ip", "-n", name, "link", "set", device, "up")
        except (OSError, UsageError):
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)

    def limit(self, bits_per_s: int) -> None:
        """Limit the rate at which each host sends and receives; 0 removes the limit."""
        for number, name in enumerate(self._names):
            for where, device in ((name, _DEVICE), (self._switch, f"port{number}")):
                at = ("tc", "-n", where, "qdisc")
                if bits_per_s:
                    shape = ("tbf", "rate", f"{bits_per_s}bit", "burst", f"{_BURST_BYTES}b", "latency", _QUEUE)
                    _run(*at, "replace", "dev", device, "root", *shape)
                else:
                    subprocess.run([*at, "del", "dev", device, "root"], check=False, stderr=subprocess.DEVNULL)

    def cut(self, host: int) -> None:
        """Disconnect a host: its packets are lost silently."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def join(self, host: int) -> None:
        """Reconnect a host."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "up")

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """Return the command line that runs `words` on a host."""
        return [*self.prefixes[host], *words]


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(
            f"{' '.join(command)} failed: {done.stderr.strip()}",
            hint="run as root with iproute2 and a kernel that has veth, bridge and tbf",
        )
