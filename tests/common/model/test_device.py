import pytest
import torch

from common.errors import ConfigError
from common.model.device import accelerator_name, device_of

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def test_the_host_is_always_there() -> None:
    assert device_of("attention.device", "cpu") == torch.device("cpu")
    assert accelerator_name("cpu") is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA")
def test_an_accelerator_is_named_by_its_model() -> None:
    assert accelerator_name("cuda") == torch.cuda.get_device_properties(0).name


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
