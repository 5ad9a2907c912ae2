"""All comparisons, by id, in the order of the papers."""

from services.reproduce import (
    lamina_table3,
    tetriinfer,
)
from services.reproduce.row import Row

ROWS: dict[str, Row] = {
    row.id: row
    for row in (
        lamina_table3.ROW,
        *tetriinfer.ROWS,
    )
}
