"""Source as mypyc makes fast code of it: what ``dataclass`` and msgspec write at run time is written out.

mypyc compiles a dataclass, but leaves it the constructor that the decorator makes, which is interpreted and
sets every field by name; a NamedTuple's is interpreted, too. And it drops a Struct's keywords without a word.
So constructors are written out, and some NamedTuples and Structs, which nothing in a simulation serialises,
become such classes. Constants are said to be final: others are looked up by name at every use. Functions stay
as they are, word for word.
"""

import ast
import re

from services.compiling.errors import CompileError

UNTUPLED = {
    ("decode/expectations.py", "Expectation"),
    ("decode/expectations.py", "Sums"),
    ("decode/expectations.py", "Untold"),
    ("decode/forecast.py", "Forecast"),
    ("decode/sequence.py", "Staying"),
    ("decode/sequence.py", "_ExpectedLength"),
    ("scheduler/policy/decode_admission.py", "Growing"),
    ("services/simulator/pipeline_plan.py", "Ended"),
    ("services/simulator/pipeline_plan.py", "Planned"),
}
"""The NamedTuples that are made most often, and that nobody takes apart."""
_IMPORTS = "from dataclasses import dataclass; from typing import Final"
_CONSTANT = re.compile("_?[A-Z][A-Z0-9_]*")
UNSTRUCTED = {
    "common/messages/load.py",
    "decode/events.py",
    "prefill/events.py",
    "scheduler/events.py",
    "scheduler/policy/candidates.py",
    "services/simulator/shape.py",
}
"""Files whose Structs are compared by value and become classes all the same: nothing in a simulation encodes
or replaces one."""
_TYPES_MADE = {"NamedTuple", "NewType", "ParamSpec", "TypeVar", "namedtuple"}
_FLAGS = {"frozen", "slots", "eq", "init"}
_FIELD = {"default", "default_factory", "init", "compare", "repr"}
_STRUCT = {"eq": "False"}
_OF_VALUES = {"frozen", "gc", "kw_only", "array_like", "tag"}
_FRESH = {"dict": "{}", "list": "[]", "set": "set()"}


