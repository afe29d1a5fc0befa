"""Checks parts of shards in parallel processes.

The processes decode untrusted files, so they return their findings as plain data. If a process dies, only its task is
affected: it is retried alone, and if its process dies again, that is reported as a problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

import msgspec

from fastvid.errors import FormatError, error_from_json, error_to_json
from fastvid.runtime import faults
from fastvid.runtime.processes import pack
from fastvid.sharding.engines.local import Child, Parent
from fastvid.sharding.verify.checks import Findings, Problem, ShardTask, check

_MODULE: Final = "fastvid.sharding.verify.check_processes"


def check_all(tasks: Iterable[ShardTask], workers: int, known: Container[str]) -> Iterator[tuple[ShardTask, Findings]]:
    """Run tasks in processes; yield each with its findings, in any order."""
    idle, busy, lost = set[Child](), set[Child](), list[ShardTask]()

    def answer(task: ShardTask) -> Findings | None:
        """Return the findings of a task; None if its process died."""
        try:
            child = idle.pop()
        except KeyError:
            child = Child(_MODULE)
        busy.add(child)
        try:
            child.send(asdict(task))
            while not (found := [header for header, _ in child.receive()]):
                pass
            if len(found) > 1:
                raise FormatError("the process replied to a task it was not given")
            findings = _findings(found[0], known)
            busy.remove(child)
        except (EOFError, FormatError, KeyError):
            with suppress(KeyError):  # unless the others were stopped, and this one with them
                busy.remove(child)
                child.kill()
            return None
        idle.add(child)
        if isinstance(findings, Exception):
            raise findings
        return findings

    try:
        with ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
            try:
                futures = {pool.submit(answer, task): task for task in tasks}
                for future in as_completed(futures):
                    if (findings := future.result()) is None:
                        lost.append(futures[future])
                    else:
                        yield futures[future], findings
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                _kill(busy)
        for task in lost:
            where = f"rows {task.rows[0]} to {task.rows[-1]}" if task.rows else "files"
            died = Problem("process", f"the process that checked {where} died", task.record.name)
            yield task, answer(task) or Findings([died])
    finally:
        _kill(busy)
        _kill(idle)


def _kill(children: set[Child]) -> None:
    """Kill children; each is killed by who takes it out of its set."""
    with suppress(KeyError):
        while True:
            children.pop().kill()


def main() -> None:
    """Run the parent's tasks until it closes the connection."""
    parent = Parent()
    while True:
        task = msgspec.convert(parent.messages.get(), ShardTask)
        faults.reach(f"check {task.record.name}")
        try:
            answer = msgspec.to_builtins(check(task), str_keys=True)
        except Exception as error:  # noqa: BLE001 - the parent handles it
            answer = {"error": error_to_json(error)}
        parent.send(pack(answer))


def _findings(header: Mapping[str, Any], known: Container[str]) -> Findings | Exception:
    """Return the findings of a message after checking them, or the exception that the check raised."""
    try:
        if "error" in header:
            return error_from_json(header["error"])
        found = msgspec.convert(header, Findings, strict=False, dec_hook=_counter)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"cannot parse findings: {error!r}") from error
    if any(problem.check not in known for problem in found.problems):
        raise FormatError(f"findings name an unknown check: {found.problems}")
    return found


def _counter(_: type, value: Any) -> Counter[str]:
    return Counter(msgspec.convert(value, dict[str, int]))


if __name__ == "__main__":
    main()
