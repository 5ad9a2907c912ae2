"""What of a sequence's KV is sent next, whatever is there and however much is asked for."""

from hypothesis import given
from hypothesis import strategies as st

from prefill.handover import ComputedKV, KVCursor
from tests.prefill.states import EVERYTHING


@given(st.data())
def test_everything_is_taken_once_and_nothing_before_it_is_there(data: st.DataObject) -> None:
    layers, token_layer_bytes = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    cursor = KVCursor(layers, token_layer_bytes)
    taken: list[tuple[int, int]] = []
    computed = 0
    for chunk in data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)):
        reports = sorted(data.draw(st.sets(st.integers(1, layers))))
        for there in [*(ComputedKV(computed, chunk, each) for each in reports), ComputedKV(computed + chunk)]:
            for max_bytes in data.draw(
                st.lists(st.one_of(st.just(EVERYTHING), st.integers(1, 40)), max_size=3)
            ):
                spans = cursor.take(there, max_bytes)
                parts = [(layer, at) for span in spans for layer in span.layers for at in span.positions]
                assert len(parts) <= max(1, max_bytes // token_layer_bytes)
                for layer, at in parts:
                    in_chunk = at < there.tokens + there.chunk_tokens and layer < there.chunk_layers
                    assert at < there.tokens or in_chunk
                taken += parts
                if max_bytes == EVERYTHING:
                    assert cursor.take(there, EVERYTHING) == ()
        computed += chunk
    taken += [
        (layer, at)
        for span in cursor.take(ComputedKV(computed), EVERYTHING)
        for layer in span.layers
        for at in span.positions
    ]
    assert cursor.is_at(computed)
    assert len(taken) == len({*taken})
    assert {*taken} == {(layer, at) for layer in range(layers) for at in range(computed)}
