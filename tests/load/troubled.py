"""Decoders for worker processes, which import this file and must not import torch for it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from fastvid.decode.pyav import PyAvDecoder
from fastvid.errors import MissingDependency

HANGS = "FASTVID_TEST_HANGS"
"""Variable that names a file, which is made before a clip hangs."""

SENDS = "FASTVID_TEST_SENDS"
"""Variable that names a file, whose bytes are sent to the parent in place of an answer."""


class TroubledDecoder(PyAvDecoder):
    """Does to the clip of some keys what native code can do."""

    def decode(self, clips, outputs):
        key = clips[0].key
        if key == "hangs":
            if HANGS in os.environ:
                Path(os.environ[HANGS]).touch()
            ctypes.PyDLL(None).sleep(600)  # with the interpreter held, so that no thread of the process can go on
        elif key == "sends":
            os.write(int(sys.argv[1]), Path(os.environ[SENDS]).read_bytes())
            time.sleep(600)
        elif key == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif key == "bug":
            raise ZeroDivisionError("not the clip's fault")
        return super().decode(clips, outputs)


class AbsentDecoder(PyAvDecoder):
    """Loads here, but does not open."""

    def __init__(self):
        raise MissingDependency("no such device")
