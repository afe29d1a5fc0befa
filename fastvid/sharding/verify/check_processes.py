"""Runs the checks of `fastvid.sharding.verify.checks` in parallel processes, each on a part of a shard.
The processes decode untrusted files, so they return their findings as plain data. If a process dies, only its task is
affected: it is retried alone, and if its process dies again, that is reported as a problem.
"""

from __future__ import annotations

import selectors
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

import msgspec

from fastvid.errors import FormatError, error_from_json, error_to_json
from fastvid.runtime import faults
from fastvid.runtime.processes import pack
from fastvid.runtime.values import as_type
from fastvid.sharding.engines.local import Child, Parent
from fastvid.sharding.verify.checks import Findings, Problem, ShardTask, check

_MODULE: Final = "fastvid.sharding.verify.check_processes"


def check_all(tasks: Iterable[ShardTask], workers: int, known: Container[str]) -> Iterator[tuple[ShardTask, Findings]]:
    """Run tasks in processes; yield each task with its findings, in any order. `known`: the names of checks."""
    lost: list[ShardTask] = []
    yield from _run(tasks, workers, known, lost)
    for task in lost:
        again: list[ShardTask] = []
        yield from _run([task], 1, known, again)
        if again:
            where = f"rows {task.rows[0]} to {task.rows[-1]}" if task.rows else "files"
            message = f"the process that checked {where} died"
            yield task, Findings([Problem("process", message, task.record.name)])


def main() -> None:
    """Run the parent's tasks until it closes the connection."""
    parent = Parent()
    while True:
        task = as_type(parent.messages.get(), ShardTask)
        faults.reach(f"check {task.record.name}")
        try:
            answer = msgspec.to_builtins(check(task), str_keys=True)
        except Exception as error:  # noqa: BLE001 - the parent handles it
            answer = {"error": error_to_json(error)}
        parent.send(pack(answer))


def _run(
    tasks: Iterable[ShardTask], workers: int, known: Container[str], lost: list[ShardTask]
) -> Iterator[tuple[ShardTask, Findings]]:
    """Run tasks in processes, as `check_all`, but without retries: append tasks whose process dies to `lost`."""
    waiting, idle, busy = iter(tasks), list[Child](), dict[Child, ShardTask]()
    with selectors.DefaultSelector() as selector:
        try:
            while True:
                while len(busy) < workers and (task := next(waiting, None)) is not None:
                    if not idle:
                        idle.append(Child(_MODULE))
                        selector.register(idle[-1].output, selectors.EVENT_READ, idle[-1])
                    busy[idle[-1]] = task
                    idle.pop().send(asdict(task))
                if not busy:
                    return
                for key, _ in selector.select():
                    child: Child = key.data
                    try:
                        found = [_findings(header, known) for header, _ in child.receive()]
                        if len(found) > (child in busy):
                            raise FormatError("the process replied to a task it was not given")
                    except (EOFError, FormatError):
                        selector.unregister(child.output)
                        child.kill()
                        if child in busy:
                            lost.append(busy.pop(child))
                        else:
                            idle.remove(child)
                        continue
                    for findings in found:
                        if isinstance(findings, Exception):
                            raise findings
                        idle.append(child)
                        yield busy.pop(child), findings
        finally:
            for child in (*busy, *idle):
                child.kill()


def _findings(header: Mapping[str, Any], known: Container[str]) -> Findings | Exception:
    """Return the findings of a message after checking them, or the exception that the check raised."""
    try:
        if "error" in header:
            return error_from_json(header["error"])
        found = as_type(header, Findings, strict=False, dec_hook=_counter)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"cannot parse findings: {error!r}") from error
    if any(problem.check not in known for problem in found.problems):
        raise FormatError(f"findings name an unknown check: {found.problems}")
    return found


def _counter(_: type, value: Any) -> Counter[str]:
    return Counter(as_type(value, dict[str, int]))


if __name__ == "__main__":
    main()
