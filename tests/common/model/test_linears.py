import pytest
import torch
import torch.nn.functional as F

from common.model.linears import can_multiply_int8, linear_of


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_model_weights_multiply_as_the_plain_linear(dtype: torch.dtype, tokens: int) -> None:
    weight, bias, x = (each.to(dtype) for each in (random(48, 64), random(48), random(1, tokens, 64)))
    output = linear_of(weight, bias, "model")(x)
    expected = F.linear(x.float(), weight.float(), bias.float())
    assert output.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=0.02)


@pytest.mark.skipif(not can_multiply_int8(), reason="this torch has no quantized linear for the CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_come_close_and_keep_tokens_apart(dtype: torch.dtype) -> None:
    weight, bias, x = (each.to(dtype) for each in (random(48, 64), random(48), random(1, 9, 64)))
    linear = linear_of(weight, bias, "int8")
    output = linear(x)
    expected = F.linear(x.float(), weight.float(), bias.float())
    error = (output.float() - expected).norm() / expected.norm()
    assert output.dtype == dtype
    assert 0 < float(error) < 0.02
    louder = x.clone()
    louder[0, 0] *= 1000
    torch.testing.assert_close(linear(louder)[0, 1:], output[0, 1:], atol=0.0, rtol=0.0)


def test_a_row_of_zeros_stays_zero_in_int8() -> None:
    if not can_multiply_int8():
        pytest.skip("this torch has no quantized linear for the CPU")
    output = linear_of(random(16, 32), None, "int8")(torch.zeros(1, 2, 32))
    assert int(output.count_nonzero()) == 0
