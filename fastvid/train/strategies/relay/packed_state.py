"""State trees as bytes and back: JSON for the structure, raw bytes for the tensors, a checksum for both.

    magic 8 | length of the structure, 8 bytes little-endian | structure, UTF-8 JSON | tensors | blake2b, 16 bytes

Nothing is unpickled. Sizes differ from model to model, so the structure comes first and says where each tensor lies.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

import torch
from torch import Tensor

from fastvid.errors import ChecksumError, FormatError

MAGIC: Final = b"fvtoken1"

_DIGEST: Final = 16  # bytes; 128 bits, as chance alone decides
_HEAD: Final = len(MAGIC) + 8
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


def pack(tree: Any) -> bytes:
    """A tree as bytes. The same tree always gives the same bytes.

    Args:
        tree: Dicts with str or int keys, lists, tuples, None, bool, int, float, str and dense tensors. Strides and
            devices are not kept.

    Raises:
        FormatError: It holds anything else.
    """
    tensors: list[bytes] = []
    structure = json.dumps(_encode(tree, tensors, [0])).encode()
    parts = [MAGIC, len(structure).to_bytes(8, "little"), structure, *tensors]
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
    return b"".join([*parts, digest.digest()])


def check(data: bytes) -> None:
    """Passes when the bytes are a token as `pack` made it.

    Raises:
        FormatError: They are no token.
        ChecksumError: They were changed or cut.
    """
    if data[: len(MAGIC)] != MAGIC or len(data) < _HEAD + _DIGEST:
        raise FormatError("these bytes are no token")
    body = memoryview(data)[:-_DIGEST]
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != data[-_DIGEST:]:
        raise ChecksumError("token differs from what was packed")


def unpack(data: bytes) -> Any:
    """The tree of a token, its tensors on the CPU and owning their memory.

    Raises:
        FormatError: The bytes are no token.
        ChecksumError: They were changed or cut.
    """
    check(data)
    length = int.from_bytes(data[len(MAGIC) : _HEAD], "little")
    tensors = memoryview(data)[_HEAD + length : -_DIGEST]
    return _decode(json.loads(data[_HEAD : _HEAD + length]), tensors)


def _encode(value: Any, tensors: list[bytes], offset: list[int]) -> Any:
    """Plain values stand for themselves; whatever JSON has no word for is a list that begins with its kind."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        if name not in _DTYPES or value.layout is not torch.strided:
            raise FormatError(f"a token cannot hold a tensor of {value.dtype}, {value.layout}")
        # reshape: a tensor without dimensions cannot be viewed as bytes.
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        tensors.append(data)
        offset[0] += len(data)
        return ["tensor", name, list(value.shape), offset[0] - len(data)]
    if isinstance(value, dict):
        if not all(isinstance(key, (str, int)) and not isinstance(key, bool) for key in value):
            raise FormatError("a token's dicts have str or int keys")
        return ["dict", [[key, _encode(item, tensors, offset)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        return [
            "list" if isinstance(value, list) else "tuple", [_encode(item, tensors, offset) for item in value]
        ]  # fmt: skip
    raise FormatError(f"a token cannot hold a {type(value).__name__}")


def _decode(value: Any, tensors: memoryview) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "tensor":
        name, shape, offset = rest
        empty = torch.empty(shape, dtype=_DTYPES[name])
        size = empty.numel() * empty.element_size()
        if size:
            # bytearray: torch refuses read-only memory without a warning.
            data = torch.frombuffer(bytearray(tensors[offset : offset + size]), dtype=torch.uint8)
            return data.view(empty.dtype).reshape(shape)
        return empty
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in rest[0]}
    items = [_decode(item, tensors) for item in rest[0]]
    return items if kind == "list" else tuple(items)
