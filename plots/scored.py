"""The samples of a variant as one place of a table or figure sees them, and how places compare.

    Scored    mean, interval and n of some samples; the difference to another's on the same prompts
    compared  every place against its reference, with the p-values that count
    best      the marks of those that are best, or tied, within a column

Draws and turns of one prompt are no samples of their own: they count as one, with their mean. Of several datasets each
counts alike. All tables, the report and the pages of results stand on these three.

Not here: the statistics (`plots/stats.py`), words (`results/sheet.py`).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import TypeVar

from kvbench.plots.read import over_budget, per_prompt, score
from kvbench.plots.stats import Corrected, Paired, corrected, macro_interval, paired_over_datasets, standings
from kvbench.results import METRICS, SampleRow, combined, combined_ci95
from kvbench.results.intervals import Bounds, Interval

Name = TypeVar("Name", bound=Hashable)


def sample(row: SampleRow) -> str:
    return row.sample_id


def metric_of(rows: Sequence[SampleRow]) -> str:
    """The name of what these samples' scores are."""
    return next((str(row.fields["metric"]) for row in rows if "metric" in row.fields), "score")


@dataclass(frozen=True)
class Scored:
    """Some samples, and what is looked at of each."""

    rows: Sequence[SampleRow]
    of: Callable[[SampleRow], float | None] = score
    limits: Bounds | None = None  # of what `of` says; None: the metric's
    by_sample: bool = False  # turns of one sample count as one with their mean, and all datasets as one

    @property
    def metric(self) -> str:
        return metric_of(self.rows)

    @property
    def bounds(self) -> Bounds:
        return METRICS[self.metric].bounds if self.limits is None else self.limits

    @cached_property
    def values(self) -> dict[str, dict[str, float]]:
        """Values by dataset and prompt, of samples that were answered."""
        groups: dict[str, list[SampleRow]] = {}
        for row in self.rows:
            groups.setdefault("" if self.by_sample else str(row.fields.get("dataset", "")), []).append(row)
        more = {"key": sample} if self.by_sample else {}
        found = {dataset: per_prompt(rows, self.of, **more) for dataset, rows in groups.items()}
        return {dataset: values for dataset, values in found.items() if values}

    @property
    def samples(self) -> dict[tuple[str, str], float]:
        return {(dataset, prompt): value for dataset, of in self.values.items() for prompt, value in of.items()}

    @property
    def n(self) -> int:
        return sum(map(len, self.values.values()))

    @property
    def n_oom(self) -> int:
        return len({row.sample_id for row in self.rows if row.score is None})

    @property
    def over(self) -> bool:
        return over_budget(self.rows)

    @cached_property
    def mean(self) -> float | None:
        """The mean as in result.json; of several datasets the mean of theirs."""
        if self.is_of_result:
            return combined(self.rows, self.metric)
        parts = [fsum(values.values()) / len(values) for values in self.values.values()]
        return fsum(parts) / len(parts) if parts else None

    @cached_property
    def interval(self) -> Interval | None:
        """95 %; of several datasets each is a sample."""
        if self.is_of_result:
            ends, mean = combined_ci95(self.rows, self.metric), self.mean
            return None if ends is None or mean is None else Interval(mean, *ends)
        groups = [[*values.values()] for values in self.values.values()]
        return macro_interval(groups, bounds=self.bounds) if groups else None

    @property
    def is_of_result(self) -> bool:
        """Whether result.json has the same mean: of one dataset, or of losses, which are weighted."""
        return self.of is score and (len(self.values) < 2 or METRICS[self.metric].weight is not None)

    def against(self, other: "Scored") -> Paired | None:
        """The comparison on the prompts that both answered; None where a dataset has none of them."""
        whole = {prompt: value for values in other.values.values() for prompt, value in values.items()}
        pairs = [
            [(value, whole[prompt]) for prompt, value in values.items() if prompt in whole]
            for values in self.values.values()
        ]
        if not pairs or not all(pairs):
            return None
        ours, theirs = ([[pair[side] for pair in part] for part in pairs] for side in (0, 1))
        return paired_over_datasets(ours, theirs, bounds=self.bounds)


def compared(
    places: Mapping[Name, Scored],
    reference: Callable[[Name], Scored | None],
    family: Callable[[Name], Hashable] = lambda name: None,
) -> dict[Name, Corrected]:
    """The places that have a reference other than themselves; p-values are corrected within each family."""
    pairs: dict[Name, Paired] = {}
    for name, place in places.items():
        other = reference(name)
        if other is not None and other is not place and (found := place.against(other)) is not None:
            pairs[name] = found
    return corrected(pairs, family)


def best(
    places: Mapping[Name, Scored], column: Callable[[Name], Hashable], family: Callable[[Name], int]
) -> tuple[dict[Name, str], list[str]]:
    """ "bold" or "tie" for those that are best, or may be, of a column; and why columns have none, in words.

    `places` are those that may win: bounded by a budget, and within it. `family` is how many variants were asked the
    same samples.
    """
    columns: dict[Hashable, dict[Name, Scored]] = {}
    for name, place in places.items():
        if place.n:
            columns.setdefault(column(name), {})[name] = place
    marks, why = dict[Name, str](), dict[str, None]()
    for members in columns.values():
        kinds = {METRICS[place.metric].better for place in members.values()}
        if len(members) < 2 or len(kinds) > 1:
            continue
        ids = {str(i): name for i, name in enumerate(members)}
        scores = {i: members[name].samples for i, name in ids.items()}
        found = standings(scores, kinds.pop(), family=max(map(family, members)))
        marks |= {name: found.marked(i) for i, name in ids.items()}
        why |= {found.why: None} if found.why else {}
    return marks, list(why)
