"""A third party's package, installed as pip would leave it, adds a decoder that a loader uses."""

from __future__ import annotations

import sys

import pytest

from fastvid.decode import backends
from fastvid.decode.backends import backend
from fastvid.decode.pyav import PyAvDecoder
from fastvid.errors import UsageError

MODULE = '''
from fastvid.decode.backends import Backend
from fastvid.decode.pyav import PyAvDecoder
from fastvid.format.schema import Codec

class Decoder(PyAvDecoder):
    """Somebody else's."""

BACKEND = Backend("theirs", "fastvid_theirs:Decoder", "cpu", frozenset(Codec), "fastvid-theirs")
NONSENSE = "no back-end"
'''


@pytest.fixture
def install(tmp_path, monkeypatch):
    def install(value):
        info = tmp_path / "fastvid_theirs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fastvid-theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fastvid.decoders]\ntheirs = fastvid_theirs:{value}\n")
        (tmp_path / "fastvid_theirs.py").write_text(MODULE)
        monkeypatch.syspath_prepend(tmp_path)
        backends.backends.cache_clear()

    yield install
    sys.modules.pop("fastvid_theirs", None)
    backends.backends.cache_clear()


def test_an_installed_package_adds_a_decoder(install, videos):
    install("BACKEND")
    theirs = backend("theirs")
    assert theirs.why_unavailable() is None
    assert issubclass(theirs.load(), PyAvDecoder)
    assert "theirs" in list(backends.backends())
    decoder = theirs.open()
    decoder.close()


def test_an_entry_point_that_is_no_backend_is_named(install):
    install("NONSENSE")
    with pytest.raises(UsageError, match="fastvid_theirs:NONSENSE"):
        backend("pyav")
