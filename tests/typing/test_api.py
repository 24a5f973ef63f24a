"""That `api.py` leaves no public name out; mypy checks what it says of them (`nox -s lint`)."""

from __future__ import annotations

import re
from pathlib import Path

import dramatiq_guard


def test_every_public_name_has_its_types_checked() -> None:
    """A new name needs a line there."""
    text = (Path(__file__).parent / "api.py").read_text()

    assert [name for name in dramatiq_guard.__all__ if not re.search(rf"\b{re.escape(name)}\b", text)] == []
