"""The runs of a page of results as grids: for each measure a cell per method and ratio, next to full attention.

Full attention counts once, at however many ratios it was run.

Not here: statistics (`plots/stats.py`), the page (`plots/results.py`), its figures (`plots/figures/results.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.plots import looks
from kvbench.plots.read import Run, measured, score
from kvbench.plots.run_sets import Estimate, Line, Point, RunSet, run_sets
from kvbench.plots.scored import Scored
from kvbench.plots.style import SCORE
from kvbench.results import SampleRow

# Times the budget's bytes: generated tokens and what compensates for comm lie below, an index or whole layers above.
MORE = 1.25


def measure(name: str) -> Callable[[SampleRow], float | None]:
    """A measure of one of the task's other figures."""

    def of(row: SampleRow) -> float | None:
        measures = row.fields.get("measures")
        value = measures.get(name) if isinstance(measures, Mapping) else None
        return float(value) if isinstance(value, int | float) else None

    return of


@dataclass(frozen=True)
class Measure:
    """A column of the page's figures and a pair of its tables."""

    title: str
    task: str  # as readers see it
    of: Callable[[SampleRow], float | None] = score
    params: Mapping[str, str] | None = None  # of the task
    ylabel: str = SCORE
    better: str = "higher"
    highest: float = 1  # 0 is the lowest
    against_full: bool = True  # False: full attention is what it measures the distance from

    @property
    def scale(self) -> float:
        """The factor by which tables show it: shares are 0 to 100."""
        return 100 if self.highest == 1 else 1

    def place(self, run: Run) -> Scored:
        return Scored.of(run.rows, self.of, (0, self.highest))

    def has(self, run: Run) -> bool:
        wanted = self.params or {}
        return run.result.shown_task == self.task and all(run.task_param(key) == value for key, value in wanted.items())


def device_bytes(cell: Scored) -> float | None:
    return measured(cell.rows, "bytes_resident_device")


def moved_bytes(cell: Scored) -> float | None:
    """K and V per step, and what was read in order to find them."""
    chosen, found = (measured(cell.rows, f"bytes_{name}_per_step") for name in ("moved_kv", "index_read"))
    return None if chosen is None or found is None else chosen + found


@dataclass(frozen=True)
class Grid:
    """A measure's runs by method and ratio."""

    measure: Measure
    about: str
    full: Scored | None
    cells: Mapping[str, Mapping[float, Scored]]  # by method
    labels: Mapping[str, str]
    runs: Sequence[Run] = ()  # that are in it, full attention's among them

    @property
    def ratios(self) -> list[float]:
        return sorted({ratio for cells in self.cells.values() for ratio in cells})

    @property
    def methods(self) -> list[str]:
        """Methods that retrieve, then those that drop, each in the order of all figures; others of each kind last."""
        known = {name: i for i, name in enumerate(looks.LOOKS)}
        return sorted(self.cells, key=lambda name: (not self.retrieves(name), known.get(name, len(known)), name))

    def retrieves(self, method: str) -> bool:
        """Whether its ledgers have tokens on the host."""
        return any(measured(cell.rows, "bytes_resident_host") for cell in self.cells[method].values())

    def holds_more(self, method: str, ratio: float) -> bool:
        """Whether a variant has more bytes on the device than its share of the full cache; False where not measured."""
        full = None if self.full is None else device_bytes(self.full)
        held = device_bytes(self.cells[method][ratio])
        return full is not None and held is not None and held > MORE * ratio * full

    def lines(self, x: Callable[[float, Scored], float | None], methods: Sequence[str]) -> list[Line]:
        """A line per method; `x` gets ratio and cell."""
        made = []
        for method in methods:
            points: list[Point] = []
            for ratio, cell in sorted(self.cells[method].items()):
                where = x(ratio, cell)
                if where is not None and cell.mean is not None:
                    spread, by = cell.interval, self.measure.scale
                    ends = (None, None) if spread is None else (by * spread.low, by * spread.high)
                    points.append(Point(where, Estimate(by * cell.mean, *ends, cell.n)))
            made.append(Line(method, self.labels[method], 0, points, []))
        return [line for line in made if line.points]


def grid_of(one: Measure, runs: Sequence[Run]) -> Grid | None:
    """The measure's runs; None where none is of a method with a budget, ValueError where they are of several sets."""
    sets = run_sets(runs, lambda run: one.has(run) and (run.is_full or is_by_ratio(run)))
    sets = [found for found in sets if not all(run.is_full for run in found.runs)]  # full attention of other figures
    if not sets:
        return None
    if len(sets) > 1:
        raise ValueError(
            f"{one.title} has runs of {len(sets)} sets ({'; '.join(found.about for found in sets)}); give a folder "
            "with one of them"
        )
    (found,) = sets
    cells: dict[str, dict[float, Scored]] = {}
    labels: dict[str, str] = {}
    for run in found.runs:
        if run.is_full:
            continue
        assert run.result.ratio is not None, run.folder
        at = cells.setdefault(run.method, {})
        if run.result.ratio in at:
            raise ValueError(
                f"{one.title} has several runs of {run.result.method_label} at ratio {run.result.ratio_exact}; give a "
                "folder with one of them"
            )
        at[run.result.ratio] = one.place(run)
        # PyramidInfer's label has a star at small ratios alone, and its line is of all: what warns stays.
        labels[run.method] = max(run.result.method_label, labels.get(run.method, run.result.method_label), key=len)
    if not cells:
        return None
    full = next((one.place(run) for run in found.runs if run.is_full), None)
    return Grid(one, about(found), full, cells, labels, found.runs)


def is_by_ratio(run: Run) -> bool:
    """Whether its budget counts tokens, and not bytes."""
    return run.result.ratio is not None and run.result.memory_exact is None


def about(found: RunSet) -> str:
    """Words on what was run, without the task."""
    comms = sorted({run.comm for run in found.runs if not run.is_full})
    return f"{str(found.where).replace('no comm · ', '')} · comm {', '.join(comms)}"
