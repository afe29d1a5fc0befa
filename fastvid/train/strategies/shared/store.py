"""A store of numbers and bytes by name that all ranks of a job share."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from fastvid.train.ranks.elastic import Member, broadcast_bytes
from fastvid.train.strategies.shared.link import as_worker_error
from fastvid.train.strategies.shared.listener import host_of_job, listening_socket


def shared_store(member: Member, timeout_s: float = 60.0) -> TCPStore:
    """Open a store that rank 0 serves to all ranks of a job; call it on every rank at the same point.

    It listens on the address of rank 0's machine alone, but asks for no secret: anyone who reaches that address can
    read and write it. Rank 0 must keep a reference until the other ranks no longer use the store.

    Raises:
        WorkerError: If rank 0 cannot be reached.
    """
    host, limit = host_of_job(), timedelta(seconds=timeout_s)
    own = None
    if member.leads:
        listening = listening_socket(host, 0)
        port = int(listening.getsockname()[1])
        with as_worker_error("cannot serve a store", address=f"{host}:{port}"):
            # Without a socket of ours, TCPStore would listen on all addresses, whatever host it is given (torch 2.13).
            own = TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listening.detach()
            )
    number = broadcast_bytes(None if own is None else str(own.port).encode(), member)
    assert number is not None
    if own is not None:
        return own
    with as_worker_error("no process answers", address=f"{host}:{int(number)}"):
        return TCPStore(host, int(number), is_master=False, timeout=limit)
