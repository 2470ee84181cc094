"""Lines of the GPU's benchmark: written as they are measured, printed as a table at the end.

Not here: what is measured (`benchmarks/gpu/ops.py`, `benchmarks/gpu/models.py`).
"""

import csv
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvbench.benchmarks.paired import commit
from kvbench.results import sheet
from kvbench.results.sheet import Sheet

TEXTS = {"what", "shape", "ok", "note"}  # of a result; all else are numbers


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
    ttft_s: float | None = None
    step_gb: float | None = None  # that a step reads on the device
    host_gb: float | None = None  # that it moves over the link


def collect(found: Iterable[Result], path: Path | None, device: torch.device) -> list[Result]:
    """All results; each is in the file, and on the screen, before the next one is measured.

    The file keeps what other parts measured before, by whichever command.
    """
    if path is None:
        return [said(result) for result in found]
    about: dict[str, Any] = {"device": device_name(device), "driver": driver_version(), "commit": commit()}
    about |= {"date": datetime.now(UTC).date().isoformat()}
    about |= {package: version(package) for package in ("torch", "triton", "transformers")}
    results, lines = [], list[dict[str, Any]]()
    if path.is_file():
        with path.open(newline="") as handle:
            lines = [*csv.DictReader(handle)]
    for result in found:
        lines = [line for line in lines if (line["what"], line["shape"]) != (result.what, result.shape)]
        lines.append(vars(result) | about)
        with path.open("w", newline="") as handle:
            writer = csv.DictWriter(handle, [*(field.name for field in fields(Result)), *about], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(lines)
        results.append(said(result))
    return results


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def driver_version() -> str:
    """As nvidia-smi says it; nothing where it is not there."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(said.split()), "")


def recorded(path: Path, device: torch.device) -> list[Result]:
    """What the file has of this device, whichever command measured it."""
    with path.open(newline="") as handle:
        lines = [line for line in csv.DictReader(handle) if line["device"] == device_name(device)]
    found = []
    for line in lines:
        known: dict[str, Any] = {field.name: line.get(field.name) for field in fields(Result)}
        for name in known.keys() - TEXTS:
            known[name] = float(known[name]) if known.get(name) else None
        found.append(Result(**known | {"ok": known["ok"] == "True"}))
    return found


def said(result: Result) -> Result:
    """The result, with a line on standard error: what runs for minutes says where it is."""
    numbers = "" if result.ms is None else f" {result.ms:.3g} ms"
    numbers += "" if result.reference_ms is None else f" (reference {result.reference_ms:.3g})"
    numbers += "" if result.error is None else f" error {result.error:.1g}"
    wrong = "" if result.ok else " WRONG"
    print(f"{result.what}, {result.shape}:{wrong}{numbers} {result.note}".rstrip(" :"), file=sys.stderr)
    return result


HEADS = (
    "what", "shape", "parity", "error", "ms", "reference ms", "simulated", "TTFT s", "TT2T s", "reference s", "GB",
    "GB a step", "GB moved", "GB/s",
)  # fmt: skip


def show(results: Sequence[Result]) -> None:
    """To standard output."""
    copy = next((result.gb_s for result in results if result.what == "copy, device"), None)
    rows = [
        [found.what, found.shape, "-" if found.error is None else "ok" if found.ok else "WRONG"]
        + [
            "-" if x is None else f"{x:.3g}"
            for x in (
                *(found.error, found.ms, found.reference_ms, found.simulated_ms, found.ttft_s, found.tt2t_s),
                *(found.reference_tt2t_s, found.peak_gb, found.step_gb, found.host_gb, found.gb_s),
            )
        ]
        + [f"{found.gb_s / copy:.0%}" if found.gb_s and copy else "-", found.note]
        for found in results
    ]
    sheet.show(Sheet([*HEADS, "of copy", "note"], rows, n_keys=2))
