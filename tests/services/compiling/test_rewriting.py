"""What becomes of classes before they are compiled: the same ones, with constructors of their own."""

from pathlib import Path
from typing import Any, Final

import pytest

from services.compiling.errors import CompileError
from services.compiling.modules import COMPILED
from services.compiling.rewriting import UNSTRUCTED, UNTUPLED, rewritten

REPOSITORY = Path(__file__).parents[3]

CLASSES = '''
"""Words first."""

from dataclasses import dataclass, field

import msgspec


@dataclass(frozen=True, slots=True)
class Span:
    begin: int
    end: int = 7


@dataclass(slots=True)
class Room:
    name: str
    spans: list[Span] = field(default_factory=list)
    limits: "dict[str, int | None]" = field(default_factory=dict)
    pace: float = field(default=1.5, compare=False)
    seen: set[int] = field(init=False, default_factory=set)
    doubled: float = field(init=False, compare=False)

    def __post_init__(self) -> None:
        self.doubled = 2 * self.pace


@dataclass(slots=True, eq=False)
class Entity:
    made: Room = field(default_factory=lambda: Room("of itself"))


class Timer(msgspec.Struct, eq=False):
    due_s: float
    action: str | None = None
'''


def made_of(source: str, path: str = "some/where.py") -> dict[str, Any]:
    """The names of what it becomes."""
    names: dict[str, Any] = {"__name__": __name__}
    exec(rewritten(source, path), names)
    return names


def test_classes_are_made_as_before() -> None:
    names = made_of(CLASSES)
    span, room, timer = names["Span"], names["Room"], names["Timer"]
    assert span(1) == span(1, 7) == span(begin=1, end=7) != span(1, 8)
    assert len({span(1), span(1, 7), span(2)}) == 2
    assert repr(span(1)).endswith("Span(begin=1, end=7)")
    first, second = room("a"), room("a", [span(3)], {"x": None}, pace=2.0)
    assert (first.spans, first.limits, first.pace, first.seen, first.doubled) == ([], {}, 1.5, set(), 3.0)
    assert (second.spans, second.limits, second.doubled) == ([span(3)], {"x": None}, 4.0)
    assert room("b").spans is not room("b").spans, "everybody's"
    assert room("a", pace=3.0) == first, "the pace is not compared"
    assert names["Entity"]().made.name == "of itself"
    assert names["Entity"]() != names["Entity"]()
    due = timer(2.0)
    assert (due.due_s, due.action) == (2.0, None)
    assert due != timer(2.0)
    with pytest.raises(TypeError, match="due_s"):
        timer()


@pytest.mark.parametrize("module", COMPILED)
def test_what_is_compiled_can_be_rewritten(module: str) -> None:
    path = f"{module.replace('.', '/')}.py"
    compile(rewritten((REPOSITORY / path).read_text(), path), path, "exec")


def test_a_constructor_of_one_s_own_stays() -> None:
    source = (
        "from dataclasses import dataclass\n@dataclass(init=False)\nclass A:\n    x: int\n"
        "    def __init__(self) -> None:\n        self.x = 3\n"
    )
    assert made_of(source)["A"]().x == 3


def test_what_is_no_class_of_theirs_stays() -> None:
    source = "class Plain:\n\n    def __init__(self) -> None:\n        self.x = [1]\nNot_Constant = A.B = 3\n"
    assert rewritten(source, "plain.py").endswith(source)


def test_a_module_s_constants_are_final() -> None:
    source = "ONE = 1\n_TWO: int = 2\nTHREE, FOUR = 3, (4, 'four')\ndef f():\n    INNER = 5\n"
    names = made_of(source)
    assert names["__annotations__"] == {"ONE": Final, "_TWO": Final[int], "THREE": Final, "FOUR": Final}
    assert [names[each] for each in ("ONE", "_TWO", "THREE", "FOUR")] == [1, 2, 3, (4, "four")]


@pytest.mark.parametrize(
    "line",
    [
        "a, b = (b, a)",
        "A, B = (B, A)",
        "A, *B = (1, 2, 3)",
        "A, B = (1, 2, 3)",
        "A, b = (1, 2)",
        "T = TypeVar('T')",
        "X: Final = 3",
        "X: TypeAlias = int",
    ],
)
def test_what_is_no_constant_or_was_said_already_stays(line: str) -> None:
    assert rewritten(line + "\n", "some/where.py").endswith("\n" + line + "\n")


