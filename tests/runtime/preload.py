"""What the fork server of `tests.forks` has ready: commands, the build of ffmpeg, and pandas, which pyarrow loads."""

import contextlib
import gc
import importlib

from fastvid.cli.main import COMMANDS
from fastvid.errors import FastvidError
from fastvid.media.ffmpeg import find_ffmpeg

for _module in ("pandas", "duckdb", *(target for target, _ in COMMANDS.values())):
    with contextlib.suppress(ImportError):  # where an extra is not installed
        importlib.import_module(_module)
with contextlib.suppress(FastvidError):  # where there is no ffmpeg, or a wrong one
    find_ffmpeg()
gc.freeze()  # the forks do not walk through all of it, which would copy its memory
