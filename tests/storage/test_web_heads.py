"""Heads of responses of web servers, right and wrong ones, written byte by byte."""

import pytest

from fastvid.errors import StorageError
from fastvid.storage import RemoteOptions, open_storage
from fastvid.storage.protocol import Version
from fastvid.storage.web import WebClient
from tests.storage.local_server import RawServer

OK = b"HTTP/1.1 200 OK\r\n"
BODY = b"Content-Length: 5\r\n\r\nfive!"


@pytest.fixture
def server():
    with RawServer() as server:
        yield server


def read(server, count=1, **options):
    client, found = WebClient(server.endpoint, RemoteOptions(patience_seconds=0.2), **options), []
    for _ in range(count):
        client.stream("film", lambda _, pieces: found.append(b"".join(pieces)))
    return set(found)


@pytest.mark.parametrize(
    ("answer", "stays"),
    [
        (OK + BODY, True),
        (OK + b"Connection: close\r\n" + BODY, False),
        (OK.replace(b"1.1", b"1.0") + BODY, False),
        (OK.replace(b"1.1", b"1.0") + b"Connection: Keep-Alive\r\n" + BODY, True),
        (b"HTTP/1.1 200\nCONTENT-LENGTH:5\n\nfive!", True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n" + OK + BODY, True),
        (OK + b"X-Folded: one\r\n  Content-Length: 3\r\n" + BODY, True),
        (OK + b"Content-Length: 5\r\nContent-Length: 3\r\n\r\nfive!", True),
    ],
)
def test_heads_are_understood_and_connections_kept_as_they_say(server, answer, stays):
    server.reply = answer
    assert read(server, 3) == {b"five!"}
    assert server.connections == (1 if stays else 3)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "closed the connection without a response"),
        (b"SSH-2.0-OpenSSH\r\n", "SSH-2.0"),
        (b"HTTP/2 200 OK\r\n" + BODY, "HTTP/2"),
        (OK + b"no colon\r\n" + BODY, "wrong field 'no colon"),
        (OK + b"Content-Length : 5\r\n\r\nfive!", "wrong field 'Content-Length '"),
        (OK + b'ETag: "a\rX-Y: b"\r\n' + BODY, "wrong field 'ETag'"),
        (OK + b"A: b\r\n" * 200 + BODY, "more than 100 fields"),
        (OK + b"A: " + b"b" * 70_000 + b"\r\n" + BODY, "got more than 65536 bytes"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 20 + OK + BODY, "10 heads before its response"),
        (OK + b"\r\nfive!", "does not say how much it sends"),
        (OK + b"Content-Length: -5\r\n\r\nfive!", "does not say how much it sends"),
        (OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\nfive!", "does not say how much it sends"),
        (OK + b"Transfer-Encoding: chunked\r\n" + BODY, "does not say how much it sends"),
        (OK + BODY[:-1], "the response ended early"),
    ],
)
def test_wrong_heads_are_errors_that_say_what_is_wrong(server, answer, message):
    server.reply, server.ends = answer, True
    with pytest.raises(StorageError, match=message):
        read(server)


def test_nothing_can_be_added_to_the_head_of_a_request(server):
    server.reply, server.ends = OK + BODY, True
    with pytest.raises(StorageError, match="a request cannot contain"):
        read(server, query="a b")
    client = WebClient(server.endpoint, RemoteOptions(patience_seconds=0.2))
    with pytest.raises(StorageError, match="a request cannot contain"):
        client.get_range("film", 0, 2, Version('"a"\r\nX-Y: b', None, 5))
    assert open_storage(server.endpoint).read("a\r\nX-Y: b") == b"five!"  # a name is escaped
    # A request for a range, and one for the whole file, since this server has no ranges.
    assert [head.splitlines()[0] for head in server.heads] == 2 * [b"GET /a%0D%0AX-Y:%20b HTTP/1.1"]
