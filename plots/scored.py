"""The answers of a variant as one place of a table or figure, and how places compare.

    Scored    mean, interval and n of some answers; the difference to another's on the same prompts
    places    the places of a frame's rows (`kvbench.results.frame`), by the columns that tell them apart
    compared  every place against its reference, with the p-values that count
    best      the marks of those that are best, or tied, within a column

Draws and turns of one prompt are no samples of their own: they count as one, with their mean. Of several datasets each
counts alike. All tables, the report and the pages of results stand on these.

Not here: the statistics (`plots/stats.py`), words (`results/sheet.py`).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from math import fsum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from numpy import argsort, diff, flatnonzero, isnan, nan, split

from kvbench.plots.read import over_budget, prompt, score
from kvbench.plots.stats import Corrected, Paired, corrected, macro_interval, paired_over_datasets, standings
from kvbench.results import METRICS, SampleRow
from kvbench.results.intervals import Bounds, Interval, few_samples, hits
from kvbench.results.summary import combined_of, interval_of

if TYPE_CHECKING:
    from pandas import DataFrame

Name = TypeVar("Name", bound=Hashable)


class Answer(NamedTuple):
    """A value of one line."""

    value: float
    prompt: str  # by which it is paired with other variants' answers
    sample: str  # whose turns and draws are not independent
    dataset: str = ""
    weight: int = 1


def metric_of(rows: Sequence[SampleRow]) -> str:
    """The name of what these samples' scores are."""
    return next((str(row.fields["metric"]) for row in rows if "metric" in row.fields), "score")


@dataclass(frozen=True)
class Scored:
    """Some answers, and what is looked at of each."""

    answers: Sequence[Answer]
    metric: str = "score"
    n_oom: int = 0
    over: bool = False  # whether any ledger exceeded its budget
    limits: Bounds | None = None  # of values that are no scores; None: the metric's
    by_sample: bool = False  # turns of one sample count as one with their mean, and all datasets as one
    is_score: bool = True

    @classmethod
    def of(
        cls,
        rows: Sequence[SampleRow],
        of: Callable[[SampleRow], float | None] = score,
        limits: Bounds | None = None,
        by_sample: bool = False,
    ) -> "Scored":
        """The lines of a run, or some of them."""
        metric = metric_of(rows)
        weight = METRICS[metric].weight
        answers = [
            Answer(
                value, prompt(row), row.sample_id, str(row.fields.get("dataset", "")),
                int(row.fields[weight]) if weight and row.score is not None else 1,
            )
            for row in rows
            if (value := of(row)) is not None
        ]  # fmt: skip
        n_oom = len({row.sample_id for row in rows if row.score is None})
        return cls(answers, metric, n_oom, over_budget(rows), limits, by_sample, of is score)

    @property
    def bounds(self) -> Bounds:
        return METRICS[self.metric].bounds if self.limits is None else self.limits

    @cached_property
    def values(self) -> dict[str, dict[str, float]]:
        """Values by dataset and prompt."""
        groups: dict[str, dict[str, list[float]]] = {}
        for one in self.answers:
            dataset, name = ("", one.sample) if self.by_sample else (one.dataset, one.prompt)
            groups.setdefault(dataset, {}).setdefault(name, []).append(one.value)
        return {dataset: {name: fsum(each) / len(each) for name, each in of.items()} for dataset, of in groups.items()}

    @property
    def samples(self) -> dict[tuple[str, str], float]:
        return {(dataset, prompt): value for dataset, of in self.values.items() for prompt, value in of.items()}

    @property
    def n(self) -> int:
        return sum(map(len, self.values.values()))

    @cached_property
    def mean(self) -> float | None:
        """The mean as in result.json; of several datasets the mean of theirs."""
        if self.is_of_result:
            return combined_of([(one.value, one.weight) for one in self.answers], self.metric)
        parts = [fsum(values.values()) / len(values) for values in self.values.values()]
        return fsum(parts) / len(parts) if parts else None

    @cached_property
    def interval(self) -> Interval | None:
        """95 %; of several datasets each is a sample."""
        if self.is_of_result:
            samples: dict[str, list[tuple[float, int]]] = {}
            for one in self.answers:
                samples.setdefault(one.sample, []).append((one.value, one.weight))
            ends, mean = interval_of([*samples.values()], self.metric), self.mean
            return None if ends is None or mean is None else Interval(mean, *ends)
        groups = [[*values.values()] for values in self.values.values()]
        return macro_interval(groups, bounds=self.bounds) if groups else None

    @property
    def few(self) -> str:
        """Why readers get no interval of its mean; "" where what that is of is enough."""
        return few_samples(len(self.values) if len(self.values) > 1 and not self.is_of_result else self.n)

    @property
    def hits(self) -> str:
        """The words for a mean of few samples that are all right or wrong; "" of others."""
        is_share = self.is_score and len(self.values) == 1 and METRICS[self.metric].is_share
        return hits([*self.samples.values()]) if is_share else ""

    @property
    def is_of_result(self) -> bool:
        """Whether result.json has the same mean: of one dataset, or of losses, which are weighted."""
        return self.is_score and (len(self.values) < 2 or METRICS[self.metric].weight is not None)

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


