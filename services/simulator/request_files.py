"""Every request's record as a file, for whoever computes more of it than ``services.simulator.metrics``.

A row is a request of one configuration. What never came to be is empty, as the first token of one that was
rejected. Parquet needs pyarrow (the extra ``parquet``).
"""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError
from common.latency import RequestLatency
from services.simulator.cluster import Cluster
from services.simulator.metrics import DONE, latency_of
from services.simulator.records import FLOATS, NOBODY, OUTCOMES, Records

COUNTS = ("prompt_tokens", "output_tokens", "drawn_tokens", "attempts")
LATENCIES = ("ttft_s", "tpot_s", "end_to_end_s")
TEXTS = ("configuration", "outcome", "error", "prefill_instance", "decode_instance")
Column = Sequence[float | int | str | None]


class RequestTable(NamedTuple):
    """``columns``: by name, each of as many values as there are requests."""

    columns: dict[str, Column]

    @property
    def rows(self) -> Iterator[tuple[float | int | str | None, ...]]:
        return zip(*self.columns.values(), strict=True)


def request_table(configuration: str, cluster: Cluster) -> RequestTable:
    """Of a run that is over."""
    records, names = cluster.records, cluster.network.names
    latencies = list(_latencies(records))
    columns: dict[str, Column] = {
        "configuration": [configuration] * len(records),
        "request": range(len(records)),
        "outcome": [OUTCOMES[each] for each in records.outcome],
        "error": [records.errors.get(each) for each in range(len(records))],
        "prefill_instance": [None if each == NOBODY else names[each] for each in records.prefill],
        "decode_instance": [None if each == NOBODY else names[each] for each in records.decode],
    }
    for name in COUNTS:
        columns[name] = getattr(records, name)
    for name in FLOATS:
        columns[name] = [None if math.isnan(each) else each for each in getattr(records, name)]
    # Before a prompt has been computed nothing is known of its queue.
    columns["queue_s"] = [
        None if math.isnan(first_s) else queue_s
        for queue_s, first_s in zip(records.queue_s, records.first_token_s, strict=True)
    ]
    for name in LATENCIES:
        columns[name] = [None if each is None else getattr(each, name) for each in latencies]
    return RequestTable(columns)


def _latencies(records: Records) -> Iterator[RequestLatency | None]:
    for number in range(len(records)):
        yield latency_of(records, number) if records.outcome[number] == DONE else None


def csv_of(tables: Sequence[RequestTable]) -> bytes:
    """Numbers as they are: read back, they are the same to the last digit."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(tables[0].columns)
    for table in tables:
        writer.writerows(table.rows)
    return file.getvalue().encode()


def check_parquet(path: Path) -> None:
    """Raises ConfigError where no Parquet can be written."""
    if find_spec("pyarrow") is None:
        rule = "needs pyarrow: install lamella's extra `parquet`, or write --csv"
        raise ConfigError("--parquet", str(path), rule)


def parquet_of(tables: Sequence[RequestTable]) -> bytes:
    """After ``check_parquet``."""
    import pyarrow
    from pyarrow import parquet

    def kind_of(name: str) -> str:
        if name in TEXTS:
            return "string"
        return "double" if name in (*FLOATS, *LATENCIES) else "int64"

    kinds = [(name, pyarrow.type_for_alias(kind_of(name))) for name in tables[0].columns]
    schema = pyarrow.schema(kinds)
    file = io.BytesIO()
    with parquet.ParquetWriter(file, schema) as writer:
        for table in tables:
            writer.write_table(pyarrow.table(table.columns, schema=schema))
    return file.getvalue()
