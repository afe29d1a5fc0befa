"""A third-party package, installed as by pip, adds a decoder, and one that cannot is named."""

from __future__ import annotations

import sys

import pytest

from fastvid.cli.main import main
from fastvid.decode import backends
from fastvid.decode.backends import ENTRY_POINTS, backend
from fastvid.decode.pyav import PyAvDecoder
from fastvid.errors import MissingDependency

MODULE = '''
from fastvid.decode.backends import Backend
from fastvid.decode.pyav import PyAvDecoder
from fastvid.format.schema import Codec

class Decoder(PyAvDecoder):
    """A third-party decoder."""

BACKEND = Backend("theirs", "fastvid_theirs:Decoder", "cpu", frozenset(Codec), "fastvid-theirs")
TWICE = Backend("pyav", "fastvid_theirs:Decoder", "cpu", frozenset(Codec), "fastvid-theirs")
NONSENSE = "no back-end"

def __getattr__(name):
    if name == "BROKEN":
        raise OSError("libtheirs.so: cannot open shared object file")
    raise AttributeError(name)
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


def test_installed_package_adds_a_decoder(install, videos):
    install("BACKEND")
    theirs = backend("theirs")
    assert theirs.why_unavailable() is None
    assert issubclass(theirs.load(), PyAvDecoder)
    assert "theirs" in list(backends.backends())
    decoder = theirs.open()
    decoder.close()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("NONSENSE", "it is a str, not a Backend"),
        ("Decoder", "it is a class, not a Backend"),
        ("TWICE", "decoder 'pyav' is registered twice"),
        ("ABSENT", "AttributeError"),
        ("BROKEN", "OSError"),
    ],
)
def test_broken_package_is_named_and_does_not_affect_others(install, value, why, capsys, monkeypatch):
    install(value)
    assert backend("pyav").load() is PyAvDecoder
    theirs = f"fastvid_theirs:{value}"
    assert why in backend(theirs).why_unavailable()
    for name in (theirs, "theirs"):
        with pytest.raises(MissingDependency, match=f"entry point '{theirs}' of group {ENTRY_POINTS}"):
            backend(name).open()
    monkeypatch.setattr("fastvid.sharding.verify.self_test.self_test", lambda decoders: [])
    assert main(["doctor", "--no-parity"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "fastvid_theirs" in line]
    assert "NO" in line
    assert why in line
