"""SHA-256 hashes equal those of `sha256sum`, for whole, mapped and split data."""

from __future__ import annotations

import subprocess

import numpy as np

from fastvid.runtime import values
from fastvid.runtime.values import sha256, sha256_of_file, sha256_of_pieces


def test_hashes_equal_sha256sum_for_every_input_form(tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.write_bytes(data := np.random.default_rng(0).bytes(100_003))
    wanted = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]
    assert sha256(data) == wanted
    with path.open("rb") as file:
        assert sha256_of_file(file.fileno()) == wanted
    for name in ("_BLOCK", "_READ"):
        monkeypatch.setattr(values, name, 1 << 10)  # many blocks, the last one not full
    assert sha256(memoryview(data)) == wanted
    with path.open("rb") as file:
        file.seek(5)
        assert sha256_of_file(file.fileno()) == wanted
        assert file.tell() == 5
    assert sha256_of_pieces([data[:7], b"", memoryview(data)[7:]]) == wanted
    assert sha256(b"") == sha256_of_pieces([])
