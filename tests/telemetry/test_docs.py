"""The tables of docs/telemetry.md are complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from dramatiq_guard.telemetry import names

DOCS = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()
EXPORTED = {
    value
    for name, value in vars(names).items()
    if name.isupper() and name != "SCHEMA_URL" and isinstance(value, str) and not value.startswith("exception")
}


@pytest.mark.parametrize("name", sorted(EXPORTED))
def test_every_exported_name_is_in_the_docs(name: str) -> None:
    """In full, or by its last word where a row lists several."""
    assert f"`{name}`" in DOCS or f"`.{name.rpartition('.')[2]}`" in DOCS or name in ("dramatiq_guard", "exception")
