"""What the real model's engine asks of the machine."""

import pytest
import torch

from common.config import InstanceConfig
from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.kv.pool import allocate_pool
from services.hosts.model_engine import memory_asked_by

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=1, block_size=1, element_bytes=2)
ABSURD = InstanceConfig(kv_bytes=10**17, swap_bytes=10**17)


def test_more_memory_than_there_is_is_told_of_by_its_key() -> None:
    """What the refusal of the system, or of torch, left was a traceback."""
    said = rf"instance\.kv_bytes = {10**17}: is more memory than can be had here \(.*annot allocate"
    with pytest.raises(ConfigError, match=said), memory_asked_by("kv_bytes", ABSURD):
        allocate_pool(LAYOUT, ABSURD.kv_bytes // LAYOUT.block_bytes, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ConfigError, match="swap_bytes = "), memory_asked_by("swap_bytes", ABSURD):
        torch.empty(ABSURD.swap_bytes, dtype=torch.uint8)
