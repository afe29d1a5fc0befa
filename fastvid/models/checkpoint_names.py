"""Translate checkpoint keys of other code bases to torchvision's; ours add the prefix ``backbone.``.

Sources of the rules: mit-han-lab/temporal-shift-module (``ops/temporal_shift.py`` at 4759ad8, ``ops/models.py`` at
51328c0, ``ops/non_local.py`` at 298cd1d, ``archs/mobilenet_v2.py`` at d6da93d), open-mmlab/mmaction2
(``mmaction/models/backbones/resnet_tsm.py`` at 03ff3fc, ``resnet3d.py`` at 01436f0, ``mobilenet_v2.py`` at 06c11e3) and
open-mmlab/mmcv (``mmcv/cnn/bricks/non_local.py`` at 0198abf).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from fastvid.models.mobilenet import STAGES

Origin = Literal["fastvid", "torchvision", "mit", "mmaction2"]

# Prefixes of DistributedDataParallel and DataParallel, and of torch.compile.
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")

_MIT_RULES = (
    (r"^base_model\.", ""),
    (r"^new_fc\.", "<head>."),
    (r"^classifier\.(?=weight$|bias$)", "<head>."),
    (r"\.net\.", "."),
    (r"\.block\.", "."),
    (r"\.nl\.(g|phi)\.(?:0\.)?", r".non_local.\1."),
    (r"\.nl\.theta\.", ".non_local.theta."),
    (r"\.nl\.W\.0\.", ".non_local.out."),
    (r"\.nl\.W\.1\.", ".non_local.out_bn."),
)

_MMACTION2_RULES = (
    (r"^backbone\.", ""),
    (r"^cls_head\.fc_cls\.", "<head>."),
    (r"\.net\.", "."),
    (r"\.block\.", "."),
    (r"\.non_local_block\.(g|phi)\.(?:0\.)?conv\.", r".non_local.\1."),
    (r"\.non_local_block\.theta\.conv\.", ".non_local.theta."),
    (r"\.non_local_block\.conv_out\.conv\.", ".non_local.out."),
    (r"\.non_local_block\.conv_out\.bn\.", ".non_local.out_bn."),
    (r"\bdownsample\.conv\.", "downsample.0."),
    (r"\bdownsample\.bn\.", "downsample.1."),
    (r"\bconv(\d)\.conv\.", r"conv\1."),
    (r"\bconv(\d)\.bn\.", r"bn\1."),
)

_MMACTION2_MOBILENET_BLOCK = re.compile(r"^layer(\d)\.(\d)\.conv\.(\d)\.(conv|bn)\.")

# Flat to nested: MIT's MobileNetV2 block is one flat sequence, torchvision's nests each (conv, norm, activation).
_FLAT_EXPANDING = {"0": "0.0", "1": "0.1", "3": "1.0", "4": "1.1", "6": "2", "7": "3"}
_FLAT_PLAIN = {"0": "0.0", "1": "0.1", "3": "1", "4": "2"}
_FLAT_KEY = re.compile(r"^features\.(\d+)\.conv\.(\d)\.(?!\d)")


def plain_names(keys: Iterable[str], head: str) -> tuple[Origin, dict[str, str]]:
    """Translate the keys of one checkpoint.

    Returns the checkpoint's code base, and the torchvision-style name of every key. A key that matches no rule
    keeps its name and is later reported as unexpected.
    """
    bare = {key: _WRAPPERS.sub("", key) for key in keys}
    origin = _origin(bare.values())
    if origin == "fastvid":
        plain = {key: name.removeprefix("backbone.") for key, name in bare.items()}
    elif origin == "mmaction2":
        is_mobilenet = "backbone.layer7.0.conv.0.conv.weight" in bare.values()
        plain = {key: _from_mmaction2(name, head, is_mobilenet) for key, name in bare.items()}
    else:
        rules = _MIT_RULES if origin == "mit" else ()
        plain = _nested({key: _apply(rules, name, head) for key, name in bare.items()})
    return origin, plain


def mit_name(name: str, *, head: str, shifted: bool, in_wrapped_block: bool, expands: bool) -> str:
    """Return the key under which mit-han-lab/temporal-shift-module saves a parameter."""
    if name.startswith(f"{head}."):
        return f"module.new_fc.{name.removeprefix(f'{head}.')}"
    layer, _, parameter = name.rpartition(".")
    if ".non_local." in name:
        layer = re.sub(r"\.non_local\.(g|phi)$", r".nl.\1.0", layer)
        layer = re.sub(r"\.non_local\.theta$", ".nl.theta", layer)
        layer = re.sub(r"\.non_local\.out$", ".nl.W.0", layer)
        layer = re.sub(r"\.non_local\.out_bn$", ".nl.W.1", layer)
    elif in_wrapped_block:
        layer = re.sub(r"^(layer\d+\.\d+)\.", r"\1.block.", layer)
    inside = re.match(r"^(features\.\d+\.conv)\.([\d.]+)$", layer)
    if inside:
        flat = {nested: index for index, nested in (_FLAT_EXPANDING if expands else _FLAT_PLAIN).items()}
        layer = f"{inside[1]}.{flat[inside[2]]}"
    return f"module.base_model.{layer}{'.net' if shifted else ''}.{parameter}"


def _origin(names: Iterable[str]) -> Origin:
    names = list(names)
    if any(name.startswith(("base_model.", "new_fc.")) for name in names):
        return "mit"
    if any(name.startswith(("cls_head.", "backbone.conv1.conv.")) for name in names):
        return "mmaction2"
    return "fastvid" if any(name.startswith("backbone.") for name in names) else "torchvision"


def _apply(rules: Iterable[tuple[str, str]], name: str, head: str) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name.replace("<head>", head)


def _from_mmaction2(name: str, head: str, is_mobilenet: bool) -> str:
    if not is_mobilenet:
        return _apply(_MMACTION2_RULES, name, head)
    name = _apply(_MMACTION2_RULES[:3], name, head)
    block = _MMACTION2_MOBILENET_BLOCK.match(name)
    if block:
        stage, number, part = int(block[1]) - 1, int(block[2]), int(block[3])
        feature = 1 + sum(blocks for _, _, blocks, _ in STAGES[:stage]) + number
        # Each convolution of a block but the last is nested with its norm and activation.
        last = 1 if STAGES[stage][0] == 1 else 2
        norm = 1 if block[4] == "bn" else 0
        place = f"{part}.{norm}" if part < last else f"{last + norm}"
        return f"features.{feature}.conv.{place}.{name[block.end() :]}"
    final = 1 + sum(blocks for _, _, blocks, _ in STAGES)
    for ours, theirs in ((0, "conv1"), (final, "conv2")):
        name = re.sub(rf"^{theirs}\.conv\.", f"features.{ours}.0.", name)
        name = re.sub(rf"^{theirs}\.bn\.", f"features.{ours}.1.", name)
    return name


def _nested(plain: dict[str, str]) -> dict[str, str]:
    present = set(plain.values())
    if not any(re.fullmatch(r"features\.\d+\.conv\.0\.weight", name) for name in present):
        return plain

    def nest(match: re.Match[str]) -> str:
        expands = f"features.{match[1]}.conv.6.weight" in present
        places = _FLAT_EXPANDING if expands else _FLAT_PLAIN
        return f"features.{match[1]}.conv.{places.get(match[2], match[2])}."

    return {key: _FLAT_KEY.sub(nest, name) for key, name in plain.items()}
