from collections.abc import Callable, Iterator

import pytest

from services.reproduce.catalogue import ROWS


@pytest.fixture
def keep_rows() -> Iterator[Callable[..., None]]:
    """Leaves those rows alone in the catalogue until the test ends: then it has all, in their order."""
    whole = dict(ROWS)

    def keep(*ids: str) -> None:
        for row_id in whole:
            if row_id not in ids:
                del ROWS[row_id]

    yield keep
    ROWS.clear()
    ROWS.update(whole)
