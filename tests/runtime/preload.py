"""What the fork server of `tests.forks` has ready: commands, the build of ffmpeg, and pandas, which pyarrow loads."""

import contextlib
import gc
import importlib

from fastvid.cli.main import COMMANDS, find_command
from fastvid.errors import FastvidError
from fastvid.media.ffmpeg import find_ffmpeg

for _name in COMMANDS:
    with contextlib.suppress(ImportError):  # where an extra is not installed
        find_command(_name)
for _module in ("pandas", "duckdb"):
    importlib.import_module(_module)
with contextlib.suppress(FastvidError):  # where there is no ffmpeg, or a wrong one
    find_ffmpeg()
gc.freeze()  # the forks do not walk through all of it, which would copy its memory
