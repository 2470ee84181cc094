"""Made-up answers for the tests of pages, as the files beside pages have them."""

from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.plots.pages.asked import FLOOR, FULL, HIDDEN, SHOWN, page
from kvbench.plots.pages.columns import Task, tasks
from kvbench.plots.pages.read import KEPT, keep, typed
from kvbench.plots.pages.write import write

Frame = Any
DOCS = Path(__file__).resolve().parents[2] / "docs"
N = 40  # as many as the set asks
LEVELS = {  # of the right answers, with the question shown and hidden
    FULL: (0.9, 0.9), "pqcache": (0.9, 0.8), "snapkv": (0.7, 0.1), "kvzip": (0.8, 0.8), "kivi": (0.8, 0.8),
    FLOOR: (0.1, 0.1),
}  # fmt: skip


def frame_of(rows: list[dict[str, Any]]) -> Frame:
    """Rows as texts; what they do not say is as in most files."""
    plain = {"model": "m", "protocol": SHOWN, "asked": "", "method_label": ""}
    made = [plain | {"sample": row["id"]} | row for row in rows]
    return pd.DataFrame([{key: f"{value}" for key, value in row.items()} for row in made], dtype=str)


def answers(levels: dict[str, tuple[float, float]] = LEVELS, n: int = N, key: str = "budgets") -> Frame:
    """A sample is answered by all methods whose level is above its difficulty, which grows evenly."""
    found = []
    for method, each in levels.items():
        for protocol, level in zip((SHOWN, HIDDEN), each, strict=True):
            for asked, held in (("", 1.0),) if method == FULL else (("memory 0.25", 0.25), ("memory 1/8", 0.125)):
                place = {"set": key, "protocol": protocol, "asked": asked, "method": method}
                costs = {"bytes_resident_device": 1000 * held, "generated_tokens": 5, "cut_off": 0}
                found += [place | costs | {"id": f"{i}", "score": float(i / n < level)} for i in range(n)]
    return frame_of(found)


def at(frame: Frame, **wanted: Any) -> Any:
    """Which rows have these values."""
    found = frame["set"] == frame["set"]
    for key, value in wanted.items():
        found &= frame[key] == value
    return found


def changed(frame: Frame, where: Any, **values: Any) -> Frame:
    """The frame with other values in some rows."""
    frame = frame.copy()
    for key, value in values.items():
        frame.loc[where, key] = str(value)
    return frame


def tasks_of(frame: Frame, name: str = "results") -> tuple[Task, ...]:
    return tasks(page(name), typed(frame))


def task_of(frame: Frame, name: str = "results") -> Task:
    (found,) = tasks_of(frame, name)
    return found


def written(folder: Path, frame: Frame, name: str = "results") -> str:
    """The page of some answers alone."""
    keep(folder / name / KEPT, frame)
    (path, *_) = write([name], folder, None)
    return path.read_text(encoding="utf-8")
