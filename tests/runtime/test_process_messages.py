"""What a child process sends: taken as plain data, refused where it is anything else."""

from __future__ import annotations

import pickle
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import FormatError
from fastvid.runtime.processes import HEADER_BYTES, Inbox, pack, unpack


@given(st.lists(st.tuples(st.dictionaries(st.text(), st.integers()), st.binary()), max_size=5), st.integers(1, 50))
def test_messages_are_reassembled_from_any_fragments(pieces, step):
    inbox, sent = Inbox(), b"".join(pack(header, blob) for header, blob in pieces)
    found = [piece for start in range(0, len(sent), step) for piece in inbox.add(sent[start : start + step])]
    assert [(header, bytes(blobs)) for header, blobs in found] == pieces


def test_oversized_message_is_refused_before_it_has_arrived():
    piece = pack({}, bytes(1000))
    assert list(Inbox(len(piece)).add(piece))
    with pytest.raises(FormatError, match=f"has {len(piece)} bytes, at most 999"):
        list(Inbox(999).add(piece[:HEADER_BYTES]))


@pytest.mark.parametrize("header", [pickle.dumps({}), b"[1, 2]", b"null", b"\xff", b"[" * 100_000])
def test_a_sound_piece_whose_header_is_no_json_object_is_refused(header):
    with pytest.raises(FormatError, match="header of a message is"):
        unpack(struct.pack("<IQI", len(header), 0, zlib.crc32(header)) + header)