def joined(places: Iterable[Scored]) -> Scored:
    """The answers of several places of one variant as one place."""
    every = [*places]
    return Scored(
        [one for place in every for one in place.answers], every[0].metric, sum(place.n_oom for place in every),
        any(place.over for place in every),
    )  # fmt: skip


def places(
    samples: "DataFrame", by: Sequence[str], value: str = "score", limits: Bounds | None = None
) -> dict[tuple[Any, ...], Scored]:
    """The rows of a frame by the values of some columns; a place has the rows that agree in all of them.

    What is missing in a column is "". `value` names what is looked at; `limits` say what it can be, where it is no
    score.
    """

    def column(name: str) -> Any:
        return samples[name].to_numpy(object) if name in samples else None

    prompts, names, datasets, metrics = map(column, ("prompt", "sample", "dataset", "metric"))
    values = samples[value].to_numpy(float, na_value=nan)
    without = samples["score"].isna().to_numpy() if "score" in samples else None
    over = samples["within_budget"].eq(False).to_numpy(bool, na_value=False) if "within_budget" in samples else None
    found: dict[tuple[Any, ...], Scored] = {}
    for name, at in groups_of(samples, by):
        metric = "score" if metrics is None else next((one for one in metrics[at] if isinstance(one, str)), "score")
        weight = METRICS[metric].weight if value == "score" else None
        kept = at[~isnan(values[at])]
        weights = samples[weight].to_numpy()[kept].astype(int).tolist() if weight else repeat(1)
        groups = repeat("") if datasets is None else map(str, datasets[kept])
        each = zip(values[kept].tolist(), map(str, prompts[kept]), map(str, names[kept]), groups, weights, strict=False)
        n_oom = 0 if without is None else len({*names[at[without[at]]]})
        is_over = over is not None and bool(over[at].any())
        found[name] = Scored([Answer(*one) for one in each], metric, n_oom, is_over, limits, is_score=value == "score")
    return found


def groups_of(samples: "DataFrame", by: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values of some columns, "" for what is missing, and the positions of the rows that have them."""
    from pandas import isna

    keys = [samples[name].to_numpy(object) for name in by]
    numbers = samples.groupby([*by], sort=False, observed=True, dropna=False).ngroup().to_numpy()
    order = argsort(numbers, kind="stable")
    for at in split(order, flatnonzero(diff(numbers[order])) + 1) if len(order) else ():
        yield tuple("" if isna(key[at[0]]) else key[at[0]] for key in keys), at


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
        if few_samples(max(place.n for place in members.values())):  # which a table says of its cells
            continue
        found = standings(scores, kinds.pop(), family=max(map(family, members)))
        marks |= {name: found.marked(i) for i, name in ids.items()}
        why |= {found.why: None} if found.why else {}
    return marks, list(why)