def test_imports_come_after_those_of_the_future() -> None:
    made_of('"""Words."""\nfrom __future__ import annotations\nONE = 1\n')


def test_a_value_that_nothing_serialises_may_be_a_frozen_struct() -> None:
    source = "import msgspec\nclass A(msgspec.Struct, frozen=True, gc=False):\n    x: int\n    y: int = 2\n"
    made = made_of(source, min(UNSTRUCTED))["A"]
    assert made(1) == made(1, 2) != made(1, 3)
    assert len({made(1), made(1, 2)}) == 1


def test_one_whose_fields_are_given_by_name_stays_so() -> None:
    source = (
        "import msgspec\n"
        "class A(msgspec.Struct, frozen=True, tag='a', kw_only=True):\n"
        "    x: int\n    y: int = 2\n    z: int\n"
        "class B(msgspec.Struct, frozen=True, array_like=True):\n    x: int\n"
    )
    made = made_of(source, min(UNSTRUCTED))
    assert (made["A"](z=3, x=1).y, made["B"](1).x) == (2, 1)
    with pytest.raises(TypeError, match="positional"):
        made["A"](1, 2, 3)


@pytest.mark.parametrize("said", ["frozen=True, rename='camel'", "frozen=True, dict=True", "gc=False", ""])
def test_of_one_of_those_files_nothing_else_may_be_said(said: str) -> None:
    with pytest.raises(CompileError, match="array_like, frozen, gc, kw_only, tag are said of it"):
        rewritten(f"class A(msgspec.Struct, {said}):\n    x: int\n", min(UNSTRUCTED))


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        ("class A(msgspec.Struct, frozen=True):\n    x: int", "is a Struct"),
        ("class A(msgspec.Struct):\n    x: int", "is a Struct"),
        ("class A(msgspec.Struct, frozen=True, gc=False):\n    x: int", "is a Struct"),
        ("class A(Struct, array_like=True):\n    x: int", "is a Struct"),
        ("class A(Base, frozen=True):\n    x: int", "is a Struct"),
        ("@dataclass(kw_only=True)\nclass A:\n    x: int", "of a dataclass may be said"),
        ("@dataclass(order=ORDER)\nclass A:\n    x: int", "of a dataclass may be said"),
        ("@dataclass\nclass A:\n    x: int = field(kw_only=True)", "of a field may be said"),
        ("@dataclass(frozen=True)\nclass A:\n    def __hash__(self) -> int: ...", "__hash__"),
        ("class A(Generic[T]):\n    x: int", "is generic"),
        ("@dataclass(slots=True)\nclass A(B):\n    x: int", "inherits"),
        ("@dataclass\nclass A:\n    x: InitVar[int]", "InitVar"),
        ("class A(msgspec.Struct, eq=False):\n    x: list[int] = []", "everybody's"),
        (
            "class A(msgspec.Struct, eq=False):\n    x: list[int] = msgspec.field(default_factory=list)",
            "not written out",
        ),
        ("@dataclass\nclass A:\n    x: int | None = field(default_factory=make)", "None would be taken"),
    ],
)
def test_a_class_that_would_be_another_one_is_refused_by_name(made: str, rule: str) -> None:
    with pytest.raises(CompileError, match=rule) as refused:
        rewritten(made + "\n", "some/where.py")
    assert "some/where.py, line" in str(refused.value)
    assert ": A" in str(refused.value)


def test_every_tuple_that_becomes_a_class_is_there() -> None:
    for path, name in UNTUPLED:
        assert f"class {name}(NamedTuple):" in (REPOSITORY / path).read_text(), (path, name)


def test_every_frozen_struct_that_becomes_a_class_is_there() -> None:
    for path in UNSTRUCTED:
        source = (REPOSITORY / path).read_text()
        assert "(msgspec.Struct, frozen=True, " in source, path
        assert "(msgspec.Struct" not in rewritten(source, path), path
        assert path.removesuffix(".py").replace("/", ".") in COMPILED, path
