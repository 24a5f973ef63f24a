"""Classification never raises and always ends, whatever the exceptions are."""

from __future__ import annotations

from typing import Any

from dramatiq.middleware import Shutdown
from hypothesis import given
from hypothesis import strategies as st

from dramatiq_guard.errors import Defer, Permanent, Retryable
from dramatiq_guard.policy.builtin import TABLE
from dramatiq_guard.policy.explain import explain
from dramatiq_guard.policy.names import name_of
from dramatiq_guard.policy.rules import Rules, compile_rules
from dramatiq_guard.policy.verdict import Kind, Verdict

from .errors import fake_class


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("hostile")


class HostileType(type):
    """A metaclass whose classes cannot be compared, hashed, shown or asked for their names."""

    __eq__ = __hash__ = __repr__ = __getattribute__ = __instancecheck__ = __subclasscheck__ = _refuse  # type: ignore[assignment]


class Hostile(Exception, metaclass=HostileType):
    """An exception that raises at whatever is done with it."""

    __str__ = __repr__ = __eq__ = __hash__ = __bool__ = __getattribute__ = __reduce__ = _refuse  # type: ignore[assignment]


class HostileProperties(Exception):
    """Overrides the very slots that are walked along."""

    __cause__ = __context__ = __suppress_context__ = property(_refuse)  # type: ignore[assignment]


class HostileGroup(ExceptionGroup[Exception]):
    """A group that does not show its parts."""

    exceptions = property(_refuse)  # type: ignore[assignment]
    __bool__ = __len__ = __iter__ = __str__ = _refuse  # type: ignore[assignment]


#: A class that was made nowhere, and so has no module.
Nameless = eval("type('Nameless', (Exception,), {})", {})


class Misnamed(Exception):
    """A class whose module is not a name."""

    __module__ = 7  # type: ignore[assignment]


HOSTILE_ATTRIBUTES = (
    *("response", "status", "headers", "code", "errno", "sqlstate", "pgcode", "orig", "reason"),
    *("reply_code", "smtp_code", "recipients", "args", "delay"),
)


def hostile(name: str) -> type[BaseException]:
    """A class of that name whose attributes raise when they are read."""
    return type(
        name.rpartition(".")[2],
        (Exception,),
        {"__module__": name.rpartition(".")[0]} | {attribute: property(_refuse) for attribute in HOSTILE_ATTRIBUTES},
    )


CLASSES: list[type[BaseException]] = [
    Hostile,
    HostileProperties,
    Nameless,
    Misnamed,
    RuntimeError,
    KeyError,
    ConnectionError,
    FileNotFoundError,
    Permanent,
    Retryable,
    Defer,
    Shutdown,
    MemoryError,
    KeyboardInterrupt,
    *(hostile(name) for name in TABLE),
    *(fake_class(name) for name in TABLE),
]


class Box:
    """Keeps a hostile exception out of Hypothesis's hands, which would show and compare it."""

    def __init__(self, exc: BaseException) -> None:
        self.exc = exc


@st.composite
def graphs(draw: st.DrawFn) -> Box:
    """Up to a dozen exceptions, some of them groups, linked in any way."""
    nodes: list[BaseException] = []
    for _ in range(draw(st.integers(1, 12))):
        if nodes and draw(st.booleans()):
            parts = draw(st.lists(st.sampled_from(range(len(nodes))), min_size=1, max_size=4))
            members = [nodes[part] for part in parts]
            ordinary = all(issubclass(type(member), Exception) for member in members)
            group = HostileGroup if ordinary and draw(st.booleans()) else BaseExceptionGroup
            nodes.append(group("x", members))
        else:
            nodes.append(CLASSES[draw(st.integers(0, len(CLASSES) - 1))]())
    set_cause = vars(BaseException)["__cause__"].__set__
    set_context = vars(BaseException)["__context__"].__set__
    for node in nodes:
        if draw(st.booleans()):
            set_cause(node, nodes[draw(st.integers(0, len(nodes) - 1))])
        if draw(st.booleans()):
            set_context(node, nodes[draw(st.integers(0, len(nodes) - 1))])
    return Box(nodes[-1])


def _by_text(exc: BaseException) -> bool:
    return "x" in str(exc)


rule_sets = st.sampled_from(
    [
        Rules(),
        Rules(builtin=False),
        Rules((compile_rules(origin="actor", permanent=[_by_text, KeyError], retryable=["RuntimeError"]),)),
        Rules((compile_rules(origin="actor", defer=[_refuse]), compile_rules(origin="middleware", fatal=[Exception]))),
    ]
)


@given(box=graphs(), rules=rule_sets, misfit=st.booleans(), now_ms=st.integers())
def test_classify_is_total_and_deterministic(box: Box, rules: Rules, misfit: bool, now_ms: int) -> None:
    """Cycles, nested groups, attributes that raise: there is always one verdict, and it is always the same."""
    exc = box.exc
    verdict = rules.classify(exc, call_does_not_fit=misfit, now_ms=now_ms)

    assert isinstance(verdict, Verdict)
    assert verdict == rules.classify(exc, call_does_not_fit=misfit, now_ms=now_ms)
    fresh = Rules(rules.sets, rules.builtin)
    assert verdict == fresh.classify(exc, call_does_not_fit=misfit, now_ms=now_ms)
    assert verdict == fresh.trace(exc, call_does_not_fit=misfit, now_ms=now_ms)
    assert 0 < len(verdict.why) < 1_000


@given(box=graphs(), rules=rule_sets)
def test_explain_says_what_classify_says(box: Box, rules: Rules) -> None:
    """And the way to it, which begins with the exception itself."""
    explanation = explain(box.exc, rules=rules)

    assert rules.classify(box.exc) == explanation.verdict
    assert explanation.path


@given(code=st.none() | st.integers() | st.text() | st.floats() | st.binary(), name=st.sampled_from(sorted(TABLE)))
def test_any_value_may_stand_where_a_code_is_expected(code: object, name: str) -> None:
    """Status, errno and SQLSTATE may be anything that a library or a test double puts there."""
    exc = fake_class(name)()
    for attribute in HOSTILE_ATTRIBUTES[:-2]:
        setattr(exc, attribute, code)

    assert isinstance(Rules().classify(exc).kind, Kind)


def test_a_class_of_no_module_still_has_a_name() -> None:
    """Code that is executed among globals without `__name__` makes such classes; and `__module__` can be anything."""
    made: dict[str, Any] = {}
    exec("nowhere = type('Nowhere', (Exception,), {})", made)
    odd = type("Odd", (Exception,), {"__module__": 7})

    assert [str(name_of(cls)) for cls in (made["nowhere"], odd)] == ["?.Nowhere", "?.Odd"]
    assert Rules().classify(made["nowhere"]()).kind is Kind.RETRYABLE
