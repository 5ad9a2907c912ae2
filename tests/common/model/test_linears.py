import pytest
import torch
import torch.nn.functional as F

from common.errors import ModelError
from common.model.linears import INT8_ROWS, can_multiply_bytes, linear_of
from common.model.precision import WeightForm

needs_byte_products = pytest.mark.skipif(
    not can_multiply_bytes(), reason="this torch has no quantized linear for the CPU"
)
ERRORS: dict[WeightForm, float] = {"bf16": 0.006, "int8": 0.012, "w8a8": 0.02}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_model_weights_multiply_as_the_plain_linear(dtype: torch.dtype, tokens: int) -> None:
    weight, bias, x = (each.to(dtype) for each in (random(48, 64), random(48), random(1, tokens, 64)))
    output = linear_of(weight, bias, "model")(x)
    expected = F.linear(x.float(), weight.float(), bias.float())
    assert output.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, INT8_ROWS, INT8_ROWS + 1])
@pytest.mark.parametrize("form", ["bf16", "int8", pytest.param("w8a8", marks=needs_byte_products)])
def test_rounded_weights_come_close(form: WeightForm, tokens: int, dtype: torch.dtype) -> None:
    weight, bias, x = (each.to(dtype) for each in (random(48, 64), random(48), random(1, tokens, 64)))
    output = linear_of(weight, bias, form)(x)
    expected = F.linear(x.float(), weight.float(), bias.float())
    assert output.dtype == dtype
    assert output.shape == (1, tokens, 48)
    assert 0 < relative_error(output, expected) < ERRORS[form]


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_few_rows_and_many_multiply_by_the_same_weights(form: WeightForm) -> None:
    """Read off through unit vectors, which no rounding of activations changes."""
    linear = linear_of(random(48, 64), None, form)
    at_once = linear(torch.eye(64)[None])[0]
    one_by_one = torch.cat([linear(row[None, None])[0] for row in torch.eye(64)])
    torch.testing.assert_close(one_by_one, at_once, atol=0.0, rtol=0.005)


@needs_byte_products
def test_rounded_activations_keep_tokens_apart() -> None:
    x = random(1, 9, 64)
    linear = linear_of(random(48, 64), random(48), "w8a8")
    louder = x.clone()
    louder[0, 0] *= 1000
    torch.testing.assert_close(linear(louder)[0, 1:], linear(x)[0, 1:], atol=0.0, rtol=0.0)


@pytest.mark.parametrize("form", ["int8", pytest.param("w8a8", marks=needs_byte_products)])
@pytest.mark.parametrize("tokens", [2, 20])
def test_a_row_of_zeros_stays_zero(form: WeightForm, tokens: int) -> None:
    weight = random(16, 32)
    weight[3] = 0
    output = linear_of(weight, None, form)(torch.zeros(1, tokens, 32))
    assert int(output.count_nonzero()) == 0


@pytest.mark.parametrize("form", ["bf16", "int8", "w8a8"])
def test_rounded_weights_need_a_cpu(form: WeightForm) -> None:
    with pytest.raises(ModelError, match=f'weights = "{form}": needs device = "cpu"'):
        linear_of(torch.empty(4, 4, device="meta"), None, form)
