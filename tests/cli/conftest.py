"""What the tests of the verbs share: calling one, and an application to point it at."""

from __future__ import annotations

import json
import sys
import textwrap
import uuid
from dataclasses import dataclass
from typing import Any

import pytest
from click.testing import CliRunner

from dramatiq_guard.cli.root import cli


@dataclass(frozen=True)
class Outcome:
    """How a verb ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What it printed, read as JSON."""
        return json.loads(self.out)


@pytest.fixture
def call():
    """Calls a verb with its arguments."""

    def call(*arguments: str) -> Outcome:
        result = CliRunner().invoke(cli, arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def application(tmp_path, monkeypatch):
    """Writes a module of a user's application into the current directory, and gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    written = []

    def write(source: str) -> str:
        name = f"app_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)
