"""Lines of the GPU's benchmark: written as they are measured, printed as a table at the end.

Not here: what is measured (`benchmarks/gpu/ops.py`, `benchmarks/gpu/models.py`).
"""

import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.paired import commit


@dataclass
class Result:
    """A line of the table; None where it does not apply."""

    what: str
    shape: str
    ok: bool
    error: float | None = None
    ms: float | None = None
    reference_ms: float | None = None
    gb_s: float | None = None
    note: str = ""
    tt2t_s: float | None = None
    reference_tt2t_s: float | None = None
    peak_gb: float | None = None
    simulated_ms: float | None = None


def collect(found: Iterable[Result], path: Path | None, device: torch.device) -> list[Result]:
    """All results; each is in the file, and on the screen, before the next one is measured."""
    if path is None:
        return [said(result) for result in found]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about: dict[str, Any] = {"device": name, "torch": version("torch"), "commit": commit()}
    about |= {"date": datetime.now(UTC).date().isoformat()}
    for package in ("triton", "transformers"):
        about[package] = version(package)
    results = []
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, [*(field.name for field in fields(Result)), *about])
        writer.writeheader()
        for result in found:
            writer.writerow(vars(result) | about)
            handle.flush()
            results.append(said(result))
    return results


def said(result: Result) -> Result:
    """The result, with a line on standard error: what runs for minutes says where it is."""
    numbers = "" if result.ms is None else f" {result.ms:.3g} ms"
    numbers += "" if result.reference_ms is None else f" (reference {result.reference_ms:.3g})"
    numbers += "" if result.error is None else f" error {result.error:.1g}"
    wrong = "" if result.ok else " WRONG"
    print(f"{result.what}, {result.shape}:{wrong}{numbers} {result.note}".rstrip(" :"), file=sys.stderr)
    return result


def show(results: Sequence[Result]) -> None:
    copy = next((result.gb_s for result in results if result.what == "copy, device"), None)
    view = Table(box=None, pad_edge=False)
    for name in ("what", "shape"):
        view.add_column(name)
    columns = "parity,error,ms,reference ms,simulated,TT2T s,reference s,GB,GB/s,of copy"
    for name in columns.split(","):
        view.add_column(name, justify="right")
    view.add_column("")
    for found in results:
        numbers = [
            "-" if x is None else f"{x:.3g}"
            for x in (
                *(found.error, found.ms, found.reference_ms, found.simulated_ms, found.tt2t_s, found.reference_tt2t_s),
                *(found.peak_gb, found.gb_s),
            )
        ]
        share = f"{found.gb_s / copy:.0%}" if found.gb_s and copy else "-"
        parity = "-" if found.error is None else "ok" if found.ok else "WRONG"
        view.add_row(found.what, found.shape, parity, *numbers, share, found.note)
    console = Console()
    console.width = max(console.width, 200)
    console.print(view)
