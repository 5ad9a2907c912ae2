"""Grouped expert products against the plain ones, and that conversions use them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model.cache import load_manifest
from common.model.experts import expert_linear
from tests.common.model.conftest import MakeTiny


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    experts=st.integers(1, 9),
    width=st.integers(1, 17),
    output=st.integers(1, 17),
    seed=st.integers(0, 2**16),
)
def test_each_row_meets_its_own_expert(rows: int, experts: int, width: int, output: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    weights = torch.randn(experts, output, width, generator=generator)
    chosen = torch.randint(0, experts, (rows,), generator=generator)
    expected = torch.bmm(weights[chosen], x.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(expert_linear(x, weights, chosen), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_a_conversion_copies_no_expert_s_weights(tiny: MakeTiny, family: str) -> None:
    model = tiny(family)
    conversion = next(
        (model.directory.parent / "cache" / "programs").glob(f"{family}-*/manifest.json")
    ).parent
    _, source = load_manifest(conversion)
    text = source.read_text()
    assert "expert_linear(" in text
    assert "bmm" not in text
    assert "transformers" not in text.partition("\n")[2]
