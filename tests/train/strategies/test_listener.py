"""Servers of strategies: where they listen, and what a stranger, a wrong token and a NaN achieve."""

import contextlib
import json
import os
import signal
import socket
import threading

import psutil
import pytest
import torch

from fastvid.errors import ChecksumError, FastvidError, WorkerError
from fastvid.train.ranks import StopSignal
from fastvid.train.strategies import link as listener
from fastvid.train.strategies.asgd.strategy import Asgd
from fastvid.train.strategies.link import TOKEN_VARIABLE, Address, Link, Listener, open_link, shared_store
from tests.load.tools import until
from tests.train import toy
from tests.train.strategies import lab
from tests.train.strategies.asgd.kit import TOKEN, client_of, serving, together, weights_of

SIZE = 6
STRANGERS = 200


def ones():
    return torch.ones(SIZE, dtype=torch.float64)


def listening_at(port):
    """Return the addresses on which this machine listens at a port."""
    found = psutil.net_connections("tcp")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


@contextlib.contextmanager
def echoing(host="127.0.0.1"):
    def session(link):
        with contextlib.suppress(WorkerError):
            asked = link.receive()
            link.send(asked.kind, asked.values, b"" if asked.payload is None else asked.payload)

    made = Listener(session, 20.0, token=TOKEN, host=host)
    made.start()
    yield made
    made.close()


def test_a_message_arrives_unchanged_and_damage_is_detected():
    """Sent as float32, like weights, large integers would lose their last digits."""
    values = {"rate": 0.1, "version": 2**53 + 1, "digest": -(2**63), "nan": float("inf"), "name": "é"}
    with echoing() as made:
        for payload in (torch.arange(5.0), torch.zeros(0), torch.tensor(3, dtype=torch.int64)):
            link = open_link(made.address, 20.0)
            link.beat()
            link.send("what", values, payload)
            got = link.receive(torch.empty_like(payload))
            assert (got.kind, got.values) == ("what", values)
            assert got.payload is None if not payload.numel() else torch.equal(got.payload, payload)
            link.close()
        link = open_link(made.address, 20.0)
        link.send("what", values, b"bytes")
        with pytest.raises(WorkerError, match="a message has 5 bytes, expected 8"):
            link.receive(torch.empty(1, dtype=torch.float64))
        link.close()


@pytest.mark.parametrize("where", range(0, 60, 3))
def test_a_damaged_message_is_refused(where):
    data = bytearray(listener.encode(json.dumps(["what", {"version": 1, "to": "be damaged"}]).encode()))
    data[where] ^= 1
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as mine,
        server.accept()[0] as theirs,
    ):
        mine.sendall(data)
        with pytest.raises(ChecksumError):
            Link(theirs, 0, 20.0).receive()


@contextlib.contextmanager
def knocking(address):
    with socket.create_connection((address.host, address.port), 20) as stranger:
        stranger.settimeout(20)
        yield stranger


def test_servers_listen_on_the_given_address_alone():
    with echoing("127.0.0.2") as made:
        assert listening_at(made.address.port) == {"127.0.0.2"}
    with serving(SIZE) as server:
        assert listening_at(server.address.port) == {"127.0.0.1"}
    store = shared_store(toy.ALONE)
    assert listening_at(store.port) == {"127.0.0.1"}
    for host in ("192.0.2.1", "../x"):  # of RFC 5737, which no machine has, and no name
        with pytest.raises(WorkerError, match="cannot listen"):
            Listener(lambda _: None, 20.0, token=TOKEN, host=host)
    # The control: a socket for all addresses is seen as such.
    with socket.create_server(("", 0)) as everywhere:
        assert listening_at(everywhere.getsockname()[1]) == {"0.0.0.0"}


def test_a_client_with_another_token_is_refused():
    with serving(SIZE) as server, client_of(server) as client:
        client.join(ones())
        address = server.address
        for token in ("fedcba9876543210", "", TOKEN + " "):
            with pytest.raises(WorkerError, match="refused this client") as failed:
                open_link(Address(address.host, address.port, token), 20.0)
            assert TOKEN_VARIABLE in str(failed.value)
            assert TOKEN not in str(failed.value)
        assert server.clients == {client.number}


def test_a_client_detects_a_server_that_does_not_know_the_token():
    """Weights of a stranger must not be trained on."""
    with socket.create_server(("127.0.0.1", 0)) as trap:

        def answer():
            with trap.accept()[0] as connection:
                connection.sendall(listener.MAGIC + bytes(32))
                connection.recv(64)
                connection.sendall(bytes(40))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WorkerError, match="does not know the token"):
            open_link(Address("127.0.0.1", trap.getsockname()[1], TOKEN), 20.0)
        thread.join()


