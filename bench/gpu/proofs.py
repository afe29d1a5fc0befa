"""What the GPU benchmark proves: one table of expectations with bounds, judged over the sections' numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

_SIGNS: Final = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt}


@dataclass(frozen=True)
class Proof:
    """An expectation about one number."""

    section: str
    value: str
    sign: str
    bound: float
    says: str
    goal: bool = False
    card: bool = False


PROOFS: Final = (
    Proof("facts", "engines", ">=", 1, "the driver reports NVDEC engines", card=True),
    Proof("facts", "decoders", ">=", 1, "a GPU decoder runs here"),
    Proof("conformance", "reference_wrong", "==", 0, "PyAV's frames have the packed digests"),
    Proof("conformance", "errors", "==", 0, "GPU decoders decode every clip"),
    Proof("conformance", "wrong_frames", "==", 0, "every frame is the requested one, among all frames of its clip"),
    Proof("conformance", "spoiled_accepted", "==", 0, "black, stale, swapped, flipped and late frames are refused"),
    Proof("conformance", "planes_unequal", "==", 0, "planes are bit-exact to libavcodec", goal=True),
    Proof("conformance", "rgb_mean_levels", "<=", 3, "RGB of GPU decoders is near the reference, in mean levels"),
    Proof("conformance", "rgb_of_planes_levels", "<=", 1, "RGB is within one level of our reference", goal=True),
    Proof("pixels", "most_levels", "<=", 1, "the kernel is within one level of our reference"),
    Proof(
        "pixels", "share_of_copy", ">", 0.5, "the fused kernel reaches half the speed of a copy", goal=True, card=True
    ),
    Proof("pixels", "kernels", "<=", 16, "200 random crops compile few kernels", card=True),
    Proof("lanes", "failed", "==", 0, "every setting of the sweep decodes"),
    Proof("lanes", "nvdec_percent", ">=", 95, "all NVDEC engines are busy at the best setting", goal=True, card=True),
    Proof("lanes", "frames_per_s", ">=", 20_000, "delivered frames/s, 256 lines, compact, TSN-8", goal=True, card=True),
    Proof("lanes", "host_cores", "<=", 4, "host cores at that setting", goal=True, card=True),
    Proof("loader", "wrong_batches", "==", 0, "batches have the CPU's frames"),
    Proof("loader", "raced_batches", "==", 0, "batches are the same beside a busy stream, with batches dropped"),
    Proof("loader", "gpu_memory_growth_mb", "<=", 0, "GPU memory does not grow", goal=True, card=True),
    Proof("step", "finite", "==", 1, "the loss is finite in every variant"),
    Proof("step", "channels_last_speedup", ">=", 1.3, "channels_last speeds up the step", card=True),
    Proof(
        "step", "loader_of_cached", ">=", 0.98, "loader batches / cached batches, TSM-R50, bf16", goal=True, card=True
    ),
    Proof("step", "host_syncs", "==", 0, "host synchronisations per step", goal=True, card=True),
    Proof("ranks", "finished", "==", 1, "one rank trains over the device's own collectives"),
    Proof("ranks", "resumed", "==", 1, "two ranks on one device resume after a rank is killed"),
    Proof("ranks", "same_lineage", "==", 1, "the resumed run has seen the same samples"),
    Proof("scaler", "finite_steps", "==", 50, "50 steps with a loss scale have finite weights"),
)
"""Every expectation, in the order of the sections."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one expectation."""

    proof: Proof
    found: float | None
    met: bool | None

    def line(self) -> str:
        """Return one line for people."""
        proof = self.proof
        word = {True: "met", False: "MISSED", None: "not judged"}[self.met]
        kind = "goal " if proof.goal else "proof"
        found = "not measured" if self.found is None else f"{self.found:.6g}"
        return f"{word:10} {kind} {proof.section}: {proof.says}: {found} (expected {proof.sign} {proof.bound:g})"

    def as_row(self) -> dict[str, Any]:
        """Return the verdict as a row of JSON."""
        proof = self.proof
        row = {"section": proof.section, "value": proof.value, "says": proof.says, "goal": proof.goal}
        return row | {"expected": f"{proof.sign} {proof.bound:g}", "found": self.found, "met": self.met}


def judge(sections: Iterable[str], found: Mapping[str, Mapping[str, Any]], *, fake: bool) -> list[Verdict]:
    """Judge the expectations of some sections; a number that is missing misses its bound."""
    chosen = set(sections)
    return [_verdict(proof, found.get(proof.section, {}), fake) for proof in PROOFS if proof.section in chosen]


def _verdict(proof: Proof, numbers: Mapping[str, Any], fake: bool) -> Verdict:
    value = numbers.get(proof.value)
    number = float(value) if isinstance(value, int | float) else None
    if proof.card and fake:
        return Verdict(proof, number, None)
    return Verdict(proof, number, number is not None and bool(_SIGNS[proof.sign](number, proof.bound)))
