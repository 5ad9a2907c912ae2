import pytest

from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.spec import AttentionSpec
from decode.binding import AttentionNeeds

NEEDS = AttentionNeeds(
    heads=12,
    layout=KVLayout(layers=2, kv_heads=4, head_dim=8, block_size=16, element_bytes=4),
    attention_specs=(AttentionSpec(12, 4, 8, 0.5), AttentionSpec(12, 4, 8, 0.5, window=7)),
    element_type="float32",
    context_length=100,
    max_batch=8,
)


@pytest.mark.parametrize(("workers", "heads", "kv_heads"), [(1, 12, 4), (2, 6, 2), (4, 3, 1)])
def test_each_worker_gets_its_share_of_the_heads(workers: int, heads: int, kv_heads: int) -> None:
    layout, shape, specs = NEEDS.share(workers)
    assert (layout.kv_heads, shape.heads, shape.kv_heads) == (kv_heads, heads, kv_heads)
    assert [(spec.heads, spec.kv_heads, spec.window) for spec in specs] == [
        (heads, kv_heads, None),
        (heads, kv_heads, 7),
    ]
    assert shape.max_tokens == 8
    assert shape.plan_words == 1 + 8 * (3 + 7)


def test_heads_that_do_not_divide_are_refused_with_what_would() -> None:
    with pytest.raises(
        ConfigError, match=r"attention_workers = 3: must divide the model's 4 KV heads: 1, 2, 4"
    ):
        NEEDS.share(3)