def test_a_stranger_can_neither_read_nor_push_nor_close_admission():
    """It sends messages without a proof, an old proof, garbage, or nothing at all, and holds its connections open."""
    with serving(SIZE) as server, client_of(server) as client, contextlib.ExitStack() as held:
        client.join(ones())
        before, address = threading.active_count(), server.address
        for number in range(STRANGERS):
            stranger = held.enter_context(knocking(address))
            with contextlib.suppress(OSError):
                stranger.sendall((b"", bytes(64), b"\xff" * 64, b"\x02" * 144)[number % 4])
        # The number of threads that strangers can hold is bounded, although all of them stay connected.
        most = before + listener._MOST_UNPROVEN + 1
        until(lambda: threading.active_count() <= most)
        # A greeting and a random number are all that a stranger receives.
        with knocking(address) as stranger:
            stranger.sendall(bytes(64))
            data = b""
            with contextlib.suppress(ConnectionError):
                while piece := stranger.recv(4096):
                    data += piece
            assert len(data) <= 40
        assert client.push(ones(), 1.0) == 0
        with client_of(server) as newcomer:
            newcomer.join(torch.empty(SIZE, dtype=torch.float64))
            assert newcomer.version == 1
            assert torch.equal(newcomer.weights, torch.zeros(SIZE, dtype=torch.float64))
            assert server.clients == {client.number, newcomer.number}


def test_a_recorded_proof_does_not_open_a_second_connection():
    """Everything that an honest client sent is sent again."""
    sent = b""
    with echoing() as made, socket.create_server(("127.0.0.1", 0)) as relay:

        def forward():
            nonlocal sent
            with relay.accept()[0] as client, knocking(made.address) as server:
                client.sendall(server.recv(40, socket.MSG_WAITALL))
                sent = client.recv(64, socket.MSG_WAITALL)
                server.sendall(sent)
                client.sendall(server.recv(40, socket.MSG_WAITALL))

        thread = threading.Thread(target=forward)
        thread.start()
        open_link(Address("127.0.0.1", relay.getsockname()[1], TOKEN), 20.0).close()
        thread.join()
        assert made.refused == 0
        with knocking(made.address) as stranger:
            stranger.sendall(sent)
            until(lambda: made.refused == 1)


def test_many_clients_with_the_token_are_all_served():
    """Positive control: more clients than the number of strangers that are tolerated at a time."""
    count = listener._MOST_UNPROVEN + 8
    with echoing() as made:
        links = [open_link(made.address, 20.0) for _ in range(count)]
        assert sorted(link.number for link in links) == list(range(count))
        for number, link in enumerate(links):
            link.send("number", {"is": number})
            assert link.receive()["is"] == number
            link.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(value, caplog):
    """An honest client that diverges must not poison the others."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(SIZE))
        honest, other = (stack.enter_context(client_of(server)) for _ in range(2))
        wrong = ones()
        wrong[2] = value
        with client_of(server) as first, pytest.raises(FastvidError, match="not finite"):
            first.join(wrong)
        assert not server.weights.initialized
        honest.join(ones())
        other.join(ones())
        with pytest.raises(FastvidError, match="values are not finite"):
            honest.push(wrong, 1.0)
        assert f"client {honest.number}: 1 of {SIZE} values are not finite" in caplog.text
        assert server.weights.version == 0
        assert torch.equal(weights_of(server), ones())
        # The link is still usable, and the others go on.
        honest.fetch()
        assert torch.equal(honest.weights, ones())
        assert other.push(ones(), 1.0) == 0


def test_the_token_of_the_environment_is_not_sent_to_other_ranks(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    made = Address("127.0.0.1", 7, listener.token_of_job())
    assert Address.decode(made.encode()) == made
    assert made.token not in f"{made} {made!r}"
    for option, value in (("port", 29600), ("server", "127.0.0.1:29600")):
        with toy.refused(f"sync option {option} needs a token, but {TOKEN_VARIABLE} is not set"):
            Asgd(toy.ALONE, **{option: value})
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    own = Address("127.0.0.1", 7, listener.token_of_job())
    assert own.token == TOKEN
    assert TOKEN.encode() not in own.encode()
    assert Address.decode(own.encode()) == own
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with toy.refused("has 5 characters, expected at least 16"):
        listener.token_of_job()


def test_a_client_waits_for_a_server_that_starts_later():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def work(index):
        if index:
            open_link(Address("127.0.0.1", port, TOKEN), 20.0).close()
            return True
        made = Listener(lambda _: None, 20.0, token=TOKEN, port=port)
        made.start()
        until(lambda: made._next == 1)
        made.close()
        return True

    assert together(2, work) == [True, True]


def test_a_client_without_a_server_gives_up_and_obeys_a_signal(tmp_path, monkeypatch):
    """It waits a minute at most, however long a running server may be silent."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = Address("127.0.0.1", free.getsockname()[1], TOKEN)
    with monkeypatch.context() as shorter:
        shorter.setattr(listener, "_LONGEST_START_S", 0.1)
        with pytest.raises(WorkerError, match="no process answers"):
            open_link(place, 300.0)
    case = lab.Case({"server": str(place), "timeout_s": 300.0}, sync="asgd")
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        result = lab.run(case, tmp_path, toy.ALONE, stop)
    assert (result["over"], result["samples"]) == (False, 0)
