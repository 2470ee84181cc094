"""Ledgers: a part per sample while a run goes on, one ledger.parquet when it has finished.

Only these functions import pyarrow, which is slow to import. Whatever a damaged file raises, its rows count as lost.

Not here: what the columns mean (`engine/books/ledger.py`).
"""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.results.files import crc_of, is_file, replacing, temporary
from kvbench.results.schema import RunResult, SampleRow


def pyarrow() -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet: slow to import and without types, hence in one place."""
    return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")


def write_part(path: Path, id: str, columns: Mapping[str, Sequence[float]]) -> None:
    pa, pq = pyarrow()
    n = max((len(column) for column in columns.values()), default=0)
    table = pa.table({"sample_id": pa.array([id] * n, pa.string()), **columns})
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def open_ledger(path: Path) -> tuple[Any, dict[str, int]]:
    """An earlier ledger.parquet and its row group per sample; (None, {}) without a readable one."""
    pa, pq = pyarrow()
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        groups = range(file.num_row_groups)
        ids = [file.read_row_group(i, columns=["sample_id"])["sample_id"] for i in groups]
        of_numbers(pa, file.schema_arrow)
    except (pa.ArrowException, OSError, KeyError, ValueError):
        return None, {}
    return file, {column[0].as_py(): i for i, column in enumerate(ids) if len(column)}


def of_numbers(pa: Any, schema: Any) -> Any:
    """The schema of a ledger; ValueError where it is none."""
    for column in schema:
        kind = column.type
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if column.name != "sample_id" and not (is_number or pa.types.is_null(kind)):
            raise ValueError(f"column {column.name!r} is of type {kind}")
    return schema


def sample_of(path: Path) -> str | None:
    """The sample whose part this is; None where it is no part."""
    pa, pq = pyarrow()
    try:
        ids = pq.read_table(path, columns=["sample_id"], partitioning=None)["sample_id"]
        id = ids[0].as_py() if len(ids) else None
        return id if isinstance(id, str) else None
    except (pa.ArrowException, OSError, KeyError, ValueError):
        return None


def read_part(path: Path) -> Any:
    _, pq = pyarrow()
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        return file.read()


def read_ledger(folder: Path, result: RunResult) -> dict[str, list[Any]]:
    """The columns of a finished run's ledger.parquet; {} where it is lost or damaged."""
    path = folder / "ledger.parquet"
    if ledger_damage(path, result) is not None:
        return {}
    pa, pq = pyarrow()
    try:
        table = pq.read_table(path, partitioning=None, page_checksum_verification=True)
        return table.to_pydict()
    except (pa.ArrowException, OSError, ValueError):  # one that was written without a checksum
        return {}


def ledger_damage(path: Path, result: RunResult) -> str | None:
    """Why the ledger of a finished run cannot be believed, or None; without pyarrow, which is slow to import."""
    if not is_file(path):
        return "lost"
    if result.ledger_crc32 is not None:
        is_whole = result.ledger_crc32 == crc_of(path)
    else:  # of an older run; its footer is what a cut takes away
        with path.open("rb") as file:
            head, n_bytes = file.read(4), file.seek(0, os.SEEK_END)
            file.seek(max(0, n_bytes - 8))
            tail = file.read()
        is_whole = head == tail[4:] == b"PAR1" and int.from_bytes(tail[:4], "little") < n_bytes
    return None if is_whole else "damaged"


def merge(target: Path, rows: Mapping[str, SampleRow], part_of: Callable[[str], Path]) -> tuple[str, int]:
    """ledger.parquet in the order of the lines: a row group per sample, one in memory at once.

    Samples without a part are copied from an earlier ledger.parquet: there is one if
    result.json was lost after the parts were removed. Returns the CRC of what was written, and how many answered
    samples have no rows in it.
    """
    pa, pq = pyarrow()
    readers: dict[str, Callable[[], Any]] = {}
    for id in rows:
        if is_file(part := part_of(id)):
            readers[id] = partial(read_part, part)
    old: Any = None
    groups: dict[str, int] = {}
    if len(readers) < len(rows):
        old, groups = open_ledger(target)
    for id in (rows.keys() & groups.keys()) - readers.keys():
        readers[id] = partial(old.read_row_group, groups[id])
    schemas = [pa.schema([("sample_id", pa.string())])]
    schemas += [] if old is None else [old.schema_arrow]
    for id in [id for id in readers if is_file(part_of(id))]:
        try:
            schemas.append(of_numbers(pa, pq.read_schema(part_of(id))))
        except (pa.ArrowException, OSError, ValueError):
            del readers[id]
    # Columns may be integers in one sample and floats in another, or empty and of no type.
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    lost = 0
    options: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
    with replacing(target) as file:
        with pq.ParquetWriter(file, schema, **options) as new:
            for id, row in rows.items():
                try:
                    table = readers[id]()
                    if set(table["sample_id"].unique().to_pylist()) - {id}:
                        raise ValueError(f"it is not of sample {id!r}")
                    tables = [schema.empty_table(), table]
                    table = pa.concat_tables(tables, promote_options="permissive")
                except (pa.ArrowException, OSError, KeyError, ValueError):
                    lost += row.status == "ok"
                    continue
                new.write_table(table)
        file.flush()
        crc = crc_of(temporary(target))
    if old is not None:
        old.close()
    return crc, lost
