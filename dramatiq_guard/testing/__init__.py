"""For the tests of those who use the library."""

from __future__ import annotations

from .idempotent import assert_idempotent

__all__ = ["assert_idempotent"]