def rewritten(source: str, path: str) -> str:
    """Raises CompileError for a class that would come out as another one."""
    tree = ast.parse(source, path)
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef):
            _rewrite(each, path)
    tree.body = [said for each in tree.body for said in _final(each)]
    after_words = 0 if ast.get_docstring(tree) is None else 1
    after_words += sum(isinstance(each, ast.ImportFrom) and each.module == "__future__" for each in tree.body)
    tree.body[after_words:after_words] = ast.parse(_IMPORTS).body
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _final(statement: ast.stmt) -> list[ast.stmt]:
    """A module's constant, or several that are said at once, as final. What is said of its type otherwise
    stays."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if _CONSTANT.fullmatch(name):
            made = isinstance(value, ast.Call) and ast.unparse(value.func) in _TYPES_MADE
            return [statement] if made else ast.parse(f"{name}: Final = {ast.unparse(value)}").body
        case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=ast.expr() as value) if (
            _CONSTANT.fullmatch(name) and not ast.unparse(kind).startswith(("Final", "TypeAlias"))
        ):
            return ast.parse(f"{name}: Final[{ast.unparse(kind)}] = {ast.unparse(value)}").body
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if (
            len(names) == len(values)
            and all(isinstance(each, ast.Name) and _CONSTANT.fullmatch(each.id) for each in names)
            and not {ast.unparse(each) for each in names} & _names_in(values)
        ):
            alone = [ast.Assign([name], value, lineno=0) for name, value in zip(names, values, strict=True)]
            return [said for each in alone for said in _final(each)]
    return [statement]


def _names_in(values: list[ast.expr]) -> set[str]:
    return {each.id for value in values for each in ast.walk(value) if isinstance(each, ast.Name)}


def _rewrite(made: ast.ClassDef, path: str) -> None:
    where = f"{path}, line {made.lineno}: {made.name}"
    bases = [ast.unparse(base) for base in made.bases]
    if any(base.startswith("Generic[") for base in bases):
        raise CompileError(f"{where} is generic, of which mypyc makes no class that can be imported")
    is_by_name = any(each.arg == "kw_only" for each in made.keywords)
    if made.keywords or any(base.endswith("Struct") for base in bases):
        _make_dataclass(made, bases, path, where)
    if bases == ["NamedTuple"] and (path, made.name) in UNTUPLED:
        made.bases = []
        made.decorator_list.append(_expression("dataclass(frozen=True)"))
    decorator = next((each for each in made.decorator_list if _is_dataclass(each)), None)
    if decorator is None:
        return
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    flags = {each.arg: each.value.value for each in keywords if isinstance(each.value, ast.Constant)}
    if len(flags) < len(keywords) or not flags.keys() <= _FLAGS:
        raise CompileError(f"{where}: {ast.unparse(decorator)}: of a dataclass may be said {_listed(_FLAGS)}")
    if any(ast.unparse(base) != "Protocol" for base in made.bases):
        raise CompileError(f"{where} inherits: its constructor would lack what is inherited")
    if any(isinstance(each, ast.FunctionDef) and each.name == "__hash__" for each in made.body):
        raise CompileError(f"{where} has a __hash__ of its own, which would be another one's")
    if flags.get("init", True):
        made.body.append(_constructor(made, where, is_by_name=is_by_name))
    flags |= {"init": False}
    flags.pop("slots", None)
    if flags.pop("frozen", False) and flags.get("eq", True):
        # It is held to be frozen where it is interpreted, and by the type checker.
        flags["unsafe_hash"] = True
    said = ", ".join(f"{name}={value!r}" for name, value in flags.items())
    made.decorator_list[made.decorator_list.index(decorator)] = _expression(f"dataclass({said})")


def _is_dataclass(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Name) and called.id == "dataclass"


def _make_dataclass(made: ast.ClassDef, bases: list[str], path: str, where: str) -> None:
    said = {each.arg: ast.unparse(each.value) for each in made.keywords}
    is_value = path in UNSTRUCTED and said.get("frozen") == "True" and said.keys() <= _OF_VALUES
    if bases != ["msgspec.Struct"] or not (is_value or said == _STRUCT):
        said_of_it = f"{_listed(_OF_VALUES)} are" if path in UNSTRUCTED else "eq=False is"
        rule = f"may be compiled where nothing but {said_of_it} said of it"
        raise CompileError(f"{where} is a Struct, which {rule}: move it to a module that is not")
    made.bases, made.keywords = [], []
    flag = "frozen=True" if is_value else "eq=False"
    made.decorator_list.append(_expression(f"dataclass({flag})"))


def _constructor(made: ast.ClassDef, where: str, *, is_by_name: bool) -> ast.stmt:
    parameters, lines = ["self", "*"] if is_by_name else ["self"], []
    for each in made.body:
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        kind = ast.unparse(each.annotation)
        if "ClassVar" in kind:
            continue
        if "InitVar" in kind or "KW_ONLY" in kind:
            raise CompileError(f"{where}.{each.target.id}: {kind} is not written out")
        parameter, line = _field(each.target.id, kind, each.value, where)
        parameters += parameter
        lines += line
    if any(isinstance(each, ast.FunctionDef) and each.name == "__post_init__" for each in made.body):
        lines.append("self.__post_init__()")
    body = "\n    ".join(lines or ["pass"])
    return ast.parse(f"def __init__({', '.join(parameters)}) -> None:\n    {body}").body[0]


def _field(name: str, kind: str, value: ast.expr | None, where: str) -> tuple[list[str], list[str]]:
    """Its parameter, if it has one, and what sets it, if anything does."""
    if value is None:
        return [f"{name}: {kind}"], [f"self.{name} = {name}"]
    if isinstance(value, ast.List | ast.Dict | ast.Set):
        raise CompileError(f"{where}.{name}: {ast.unparse(value)} would be everybody's")
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "msgspec.field":
        raise CompileError(f"{where}.{name}: {ast.unparse(value)} is not written out")
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
        return [f"{name}: {kind} = {ast.unparse(value)}"], [f"self.{name} = {name}"]
    said = {each.arg: each.value for each in value.keywords}
    if not said.keys() <= _FIELD:
        raise CompileError(f"{where}.{name}: {ast.unparse(value)}: of a field may be said {_listed(_FIELD)}")
    init = said.get("init")
    is_told = not (isinstance(init, ast.Constant) and init.value is False)
    if "default_factory" in said:
        fresh = _fresh(said["default_factory"])
        if not is_told:
            return [], [f"self.{name} = {fresh}"]
        quoted = _expression(kind)
        if isinstance(quoted, ast.Constant):
            kind = str(quoted.value)
        if _may_be_none(_expression(kind)):
            raise CompileError(f"{where}.{name}: None would be taken for nothing told")
        return [f"{name}: '{kind} | None' = None"], [f"self.{name} = {fresh} if {name} is None else {name}"]
    default = "" if "default" not in said else f" = {ast.unparse(said['default'])}"
    if is_told:
        return [f"{name}: {kind}{default}"], [f"self.{name} = {name}"]
    return [], [f"self.{name}{default}"] if default else []


def _fresh(factory: ast.expr) -> str:
    if isinstance(factory, ast.Lambda):
        return f"({ast.unparse(factory.body)})"
    name = ast.unparse(factory)
    return _FRESH.get(name, f"{name}()")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _may_be_none(kind: ast.expr) -> bool:
    if isinstance(kind, ast.BinOp):
        return _may_be_none(kind.left) or _may_be_none(kind.right)
    return ast.unparse(kind) in ("None", "Any") or ast.unparse(kind).startswith("Optional[")


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
