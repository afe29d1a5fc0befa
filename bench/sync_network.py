"""Two network namespaces joined by one cable whose bandwidth is limited by tc: real packets, counted by the kernel.

Needs root, iproute2 and the kernel's tbf queue. Delay is not made here: the netem queue is missing in many kernels.
"""

from __future__ import annotations

import os
import subprocess
from typing import Final

from fastvid.errors import UsageError

_NAMES: Final = (f"fastvid-a-{os.getpid()}", f"fastvid-b-{os.getpid()}")
_DEVICE: Final = "cable"
# Of the block that is set aside for tests, RFC 5737, so that no real network is meant.
_ADDRESSES: Final = ("192.0.2.1", "192.0.2.2")
# tbf sends at most this much at once; a segment that the kernel has put together is up to 64 KiB.
_BURST_BYTES: Final = 131072
_QUEUE: Final = "2s"


class Cable:
    """The namespaces, from `__enter__` to `__exit__`.

    Attributes:
        prefixes: Command that runs another one in each namespace.
        environment: What processes of a group need there.
    """

    def __init__(self) -> None:
        self.prefixes = [["ip", "netns", "exec", name] for name in _NAMES]
        self.environment = {"MASTER_ADDR": _ADDRESSES[0], "GLOO_SOCKET_IFNAME": _DEVICE}

    def __enter__(self) -> Cable:
        try:
            for name in _NAMES:
                _run("ip", "netns", "add", name)
            _run("ip", "-n", _NAMES[0], "link", "add", _DEVICE, "type", "veth", "peer", _DEVICE, "netns", _NAMES[1])
            for name, address in zip(_NAMES, _ADDRESSES, strict=True):
                _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", _DEVICE)
                for device in ("lo", _DEVICE):
                    _run("ip", "-n", name, "link", "set", device, "up")
        except (OSError, UsageError):
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in _NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)

    def limit(self, bits_per_s: int) -> None:
        """Limits what each end may send; 0 for no limit."""
        for name in _NAMES:
            at = ("tc", "-n", name, "qdisc")
            if bits_per_s:
                shape = ("tbf", "rate", f"{bits_per_s}bit", "burst", f"{_BURST_BYTES}b", "latency", _QUEUE)
                _run(*at, "replace", "dev", _DEVICE, "root", *shape)
            else:
                subprocess.run([*at, "del", "dev", _DEVICE, "root"], check=False, stderr=subprocess.DEVNULL)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(
            f"{' '.join(command)} failed: {done.stderr.strip()}",
            hint="namespaces need root, iproute2 and the kernel's veth and tbf; --network wrapper needs none of them",
        )
