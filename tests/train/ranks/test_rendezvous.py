"""Rendezvous of the ranks of one attempt, in a store with leftovers of dead attempts."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from fastvid.errors import WorkerError
from fastvid.runtime.processes import World
from fastvid.train.ranks import fresh_store


@pytest.fixture
def agent() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(agent: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", agent.port, is_master=False)


def attempt(
    agent: TCPStore,
    world: int,
    *,
    missing: tuple[int, ...] = (),
    patience: float = 30.0,
    delays: dict[int, float] | None = None,
) -> list[str]:
    """Run ranks in threads; each writes its name and reads the others'. Return what each of ranks 0..N-1 read."""

    def rank(number: int) -> str:
        threading.Event().wait((delays or {}).get(number, 0.0))
        store = fresh_store(client(agent), World(number, world), patience)
        store.set(f"name/{number}", f"{number}")
        return "".join(store.get(f"name/{other}").decode() for other in range(world))

    with ThreadPoolExecutor(world) as pool:
        futures: list[Future[str]] = [pool.submit(rank, number) for number in range(world) if number not in missing]
        return [future.result() for future in futures]


def test_all_ranks_share_an_unused_prefix(agent: TCPStore) -> None:
    for _ in range(3):
        assert attempt(agent, 3) == ["012"] * 3


def test_leftovers_of_failed_attempts_are_ignored(agent: TCPStore) -> None:
    assert attempt(agent, 3) == ["012"] * 3
    # Attempts in which one rank never arrives: the others time out.
    for missing in (0, 1, 2):
        with pytest.raises(WorkerError, match=r"of 3 waited 0\.3 s for the other ranks"):
            attempt(agent, 3, missing=(missing,), patience=0.3)
    # Late ranks: the first to arrive read the leftovers of dead ranks and must not accept them.
    for late in (0, 1, 2):
        assert attempt(agent, 3, delays={late: 0.5}) == ["012"] * 3
    # A smaller and a larger world afterwards.
    assert attempt(agent, 2) == ["01"] * 2
    assert attempt(agent, 4) == ["0123"] * 4


def test_without_the_rendezvous_a_new_attempt_reads_dead_predecessors(agent: TCPStore) -> None:
    # The failure that the rendezvous prevents: every attempt uses the same keys.
    client(agent).set("name/1", "dead")
    assert client(agent).get("name/1") == b"dead"
    store = fresh_store(client(agent), World(0, 1), 2.0)
    assert not store.check(["name/1"])
