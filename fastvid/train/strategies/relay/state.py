"""The state of a model that moves, a token: as bytes and as a file.

    magic 8 | length of the structure, 8 bytes little-endian | structure, UTF-8 JSON | tensors | blake2b, 16 bytes

Nothing is unpickled. The structure comes first and contains the offset of each tensor. The store has the newest token
of every model, in memory and in the run's folder, for a resume.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

import torch
from torch import Tensor

from fastvid.errors import ChecksumError, FormatError, StateError
from fastvid.runtime import faults
from fastvid.storage import open_storage

MAGIC: Final = b"fvtoken1"

_DIGEST: Final = 16  # bytes; 128 bits suffice against accidental damage
_HEAD: Final = len(MAGIC) + 8
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


def pack(tree: Any) -> bytes:
    """Serialize a tree; equal trees result in equal bytes.

    `tree`: dicts with str or int keys, lists, tuples, None, bool, int, float, str and dense tensors. Strides and
    devices are not stored.
    """
    tensors: list[bytes] = []
    structure = json.dumps(_encode(tree, tensors, [0])).encode()
    parts = [MAGIC, len(structure).to_bytes(8, "little"), structure, *tensors]
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
    return b"".join([*parts, digest.digest()])


def check(data: bytes) -> None:
    """Check that the bytes are an intact token."""
    if data[: len(MAGIC)] != MAGIC or len(data) < _HEAD + _DIGEST:
        raise FormatError("data is not a token")
    body = memoryview(data)[:-_DIGEST]
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != data[-_DIGEST:]:
        raise ChecksumError("token does not match its checksum")


def unpack(data: bytes) -> Any:
    """Return the tree of a token; its tensors are on the CPU and own their memory."""
    check(data)
    length = int.from_bytes(data[len(MAGIC) : _HEAD], "little")
    tensors = memoryview(data)[_HEAD + length : -_DIGEST]
    return _decode(json.loads(data[_HEAD : _HEAD + length]), tensors)


def _encode(value: Any, tensors: list[bytes], offset: list[int]) -> Any:
    """Convert a value to JSON: scalars as they are, anything else as a list that starts with its kind."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        if name not in _DTYPES or value.layout is not torch.strided:
            raise FormatError(f"a token cannot contain a tensor of {value.dtype}, {value.layout}")
        # reshape, because a 0-dimensional tensor cannot be viewed as bytes.
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        tensors.append(data)
        offset[0] += len(data)
        return ["tensor", name, list(value.shape), offset[0] - len(data)]
    if isinstance(value, dict):
        if not all(isinstance(key, (str, int)) and not isinstance(key, bool) for key in value):
            raise FormatError("a token cannot contain a dict with keys other than str and int")
        return ["dict", [[key, _encode(item, tensors, offset)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        return [
            "list" if isinstance(value, list) else "tuple", [_encode(item, tensors, offset) for item in value]
        ]  # fmt: skip
    raise FormatError(f"a token cannot contain a {type(value).__name__}")


def _decode(value: Any, tensors: memoryview) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "tensor":
        name, shape, offset = rest
        empty = torch.empty(shape, dtype=_DTYPES[name])
        size = empty.numel() * empty.element_size()
        if size:
            # bytearray, because torch warns about read-only memory.
            data = torch.frombuffer(bytearray(tensors[offset : offset + size]), dtype=torch.uint8)
            return data.view(empty.dtype).reshape(shape)
        return empty
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in rest[0]}
    items = [_decode(item, tensors) for item in rest[0]]
    return items if kind == "list" else tuple(items)


class TokenStore:
    """Tokens by model. Files are replaced atomically, so tokens stay intact if the hub is killed."""

    def __init__(self, num_models: int, folder: str | None = None) -> None:
        self._storage = None if folder is None else open_storage(folder)
        self._tokens: list[bytes | None] = [None] * num_models
        if self._storage is not None:
            self._storage.sweep()
            present = set(self._storage.list("model-"))
            for model in range(num_models):
                if _name(model) in present:
                    self._tokens[model] = self._storage.read(_name(model))

    def get(self, model: int) -> bytes | None:
        """Return the token of a model; None if it was never trained."""
        return self._tokens[model]

    def put(self, model: int, token: bytes) -> None:
        """Replace the token of a model."""
        if self._storage is not None:
            self._storage.write(_name(model), token)
        faults.reach("token_store")
        self._tokens[model] = token

    def history(self) -> tuple[list[list[int]], list[list[float]]]:
        """Return visits and scores of every model, for `Scheduler.restore`."""
        visits: list[list[int]] = []
        scores: list[list[float]] = []
        for model, data in enumerate(self._tokens):
            tree: dict[str, Any] = {"model": model, "visits": [], "scores": []} if data is None else unpack(data)
            if tree.get("model") != model:
                raise StateError(f"token file of model {model} contains model {tree.get('model')}")
            visits.append([int(partition) for partition in tree["visits"]])
            scores.append([float(score) for score in tree["scores"]])
        return visits, scores


def _name(model: int) -> str:
    return f"model-{model:04d}.token"
