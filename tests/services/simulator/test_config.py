"""What is impossible of a cluster is refused by key, value and rule."""

from typing import Any

import pytest

from common.errors import ConfigError
from tests.services.simulator.meshes import PERFORMANCE, SHAPE, mesh, pool


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, 9.0, float("nan"), float("inf")])
def test_a_device_has_no_more_memory_than_all_of_its_own(share: float) -> None:
    with pytest.raises(ConfigError, match="must be over 0 and at most 1") as caught:
        mesh(pool("mixed"), cluster={"memory_share": share})
    assert caught.value.key == "cluster.memory_share"
    assert str(caught.value.value) == str(share)
    assert mesh(pool("mixed"), cluster={"memory_share": 1.0}).cluster.memory_share == 1.0


@pytest.mark.parametrize(
    ("sizes", "key", "rule"),
    [
        *(
            ({field: size}, field, "must be at least 1")
            for field in sorted(SHAPE.keys() - {"name", "lookup_parameters"})
            for size in (0, -4)
        ),
        ({"kv_heads": 3}, "kv_heads", "must divide cluster.shape.heads = 4"),
        ({"lookup_parameters": -1}, "lookup_parameters", "must be 0 or more"),
        ({"lookup_parameters": 1_000_000}, "lookup_parameters", "under cluster.shape.parameters = 1000000"),
    ],
)
def test_a_shape_that_no_model_has_is_refused(sizes: dict[str, Any], key: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        mesh(pool("mixed"), cluster={"shape": SHAPE | sizes})
    assert (caught.value.key, caught.value.value) == (f"cluster.shape.{key}", sizes[key])


def test_a_pool_is_named_whose_passes_would_take_less_than_nothing() -> None:
    with pytest.raises(ConfigError, match="must be 0 or more") as caught:
        mesh(pool("mixed", performance=PERFORMANCE | {"step_s": -0.02}))
    assert (caught.value.key, caught.value.value) == ("pool.mixed.step_s", -0.02)
