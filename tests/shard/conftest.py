"""Servers of the storage tests, for jobs that read from them and write to them."""

from __future__ import annotations

from tests.storage.conftest import nginx, obstore, s3

__all__ = ["nginx", "obstore", "s3"]
