"""All comparisons, by id, in the order of the papers."""

import re

from common.errors import ConfigError
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

SEVERAL_FIGURES = re.compile(r"(.+-fig)(\d+)-(\d+)")

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


def rows_of(name: str) -> list[Row]:
    """One by its id, or those of a paper's figures from one to another (``tetriinfer-fig11-15``). Raises
    ConfigError."""
    if name in ROWS:
        return [ROWS[name]]
    several = SEVERAL_FIGURES.fullmatch(name)
    if several is not None:
        paper, first, last = several[1], int(several[2]), int(several[3])
        found = [ROWS[each] for each in ROWS if _is_figure(each, paper, first, last)]
        if found:
            return found
    raise ConfigError("ID", name, f"must be one of {', '.join(ROWS)}, or figures of one paper as in fig11-15")


def _is_figure(row_id: str, paper: str, first: int, last: int) -> bool:
    number = row_id.removeprefix(paper)
    return row_id.startswith(paper) and number.isdecimal() and first <= int(number) <= last
