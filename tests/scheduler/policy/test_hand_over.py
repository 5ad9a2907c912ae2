"""From how many tokens on a prompt's KV is handed over layer by layer (Splitwise 4.4)."""

import pytest

from scheduler.policy.hand_over import layerwise_threshold


@pytest.mark.parametrize(
    ("seconds", "threshold"),
    [
        ({64: (1.0, 1.2), 512: (2.0, 1.8), 1024: (4.0, 3.0)}, 512),
        ({64: (1.0, 0.9), 512: (2.0, 1.8)}, 64),
        ({64: (1.0, 1.1), 512: (2.0, 2.1)}, None),
        # Where it makes no difference, in one piece.
        ({64: (1.0, 1.0), 512: (2.0, 2.0)}, None),
        # A lucky measurement of a short prompt does not outweigh two others.
        ({64: (1.0, 0.98), 128: (1.0, 1.1), 256: (1.0, 1.1), 512: (2.0, 1.5)}, 512),
        # Nor an unlucky one of a long prompt.
        ({64: (1.0, 1.2), 256: (1.0, 0.8), 512: (2.0, 2.02), 1024: (4.0, 3.5)}, 256),
    ],
)
def test_the_threshold_is_what_costs_all_lengths_least(
    seconds: dict[int, tuple[float, float]], threshold: int | None
) -> None:
    assert layerwise_threshold(seconds) == threshold


def test_without_a_measurement_there_is_none() -> None:
    with pytest.raises(ValueError, match="no hand-over"):
        layerwise_threshold({})
