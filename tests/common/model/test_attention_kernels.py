from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model.attention_kernels import merge_partials, merge_two, partial_attention


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention_by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_partial_is_attention_with_its_natural_log_sum(softcap: float | None) -> None:
    q, k, v = random(2, 6, 5, 8), random(2, 2, 7, 8, seed=1), random(2, 2, 7, 8, seed=2)
    output, lse = partial_attention(q, k, v, 0.3, softcap=softcap)
    expected, expected_lse = attention_by_definition(q, k, v, 0.3, softcap)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0.0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_causal_and_mask_hide_the_same_keys(softcap: float | None) -> None:
    q, k, v = random(1, 4, 6, 8), random(1, 2, 6, 8, seed=1), random(1, 2, 6, 8, seed=2)
    mask = torch.full((6, 6), float("-inf")).triu(1)
    causal = partial_attention(q, k, v, 0.3, is_causal=True, softcap=softcap)
    masked = partial_attention(q, k, v, 0.3, mask=mask, softcap=softcap)
    for ours, theirs in zip(causal, masked, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0.0)


@settings(deadline=None)
@given(
    cuts=st.lists(st.integers(1, 19), unique=True, max_size=4).map(sorted),
    heads=st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    queries=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_partials_of_disjoint_keys_merge_into_the_whole(
    cuts: list[int], heads: tuple[int, int], queries: int, seed: int
) -> None:
    q = random(1, heads[0], queries, 8, seed=seed)
    k, v = (random(1, heads[1], 20, 8, seed=seed + i) for i in (1, 2))
    whole = attention_by_definition(q, k, v, 0.35)
    bounds = [0, *cuts, 20]
    parts = [partial_attention(q, k[:, :, a:b], v[:, :, a:b], 0.35) for a, b in pairwise(bounds)]
    outputs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    merged = merge_partials(outputs, lses, dim=0)
    one_by_one = parts[0]
    for part in parts[1:]:
        one_by_one = merge_two(one_by_one, part)
    for result in (merged, one_by_one):
        torch.testing.assert_close(result[0], whole[0], atol=1e-5, rtol=0.0)
        torch.testing.assert_close(result[1], whole[1], atol=1e-5, rtol=0.0)


def test_a_partial_over_no_keys_weighs_nothing() -> None:
    output, lse = random(1, 2, 3, 4), random(1, 2, 3)
    nothing = (random(1, 2, 3, 4, seed=9), torch.full((1, 2, 3), float("-inf")))
    for merged in (merge_two((output, lse), nothing), merge_two(nothing, (output, lse))):
        torch.testing.assert_close(merged[0], output)
        torch.testing.assert_close(merged[1], lse)


def test_empty_keys_are_refused_before_the_kernel() -> None:
    with pytest.raises(ValueError, match="no keys"):
        partial_attention(random(1, 2, 1, 4), random(1, 2, 0, 4), random(1, 2, 0, 4), 1.0)


@pytest.mark.parametrize("keys", [45, 64, 65, 77, 96, 513])
@pytest.mark.parametrize("kind", ["all", "causal", "masked"])
def test_keys_that_fill_no_whole_tile_in_bf16_are_attended_to_as_they_are(kind: str, keys: int) -> None:
    queries = keys if kind == "causal" else 5
    shapes = ((1, 4, queries, 16), (1, 2, keys, 16), (1, 2, keys, 16))
    q, k, v = (random(*shape, seed=seed).bfloat16() for seed, shape in enumerate(shapes))
    mask = torch.zeros(queries, keys)
    if kind == "causal":
        mask.fill_(float("-inf")).triu_(1)
    elif kind == "masked":
        mask[:, ::3] = float("-inf")
    given_mask = mask.bfloat16() if kind == "masked" else None
    found = partial_attention(q, k, v, 0.3, mask=given_mask, is_causal=kind == "causal")
    wide = partial_attention(q.float(), k.float(), v.float(), 0.3, mask=mask)
    for ours, exact in zip(found, wide, strict=True):
        torch.testing.assert_close(ours.float(), exact, atol=0.03, rtol=0.02)
