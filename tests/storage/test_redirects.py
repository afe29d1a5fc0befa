"""Where redirects of web servers may lead."""

import socket

import pytest

from fastvid.errors import StorageError, UsageError
from fastvid.storage import RemoteOptions, open_storage
from fastvid.storage.web import WebClient
from tests.storage.local_server import LocalHandler, LocalServer

DATA = bytes(range(100))
SECRET = b"of another host"


class Handler(LocalHandler):
    """Serves DATA at /film, and elsewhere what `MOVED` says."""

    def do_GET(self):  # noqa: N802
        self.server.seen.append(self.path)
        if place := self.server.moved.get(self.path):
            self.answer(302, headers={"Location": place})
        else:
            self.file(self.server.data)

    do_HEAD = do_GET  # noqa: N815 - the name that the library calls


@pytest.fixture
def servers():
    """A server, and one at another address of this machine."""
    with LocalServer(Handler) as one, LocalServer(Handler, "127.0.0.2") as other:
        for server, data in ((one, DATA), (other, SECRET)):
            server.data, server.moved, server.seen = data, {}, []
        yield one, other


def read(server, **options):
    storage = open_storage(server.endpoint, options=RemoteOptions(patience_seconds=2, cache="", **options))
    whole, part = storage.read("moved"), bytearray(5)
    storage.read_into("moved", [(3, memoryview(part))])
    assert bytes(part) == whole[3:8]
    storage.close()
    return whole


def test_connections_are_used_again_unless_the_server_closed_them(servers, caplog):
    client = WebClient(servers[0].endpoint, RemoteOptions(patience_seconds=2))
    for _ in range(3):
        assert client.get_range("film", 0, 100, None)[0] == DATA
        assert client.head("film").size == 100
    (idle,) = client._idle.values()
    assert len(idle) == 1
    for connection in idle:
        connection.sock.shutdown(socket.SHUT_RD)  # as if the server had ended it
    assert client.get_range("film", 0, 100, None)[0] == DATA
    assert "film" not in caplog.text


def test_redirects_to_the_same_host_are_followed(servers):
    servers[0].moved = {"/moved": "again?x=1", "/again?x=1": f"{servers[0].endpoint}/film"}
    assert read(servers[0]) == DATA


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("{other}/film", "the server redirects to another host, 127.0.0.2"),
        ("http://localhost.localdomain:1/film", "another host"),
        ("http://127.0.0.1:1/film", "another host"),
        ("file://films/a.mp4", "the server redirects to file://"),
        ("ftp://127.0.0.1/film", "the server redirects to ftp://"),
        ("/moved", "redirected 5 times in a row"),
    ],
)
def test_other_redirects_are_errors_at_once(place, message, servers):
    servers[0].moved = {"/moved": place.format(other=servers[1].endpoint)}
    with pytest.raises(StorageError, match=message):
        read(servers[0])
    assert (len(servers[0].seen) <= 5, servers[1].seen) == (True, [])


def test_any_redirect_is_followed_on_request(servers, monkeypatch):
    servers[0].moved = {"/moved": f"{servers[1].endpoint}/film"}
    assert read(servers[0], redirects="any") == SECRET
    monkeypatch.setenv("FASTVID_REDIRECTS", "any")
    assert read(servers[0]) == SECRET
    monkeypatch.setenv("FASTVID_REDIRECTS", "all")
    with pytest.raises(UsageError, match="redirects is 'all'"):
        RemoteOptions()


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "::1", "fe80::1%eth0", "::ffff:127.0.0.1"]
)
def test_no_redirect_leads_from_a_public_address_into_a_network(address):
    client = WebClient("https://example.com/set", RemoteOptions(redirects="any"))
    client._check_address(address, is_first=False)  # from one that is not public
    client._check_address("8.8.8.8", is_first=True)
    client._check_address("2001:4860:4860::8888", is_first=False)
    with pytest.raises(StorageError, match="is not a public address"):
        client._check_address(address, is_first=False)
