"""Choose the mutants of a module: one change at each of a number of places, always the same ones."""

import ast
import hashlib
import random
import tempfile
from collections import defaultdict
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, WorkItem

Position = tuple[int, int]

SEED = 0


def all_mutants(root: Path, module: str) -> list[WorkItem]:
    """Return the mutants of a module, in the order of its text, without those that cannot change anything."""
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/all.sqlite") as database:
        init([root / module], database, {})
        mutations = [item.mutations[0] for item in database.work_items]
    idle = idle_ranges((root / module).read_text())
    mutations = [m for m in mutations if not any(a <= m.start_pos and m.end_pos <= b for a, b in idle)]
    mutations.sort(key=lambda mutation: (mutation.start_pos, mutation.operator_name, mutation.occurrence))
    return [_item(module, mutation) for mutation in mutations]


def sample(module: str, mutants: list[WorkItem], count: int) -> list[WorkItem]:
    """Return `count` mutants: one at each of as many places, and further ones only when every place has one."""
    places: dict[tuple[Position, Position], list[WorkItem]] = defaultdict(list)
    for item in mutants:
        places[item.mutations[0].start_pos, item.mutations[0].end_pos].append(item)
    dice = random.Random(f"{SEED}:{module}")
    piles = [dice.sample(items, len(items)) for items in places.values()]
    chosen: list[WorkItem] = []
    while len(chosen) < count and any(piles):
        layer = [pile.pop() for pile in piles if pile]
        chosen += dice.sample(layer, len(layer))
    return chosen[:count]  # a larger sample contains a smaller one


def idle_ranges(source: str) -> list[tuple[Position, Position]]:
    """Return the annotations, which are never evaluated, and the `slots=` of dataclasses, which no result shows."""
    ranges = []
    for node in ast.walk(ast.parse(source)):
        idle = getattr(node, "annotation", None) or getattr(node, "returns", None)
        if isinstance(node, ast.keyword) and node.arg == "slots":
            idle = node
        if idle is not None:
            ranges.append(((idle.lineno, idle.col_offset), (idle.end_lineno, idle.end_col_offset)))
    return ranges


def _item(module: str, mutation: MutationSpec) -> WorkItem:
    """Return a work item whose id is the same in every run."""
    name = f"{mutation.operator_name} {mutation.operator_args} {mutation.occurrence}"
    spec = MutationSpec(
        module_path=Path(module),
        operator_name=mutation.operator_name,
        operator_args=mutation.operator_args,
        occurrence=mutation.occurrence,
        start_pos=mutation.start_pos,
        end_pos=mutation.end_pos,
        definition_name=mutation.definition_name,
    )
    return WorkItem.single(job_id=hashlib.sha256(name.encode()).hexdigest(), mutation=spec)
