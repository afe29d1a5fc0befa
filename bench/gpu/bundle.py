"""``--bundle``: one tar with which a stranger measures a GPU: fastvid's wheel, the pack, and a script.

PyTorch, PyNvVideoCodec, DALI and torchcodec come from the stranger's package index, in the versions named here; wheels
that are added, and match the stranger's Python, are taken instead.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.common.newest import NEWEST
from bench.gpu.pack import pack
from fastvid.errors import UsageError

LIMIT_MIB: Final = 64
_ROOT: Final = Path(__file__).parents[2]


def bundle(out: Path, wheels: Path | None, footage: Path | None, **settings: Any) -> float:
    """Write the tar and return its size in MiB.

    `wheels`: a folder of wheels to add. The other arguments are those of `pack`.
    """
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, out.stem)
        into = folder / "wheels"
        into.mkdir(parents=True)
        pack(footage, folder / "pack", **settings)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(into), str(_ROOT)]
        if subprocess.run(command, check=False).returncode:
            raise UsageError(f"`{' '.join(command)}` failed", hint="run it in a checkout, with a package index")
        for wheel in wheels.glob("*.whl") if wheels else ():
            shutil.copy(wheel, into)
        shutil.copy(Path(__file__).with_name("run.sh"), folder)
        # What the tests pin, and the newest torchcodec: theirs runs beside a torch without CUDA.
        pins = (_ROOT / "constraints.txt").read_text()
        newest = re.sub("^torchcodec==.*", NEWEST["torchcodec"].requirements[0], pins, flags=re.MULTILINE)
        (folder / "constraints.txt").write_text(newest)
        with tarfile.open(out, "w") as tar:
            tar.add(folder, folder.name)
    size = out.stat().st_size / 2**20
    if size > LIMIT_MIB:
        out.unlink()
        raise UsageError(f"the bundle has {size:.1f} MiB, more than {LIMIT_MIB}", file=out, hint="add fewer wheels")
    return size
