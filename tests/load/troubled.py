"""Decoders for worker processes, which import this file and must not import torch with it."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from fastvid.decode.pyav import PyAvDecoder
from fastvid.errors import MissingDependency

HANGS = "FASTVID_TEST_HANGS"
"""Environment variable with the name of a file that is created before a clip hangs."""

DIED = "FASTVID_TEST_DIED"
"""Environment variable with the name of a file that is created before a worker is killed for the first time."""

SENDS = "FASTVID_TEST_SENDS"
"""Environment variable with the name of a file whose bytes are sent to the parent instead of an answer."""


class TroubledDecoder(PyAvDecoder):
    """For clips with certain keys, fails in the ways that native code can fail."""

    def decode(self, clips, outputs):
        key = clips[0].key
        if key == "hangs":
            if HANGS in os.environ:
                Path(os.environ[HANGS]).touch()
            ctypes.PyDLL(None).sleep(600)  # holds the GIL, so that no thread of the process can run
        elif key == "sends":
            os.write(int(sys.argv[1]), Path(os.environ[SENDS]).read_bytes())
            time.sleep(600)
        elif key == "dies-once" and not (died := Path(os.environ[DIED])).exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        elif key == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif key == "bug":
            raise ZeroDivisionError("not the clip's fault")
        return super().decode(clips, outputs)


class AbsentDecoder(PyAvDecoder):
    """Can be imported here, but not opened."""

    def __init__(self):
        raise MissingDependency("no such device")


class SlowDecoder(PyAvDecoder):
    """Takes so long that a worker is busy whenever it is killed."""

    def decode(self, clips, outputs):
        time.sleep(0.1)
        return super().decode(clips, outputs)
