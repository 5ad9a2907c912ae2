import pytest
import torch

from common.errors import ConfigError
from common.model.device import device_of

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def test_the_host_is_always_there() -> None:
    assert device_of("attention.device", "cpu") == torch.device("cpu")


@needs_no_cuda
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_refused_by_key_value_and_rule(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        device_of("attention.device", name)
    assert str(refused.value) == (
        f"attention.device = '{name}': needs CUDA, which torch does not find on this machine"
    )


def test_a_word_that_is_no_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention\.device = 'gpu': must be cpu, cuda or cuda:N"):
        device_of("attention.device", "gpu")
