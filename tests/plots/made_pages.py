"""Made-up answers for the tests of pages, as the files beside pages have them."""

from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.plots.pages.asked import FULL, HIDDEN, SHOWN, page
from kvbench.plots.pages.columns import Task, tasks
from kvbench.plots.pages.read import KEPT, keep, typed
from kvbench.plots.pages.write import write

Frame = Any
DOCS = Path(__file__).resolve().parents[2] / "docs"
N = 24
LEVELS = {  # of the right answers, with the question shown and hidden
    FULL: (0.9, 0.9), "pqcache": (0.9, 0.8), "snapkv": (0.7, 0.1), "kvzip": (0.8, 0.8), "kivi": (0.8, 0.8),
}  # fmt: skip
LABELS = {
    (SHOWN, "kvzip"): "KVzip, whole prompt", (HIDDEN, "kvzip"): "KVzip",
    **dict.fromkeys(((SHOWN, "kivi"), (HIDDEN, "kivi")), "KIVI 2 bit"),
    **dict.fromkeys(((SHOWN, "quest"), (HIDDEN, "quest")), "Quest (matched)"),
}  # fmt: skip


def frame_of(rows: list[dict[str, Any]]) -> Frame:
    """Rows as texts; what they do not say is as in most files."""
    plain = {"column": "", "model": "m", "protocol": SHOWN, "asked": "", "method_label": ""}
    made = [plain | {"sample": row["id"]} | row for row in rows]
    return pd.DataFrame([{key: f"{value}" for key, value in row.items()} for row in made], dtype=str)


def answers(
    levels: dict[str, tuple[float, float]] = LEVELS, n: int = N, key: str = "docs", labels: Any = None
) -> Frame:
    """A sample is answered by all methods whose level is above its difficulty, which grows evenly."""
    found = []
    for method, each in levels.items():
        for protocol, level in zip((SHOWN, HIDDEN), each, strict=True):
            for asked, held in (("", 1.0),) if method == FULL else (("memory 0.25", 0.25), ("memory 1/8", 0.125)):
                place = {"set": key, "protocol": protocol, "asked": asked, "method": method}
                place["method_label"] = (labels or {}).get((protocol, method), "")
                costs = {"bytes_resident_device": 1000 * held, "generated_tokens": 5, "cut_off": 0}
                found += [place | costs | {"id": f"{i}", "score": float(i / n < level)} for i in range(n)]
    return frame_of(found)


def labelled() -> Frame:
    """As runs label them: KVzip reads the question, or does not."""
    levels = {FULL: (0.9, 0.9), "pqcache": (0.9, 0.8), "kvzip": (0.9, 0.8), "kivi": (0.2, 0.2), "quest": (0.2, 0.2)}
    return answers(levels, labels=LABELS)


def losses(levels: dict[str, Any], key: str = "mrcr", column: str = "1needle") -> Frame:
    """Losses of the cited tasks: by method a list, and what its runs call it."""
    found = []
    for method, (values, label) in levels.items():
        place = {"set": key, "column": column, "method": method, "method_label": label}
        place["asked"] = "" if method == FULL else "ratio 0.25"
        found += [place | {"id": f"{i}", "measures.piece_nll": value} for i, value in enumerate(values)]
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


def written(folder: Path, frame: Frame, name: str = "results", page_name: str = "") -> str:
    """The page of some answers alone."""
    keep(folder / name / KEPT, frame)
    (path, *_) = write([page_name or name], folder, None)
    return path.read_text(encoding="utf-8")
