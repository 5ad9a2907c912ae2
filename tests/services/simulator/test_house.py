"""The simulator decides nothing: what runs live is what is simulated."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

from decode.events import DecodeCommand, InheritSequence
from prefill.events import PrefillCommand
from services.simulator import decode_room, prefill_room
from tests.test_house import REPOSITORY, dotted, imports_of, name_of, tree_of

SIMULATOR = REPOSITORY / "services" / "simulator"
DECIDING = ("scheduler", "prefill", "decode", "attention", "gateway")
SIMULATING = ("simulator", "planner", "compare", "reproduce", "autoscaling")
LONGEST_STATEMENTS = 3
LEAST_NODES = 22
"""Of the syntax tree, that statements have which are looked for: shorter ones are alike by chance."""

MADE_BY_DECISIONS = {
    "Placement",
    "RunChunk",
    "ChunkSlice",
    "RunStep",
    "StepRow",
    "PullSequence",
    "SendKV",
    "AnswerPull",
    "SwapOut",
    "SwapIn",
    "MoveSequence",
    "StartServing",
    "KeepKV",
    "ExchangeShape",
    "SeekHome",
    "SeekDecode",
    "HandOn",
    "OfferSequence",
    "DeclineOffer",
    "WithdrawOffer",
    "KVDelivered",
    "RoleChange",
    "Departure",
    "EndWait",
    "Scored",
    "PrefillCandidate",
    "DecodeCandidate",
    "Worker",
    "LoadReport",
}
"""Values that say what a decision came to, or what it looks at: states and policies make them."""

CHANGES_BY_DECISIONS = {
    "try_allocate",
    "release",
    "pin",
    "unpin",
    "quarantine",
    "book",
    "unbook",
    "discard",
    "give_back",
    "add_pool",
    "lose_pool",
    "close_pool",
    "remove_pool",
    "pool_for_newcomer",
}
"""What only a state does to its own books."""

POLICIES_USED = {
    "scheduler.policy.decode_binding.is_bound_late",
    "scheduler.policy.fitting.LinearFit",
    "scheduler.policy.mixed_batching.PassChoice",
    "scheduler.policy.prefill_batching.fill_batch_of",
    "scheduler.policy.pull_budget.PullBudget",
    "scheduler.policy.pull_budget.share_of_steps",
    "scheduler.policy.roles.RoleChange",
    "scheduler.policy.roles.RolePolicy",
    "scheduler.policy.roles.role_policy",
    "scheduler.policy.staggering.Staggering",
}
"""As the live services use them: given to a state, or asked where a service asks."""


def files() -> list[Path]:
    return sorted(SIMULATOR.rglob("*.py"))


def test_no_policy_has_a_second_implementation() -> None:
    policies = {
        node.name.lstrip("_")
        for path in (REPOSITORY / "scheduler" / "policy").glob("*.py")
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef)
    }
    assert {"choose", "choose_victims", "can_admit", "fill_chunk"} <= policies
    for path in files():
        functions = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef))
        again = {node.name.lstrip("_") for node in functions} & policies
        assert not again, f"{name_of(path)} has a function of a policy's name: {again}"


def statements_of(tree: ast.AST) -> Iterator[tuple[tuple[str, ...], int]]:
    """Up to three that follow on one another, whatever names and constants are in them: their kinds of
    nodes, and the line of the first."""
    for node in ast.walk(tree):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(block, list) or isinstance(node, ast.Module | ast.ClassDef):
                continue
            for first in range(len(block)):
                for last in range(first + 1, min(first + LONGEST_STATEMENTS, len(block)) + 1):
                    kinds = tuple(kinds_of(block[first:last]))
                    if len(kinds) >= LEAST_NODES:
                        yield kinds, block[first].lineno


def kinds_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if not isinstance(node, ast.expr_context):
            yield type(node).__name__
            yield from kinds_of(ast.iter_child_nodes(node))


def decisions() -> dict[tuple[str, ...], str]:
    return {
        kinds: f"{name_of(path)}:{line}"
        for package in DECIDING
        for path in sorted((REPOSITORY / package).rglob("*.py"))
        for kinds, line in statements_of(tree_of(path))
    }


def test_no_decision_has_a_copy_under_other_names() -> None:
    """Nor has what leads to one, in the planner and whatever else stands on simulations."""
    known = decisions()
    for package in SIMULATING:
        for path in sorted((REPOSITORY / "services" / package).rglob("*.py")):
            for kinds, line in statements_of(tree_of(path)):
                assert kinds not in known, f"{name_of(path)}:{line} is a copy of {known[kinds]}"


def test_a_copy_of_a_policy_is_found_whatever_it_is_called() -> None:
    """``fill_chunk`` with everything renamed."""
    copied = """
def cut(lengths, most):
    parts = []
    left = most
    for length in lengths:
        if left == 0:
            break
        part = min(length, left)
        parts.append(part)
        left -= part
    return parts
"""
    known = decisions()
    found = {known[kinds] for kinds, _ in statements_of(ast.parse(copied)) if kinds in known}
    assert any("prefill_batching" in each for each in found)


def test_it_makes_no_value_that_a_decision_makes() -> None:
    for path in files():
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            name = dotted(node.func).rpartition(".")[2]
            where = f"{name_of(path)}:{node.lineno}"
            assert name not in MADE_BY_DECISIONS, f"{where} decides by itself: {name}"
            assert name not in CHANGES_BY_DECISIONS, f"{where} changes a state's books: {name}"


def test_it_carries_out_every_command() -> None:
    """But for KV that attention workers keep of a decode instance that is gone: nobody asks for it there."""
    assert {*prefill_room.COMMANDS} == {*get_args(PrefillCommand)}
    assert {*get_args(DecodeCommand)} - {*decode_room.COMMANDS} == {InheritSequence}


def test_it_uses_policies_as_the_services_do() -> None:
    for path in files():
        used = {each for each in imports_of(tree_of(path)) if each.startswith("scheduler.policy.")}
        names = {each for each in used if each.count(".") > 2}
        assert names <= POLICIES_USED, name_of(path)


def test_it_needs_no_event_loop_and_no_clock_but_its_own() -> None:
    for path in files():
        packages = {each.partition(".")[0] for each in imports_of(tree_of(path))}
        assert not packages & {"asyncio", "time", "random", "threading", "torch"}, name_of(path)
