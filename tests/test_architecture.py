"""The import rule: who may know whom.  It is read from the source, so nothing has to be installed to break it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "dramatiq_guard"

#: From the bottom up: a module may import from its own layer and from those above it in this table.  A name stands for
#: the module or for everything below it, unless something below it is named itself.
LAYERS = (
    ("policy",),
    ("errors", "clock", "version", "reconcile"),
    (
        *("delivery", "options", "history", "host", "interrupts", "async_actors"),
        *("settle.killpoints", "settle.redis_scripts", "exits.processes"),
        *("dead_letters.letter", "dead_letters.evidence", "dead_letters.fingerprint", "dead_letters.redact"),
    ),
    ("telemetry",),
    ("stores",),
    (
        *("seam", "settle", "exits", "probing", "idempotency", "downstreams"),
        *("checks", "substitutes", "failure_log", "boot_log", "wiring"),
    ),
    ("middleware",),
    ("stack", "classified", "keys"),
    ("dead_letters", "testing"),
    ("simulation",),
    ("cli", "dashboard", "demo", "__main__", "__init__"),
)
#: What policy would need to read a clock, throw a die, or touch the world.
IMPURE = {
    *("asyncio", "ctypes", "http", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "select"),
    *("shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "uuid"),
}


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _imports(module: str) -> Iterator[str]:
    """Everything that a module imports, for its types or anywhere else; our own as `.name`, others as they are."""
    path = MODULES[module]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = path.relative_to(PACKAGE.parent).parent.parts
            base = ".".join([*here[: len(here) - node.level + 1 if node.level else 0], *filter(None, [node.module])])
            inside = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name.partition(".")[2] in MODULES else base for name in inside]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            yield f".{rest or '__init__'}" if package == PACKAGE.name else name


def _layer(module: str) -> int:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        for height, layer in enumerate(LAYERS):
            if ".".join(parts[:length]) in layer:
                return height
    raise AssertionError(f"dramatiq_guard/{module} is in no layer: say in LAYERS where it belongs")


def _below(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _forbid(*importers: str, when: Callable[[str, str], bool]) -> None:
    offences = [
        f"{module} imports {name}"
        for module in MODULES
        if not importers or _below(module, *importers)
        for name in _imports(module)
        if when(module, name)
    ]
    assert not offences, "\n".join(offences)


def test_every_module_has_its_layer() -> None:
    """A new module is entered in the table before anything else."""
    for module in MODULES:
        assert _layer(module) >= 0


def test_imports_point_downwards() -> None:
    """Nobody knows a layer above its own."""
    _forbid(when=lambda module, name: name[0] == "." and _layer(name[1:]) > _layer(module))


def test_policy_is_pure() -> None:
    """Policy knows the standard library and itself, and there nothing that reads a clock, a die or the world."""

    def impure(_: str, name: str) -> bool:
        root = name.partition(".")[0]
        return not _below(name, ".policy") if name[0] == "." else root in IMPURE or root not in sys.stdlib_module_names

    _forbid("policy", when=impure)
    for module in filter(lambda module: _below(module, "policy"), MODULES):
        called = {node.id for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.Name)}
        assert set() == called & {"open", "print", "input"}, module


def test_middlewares_know_neither_each_other_nor_a_concrete_store() -> None:
    """What they share is in `middleware.base`, and of the stores they know the protocols."""

    def forbidden(module: str, name: str) -> bool:
        return _below(name, ".middleware", ".stores") and name not in {
            f".{module}",
            ".middleware.base",
            ".stores.protocols",
            ".stores.idempotency",
            ".stores.breakers",
        }

    _forbid("middleware", when=forbidden)


def test_stores_know_neither_dramatiq_nor_telemetry() -> None:
    """A store keeps records: it emits nothing, and could serve another host."""
    _forbid("stores", when=lambda _, name: _below(name, "dramatiq", "opentelemetry", ".telemetry", ".host"))


def test_only_telemetry_knows_opentelemetry() -> None:
    """Every span, metric and attribute name is in one place; the demo's collector reads the protocol, not the API."""

    def forbidden(module: str, name: str) -> bool:
        if _below(name, "opentelemetry.proto") and _below(module, "demo"):
            return False
        return _below(name, "opentelemetry") and not _below(module, "telemetry")

    _forbid(when=forbidden)
