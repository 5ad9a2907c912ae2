"""All comparisons, by id, in the order of the papers."""

from services.reproduce import (
    aladdin,
    distserve_fig8,
    distserve_table2,
    lamina_fig10,
    lamina_fig11,
    lamina_table3,
    splitwise_fig12,
    splitwise_fig16,
    splitwise_fig18,
    tetriinfer,
    vidur_fig1a,
)
from services.reproduce.row import Row

ROWS: dict[str, Row] = {
    row.id: row
    for row in (
        lamina_table3.ROW,
        lamina_fig10.ROW,
        lamina_fig11.ROW,
        distserve_table2.ROW,
        distserve_fig8.ROW,
        splitwise_fig12.ROW,
        splitwise_fig16.ROW,
        splitwise_fig18.ROW,
        *tetriinfer.ROWS,
        *aladdin.ROWS,
        vidur_fig1a.ROW,
    )
}
