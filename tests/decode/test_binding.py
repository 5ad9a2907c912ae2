import pytest

from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.spec import AttentionSpec
from decode.attention_needs import AttentionNeeds


def needs_of(workers: int, partition: str = "heads") -> AttentionNeeds:
    return AttentionNeeds(
        heads=12,
        layout=KVLayout(layers=2, kv_heads=4, head_dim=8, block_size=16, element_bytes=4),
        attention_specs=(AttentionSpec(12, 4, 8, 0.5), AttentionSpec(12, 4, 8, 0.5, window=7)),
        element_type="float32",
        context_length=100,
        max_batch=8,
        workers=workers,
        partition=partition,  # type: ignore[arg-type]
        mini_batches=1,
        lanes=1,
    )


@pytest.mark.parametrize(("workers", "heads", "kv_heads"), [(1, 12, 4), (2, 6, 2), (4, 3, 1)])
def test_each_worker_gets_its_share_of_the_heads(workers: int, heads: int, kv_heads: int) -> None:
    needs = needs_of(workers)
    needs.check()
    shares = [needs.share(index) for index in range(needs.pool_workers)]
    assert [head for share in shares for head in share.heads] == list(range(12))
    assert [head for share in shares for head in share.kv_heads] == list(range(4))
    share = shares[-1]
    assert (share.layout.kv_heads, share.shape.heads, share.shape.kv_heads) == (kv_heads, heads, kv_heads)
    assert [(spec.heads, spec.kv_heads, spec.window) for spec in share.attention_specs] == [
        (heads, kv_heads, None),
        (heads, kv_heads, 7),
    ]
    assert share.shape.max_tokens == 8
    assert share.shape.plan_words == 2 + 8 * (4 + 7)


def test_request_level_pools_are_of_one_worker_with_every_head() -> None:
    needs = needs_of(3, "requests")
    needs.check()
    assert needs.pool_workers == 1
    assert needs.share(0).kv_heads == range(4)


def test_heads_that_do_not_divide_are_refused_with_what_would() -> None:
    with pytest.raises(
        ConfigError,
        match=r"attention_workers = 3: must divide the model's 4 KV heads \(1, 2, 4\), or .*requests",
    ):
        needs_of(3).check()
