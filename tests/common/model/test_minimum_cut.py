"""The minimum cut against brute force, and what it leaves between the slices of the families."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model.capture import CapturedModel, capture_model
from common.model.graph import token_bytes
from common.model.minimum_cut import Uncuttable, minimum_cut
from common.model.rewrite import rewrite
from common.model.slices import Slice, cut, step_constants
from tests.common.model.conftest import FAMILIES, save_tiny

Users = Mapping[int, Sequence[int]]


@st.composite
def dataflows(draw: st.DrawFn) -> tuple[Users, dict[int, int | None], set[int], set[int]]:
    """Graphs of up to ten values; the sources hold their predecessors, the sinks their successors."""
    count = draw(st.integers(2, 10))
    pairs = list(itertools.combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=20))
    users: Users = {value: sorted(b for a, b in edges if a == value) for value in range(count)}
    sizes: dict[int, int | None] = {
        value: draw(st.one_of(st.none(), st.integers(1, 9))) for value in range(count)
    }
    before = {user: {value for value in users if user in users[value]} for user in users}
    sources = closure({draw(st.integers(0, count - 2))}, before)
    sinks = closure({draw(st.integers(1, count - 1))}, users) - sources
    sinks -= {value for value in sinks if closure({value}, users) & sources}
    return users, sizes, sources, sinks


def closure(start: set[int], onward: Mapping[int, Sequence[int] | set[int]]) -> set[int]:
    found, waiting = set(start), list(start)
    while waiting:
        fresh = set(onward[waiting.pop()]) - found
        found |= fresh
        waiting += fresh
    return found


def brute_force(users: Users, sizes: Mapping[int, int | None], sources: set[int], sinks: set[int]) -> float:
    """The least size over all sets closed under predecessors; infinite where all keep what cannot be kept."""
    free = [value for value in users if value not in sources | sinks]
    best = float("inf")
    for chosen in itertools.product((False, True), repeat=len(free)):
        before = sources | {value for value, is_early in zip(free, chosen, strict=True) if is_early}
        late = set(users) - before
        if any(user in before for value in late for user in users[value]):
            continue
        kept = [sizes[value] for value in before if set(users[value]) & late]
        best = min(best, sum(float("inf") if size is None else size for size in kept))
    return best


@settings(max_examples=300, deadline=None)
@given(dataflows())
def test_the_cut_is_the_least_of_all(
    dataflow: tuple[Users, dict[int, int | None], set[int], set[int]],
) -> None:
    users, sizes, sources, sinks = dataflow
    expected = brute_force(users, sizes, sources, sinks)
    if expected == float("inf"):
        with pytest.raises(Uncuttable) as refused:
            minimum_cut(users, sizes, sources, sinks)
        assert sizes[int(str(refused.value.value))] is None
        return
    found = minimum_cut(users, sizes, sources, sinks)
    assert found.size == expected
    assert sources <= found.before
    assert not sinks & found.before
    assert all(not set(users[value]) & found.before for value in set(users) - found.before)
    assert found.size == sum(sizes[value] or 0 for value in found.kept)


def test_a_value_with_two_consumers_is_kept_once() -> None:
    users = {"x": ["a", "b"], "a": [], "b": []}
    found = minimum_cut(users, {"x": 5, "a": 1, "b": 1}, {"x"}, {"a", "b"})
    assert (found.kept, found.size) == (("x",), 5)


def test_a_small_value_is_computed_early_instead_of_a_large_one_kept() -> None:
    users = {"x": ["q", "norm"], "q": [], "norm": ["gate"], "gate": ["sum"], "sum": []}
    sizes = {"x": 8, "q": 1, "norm": 8, "gate": 2, "sum": 8}
    found = minimum_cut(users, sizes, {"x", "q"}, {"sum"})
    assert (found.kept, found.size) == (("gate",), 2)
    assert found.before == {"x", "q", "norm", "gate"}


# -- families -----------------------------------------------------------------------------------------------


Sliced = tuple[CapturedModel, tuple[Slice, ...]]


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sliced]:
    """Captures and cuts a family's tiny model once."""

    @functools.cache
    def make(family: str) -> Sliced:
        directory = tmp_path_factory.mktemp("cut") / family
        save_tiny(family, directory)
        model = capture_model(directory, torch.float32)
        rewrite(model.graph, weights={*model.parameters, *model.constants}, positions=model.positions)
        return model, cut(model)

    return make


HIDDEN = 32 * 4
"""Bytes per token of the tiny models' residual stream."""


@pytest.mark.parametrize(
    ("family", "tables", "activations"),
    [
        ("llama", [2, 2], [HIDDEN]),
        ("qwen3-moe", [2, 2], [HIDDEN]),
        ("opt", [0, 0], [HIDDEN]),
        ("gpt2", [0, 0], [HIDDEN]),
        ("gemma3", [4, 2], [HIDDEN]),
        ("gpt-neox", [2, 2], [HIDDEN, HIDDEN]),
        ("cohere", [2, 2], [HIDDEN, HIDDEN]),
    ],
)
def test_the_context_is_the_residual_stream_and_the_step_s_tables(
    sliced: Callable[[str], Sliced], family: str, tables: list[int], activations: list[int]
) -> None:
    """Two tables (cos, sin) for each kind of attention still ahead; the last slice needs none.

    Parallel-residual models keep the MLP's output too: it is computed while attention runs.
    """
    model, slices = sliced(family)
    constants = step_constants(model)
    contexts = [piece.context for piece in slices[1:]]
    assert [sum(node in constants for node in context) for context in contexts] == [*tables, 0]
    for context in contexts:
        assert [token_bytes(node) for node in context if node not in constants] == activations


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "opt"])
def test_what_a_slice_keeps_is_the_minimum_cut(sliced: Callable[[str], Sliced], family: str) -> None:
    model, slices = sliced(family)
    constants = step_constants(model)
    assert len(slices) == len(model.attentions) + 1
    for piece in slices[:-1]:
        assert piece.least_bytes == sum(
            token_bytes(node) or 0 for node in piece.results if node not in constants
        )


@pytest.mark.parametrize("family", ["gpt-neox", "cohere"])
def test_a_parallel_mlp_runs_while_attention_does(sliced: Callable[[str], Sliced], family: str) -> None:
    _, slices = sliced(family)
    for piece in slices[:-1]:
        beside = [node for node in piece.nodes[2] if "linear" in node.name]
        assert len(beside) >= 2  # up and down projections, at least
        assert piece.least_bytes is not None
        assert piece.least_bytes <= 2 * HIDDEN


@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_is_computed_once_and_after_its_inputs(
    sliced: Callable[[str], Sliced], family: str
) -> None:
    model, slices = sliced(family)
    weights = {*model.parameters, *model.constants}
    known = {*weights, model.token_ids, model.positions}
    computed: set[object] = set()
    for piece in slices:
        if piece.received is not None:
            known.add(piece.received)
        for part in piece.nodes:
            for node in part:
                assert node not in computed
                computed.add(node)
                missing = [
                    parent
                    for parent in node.all_input_nodes
                    if parent not in known and not is_weight_or_size(parent, weights)
                ]
                assert missing == []
                known.add(node)
    assert model.output in computed


def is_weight_or_size(node: torch.fx.Node, weights: set[torch.fx.Node]) -> bool:
    if isinstance(node.meta["val"], torch.SymInt):
        return True
    return node in weights or (
        node.op == "call_function" and all(is_weight_or_size(each, weights) for each in node.all_input_nodes)
    )
