"""Mutation testing of what must never be wrong: `make mutants`, or `make mutants MUTANTS="--count 100 MODULE"`.

cosmic-ray changes one expression at a time in a copy of the checkout, and runs the tests of `tests.mutants.subjects`. A
mutant that no test notices survives: a mistake of that kind could be made and nothing would say so. A run that was
stopped resumes, because results stay in build/mutants until the module changes. Results of a module are recorded in
bench/results/mutants.json as soon as it is done.

mutmut 3.8 was not chosen because it runs all mutants in forks of one process, through functions that choose between
original and mutant, which worker processes of tests do not inherit; poodle 1.3 because it does not resume.
"""

import argparse
import hashlib
import importlib.metadata
import json
import platform
import shlex
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkItem

from tests.mutants import places
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.subjects import SUBJECTS

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "mutants"
RESULTS = ROOT / "bench" / "results" / "mutants.json"
PYTEST = "-m pytest -x -q -p tests.mutants.no_shrinking -p no:cacheprovider --hypothesis-seed=0"
PROCESSES = 2

_recording = threading.Lock()


def main() -> None:
    """Run the mutants and record the results."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "modules", nargs="*", help="modules to test, as paths; by default all of tests.mutants.subjects"
    )
    parser.add_argument("--count", type=int, default=30, help="places to change in each module (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="make every change at every place; takes hours")
    parser.add_argument("--retry-survivors", action="store_true", help="test survivors again, after writing tests")
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs the tests")
    options = parser.parse_args()
    if unknown := set(options.modules) - set(SUBJECTS):
        parser.error(f"no tests are listed for {', '.join(sorted(unknown))}; add them to tests/mutants/subjects.py")
    copies: Queue[Path] = Queue()
    for number in range(PROCESSES):
        copies.put(WORK / f"copy-{number}")

    def run(module: str) -> None:
        copy = copies.get()
        try:
            run_mutants(module, copy, options)
        finally:
            copies.put(copy)
        record(module)

    with ThreadPoolExecutor(PROCESSES) as pool:
        for finished in [pool.submit(run, module) for module in options.modules or SUBJECTS]:
            finished.result()


def run_mutants(module: str, copy: Path, options: argparse.Namespace) -> None:
    """Run the chosen mutants of a module that have no result yet."""
    mutants = places.all_mutants(ROOT, module)
    chosen = mutants if options.all else places.sample(module, mutants, options.count)
    with use_db(_database(module)) as database:
        _choose(database, chosen, options.retry_survivors)
        pending = len(database.pending_work_items)
    if not pending:
        return
    _copy_checkout(copy)
    # First on the path, so that child processes of tests import the copy too.
    command = ["env", f"PYTHONPATH={copy}", options.python, *PYTEST.split(), *SUBJECTS[module]]
    began = time.monotonic()
    tests = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    if tests.returncode:
        raise RuntimeError(
            f"the tests of {module} fail without a mutant:\n{tests.stdout[-3000:]}{tests.stderr[-3000:]}"
        )
    print(f"{module}: {pending} mutants, at most {seconds:.0f} s of tests each", flush=True)
    # Python might take the module's byte code for that of a mutant with the same size and second.
    for compiled in (copy / module).parent.glob(f"__pycache__/{Path(module).stem}.*.pyc"):
        compiled.unlink()
    settings = copy / "cosmic-ray.toml"
    settings.write_text(
        f'[cosmic-ray]\nmodule-path = "{module}"\nexcluded-modules = []\ntimeout = {30 + 3 * seconds:.0f}\n'
        f"test-command = {json.dumps(shlex.join(command))}\n"
        '[cosmic-ray.distributor]\nname = "local"\n'
    )
    execute = [sys.executable, "-m", "cosmic_ray.cli", "exec", str(settings), str(_database(module))]
    subprocess.run(execute, cwd=copy, check=True)


def record(module: str) -> None:
    """Write what is known of a module's mutants to the file of results."""
    mutants = places.all_mutants(ROOT, module)
    with use_db(_database(module)) as database:
        done = sorted(database.completed_work_items, key=lambda pair: pair[0].mutations[0].start_pos)
    reasons = {(before, after): reason for before, after, reason in EQUIVALENT.get(module, ())}
    equivalent, survivors = [], []
    for item, result in done:
        if result.test_outcome == TestOutcome.SURVIVED:
            before, after = change_of(result.diff)
            row = {"line": item.mutations[0].start_pos[0], "before": before, "after": after}
            if (before, after) in reasons:
                equivalent.append({**row, "reason": reasons[before, after]})
            else:
                survivors.append(row)
    noticed = [result for _, result in done if result.test_outcome == TestOutcome.KILLED]
    with _recording:
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"modules": {}}
        modules: dict[str, dict[str, Any]] = results["modules"]
        modules[module] = {
            "tests": list(SUBJECTS[module]),
            "possible": len(mutants),
            "run": len(done),
            "killed": len(noticed),
            "killed_by_time_limit": sum(result.output == "timeout" for result in noticed),
            "noticed_percent": _percent(len(noticed), len(survivors)),
            "survivors": survivors,
            "equivalent": equivalent,
        }
        killed = sum(entry["killed"] for entry in modules.values())
        survived = sum(len(entry["survivors"]) for entry in modules.values())
        content = {
            "command": "make mutants",
            "tool": f"cosmic-ray {importlib.metadata.version('cosmic-ray')}",
            "python": platform.python_version(),
            "sample": f"one change at each of the chosen places, seed {places.SEED}; --all makes every change",
            "run": sum(entry["run"] for entry in modules.values()),
            "killed": killed,
            "survivors": survived,
            "equivalent": sum(len(entry["equivalent"]) for entry in modules.values()),
            "noticed_percent": _percent(killed, survived),
            "modules": {name: modules[name] for name in SUBJECTS if name in modules},
        }
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{module}: {len(noticed)} of {len(done)} noticed, {len(equivalent)} equivalent", flush=True)
    for row in survivors:
        print(f"  survivor, line {row['line']}:\n    - {row['before']}\n    + {row['after']}", flush=True)


def change_of(diff: str) -> tuple[str, str]:
    """Return the lines that a mutant removes and adds, without indentation."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    parts = ([line[1:].strip() for line in lines if line.startswith(sign)] for sign in "-+")
    removed, added = (" ".join(part).strip() for part in parts)
    return removed, added


def _percent(killed: int, survived: int) -> float:
    return round(100 * killed / max(1, killed + survived), 1)


def _copy_checkout(copy: Path) -> None:
    """Make a copy of the checkout, with changes that are not committed."""
    shutil.rmtree(copy, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def _database(module: str) -> Path:
    """Return the file with a module's mutants and their results; a changed module has another one."""
    WORK.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256((ROOT / module).read_bytes()).hexdigest()
    return WORK / f"{module.replace('/', '.')}-{digest[:12]}.sqlite"


def _choose(database: WorkDB, chosen: list[WorkItem], retry_survivors: bool) -> None:
    """Leave the mutants that have a result in the database, and the chosen ones."""
    done = dict(database.results)
    items = {item.job_id: item for item in database.work_items if item.job_id in done}
    items |= {item.job_id: item for item in chosen}
    database.clear()
    database.add_work_items(items.values())
    for job, result in done.items():
        if not retry_survivors or result.test_outcome != TestOutcome.SURVIVED:
            database.set_result(job, result)


if __name__ == "__main__":
    main()
