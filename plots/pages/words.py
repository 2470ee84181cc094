"""Words for numbers and names, which templates put into their sentences and tables.

Not here: sentences (the templates), numbers (`queries.py`).
"""

from collections.abc import Iterable, Mapping, Sequence

from kvbench.plots.pages.asked import SCOPES, At, Comparison, share
from kvbench.plots.pages.columns import Column, Task
from kvbench.plots.pages.methods import fetches, title
from kvbench.plots.pages.queries import OfSkill
from kvbench.plots.scored import Scored
from kvbench.plots.stats import Corrected, Paired, is_bound, p_words
from kvbench.results.intervals import FEW
from kvbench.results.sheet import ABSENT

# --- names ---------------------------------------------------------------------------------------


def label(task: Task, at: At, method: str) -> str:
    """A variant's name for readers, with all that warns of what it is."""
    return task.labels.get((at, method)) or title(method)


def row_name(method: str, tasks: Sequence[Task]) -> str:
    """The name of a row that holds a method's variants in all columns of some tasks.

    The first label, and where another differs: "KVzip, whole prompt (question hidden: KVzip)".
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for task in tasks:
        for column in task.columns:
            if method in column.of:
                words = f"{task.asked.title}, {column.words}" if len(tasks) > 1 else column.words
                found.setdefault(label(task, column.at, method), []).append((column.at.protocol, words))
    return named(found) or title(method)


def named_once(every: Iterable[Task]) -> dict[str, str]:
    """Row names of all methods that are asked by bytes, as the first task has them."""
    found: dict[str, str] = {}
    for task in every:
        if not task.asked.has_tokens:
            found |= {name: row_name(name, [task]) for name in task.methods if name not in found}
    return found


def names_at(every: Iterable[Task], at: At) -> dict[str, str]:
    """Names of the variants at a budget, over all tasks."""
    found: dict[str, dict[str, None]] = {}
    for task in every:
        if (column := task.at(at)) is not None:
            for name in column.of:
                found.setdefault(name, {})[label(task, at, name)] = None
    return {name: " or ".join(each) for name, each in found.items()}


def name_over(method: str, every: Sequence[Task], columns: Iterable[At]) -> str:
    """The name of a row whose cells are of several tasks each."""
    found: dict[str, list[tuple[str, str]]] = {}
    for at in columns:
        if (name := names_at(every, at).get(method)) is not None:
            found.setdefault(name, []).append((at.protocol, f"{SCOPES[at.protocol]}, {share(at.asked)}"))
    return named(found)


def name_of(one: Comparison, side: int, task: Task | None) -> str:
    at, method = one.places[side]
    return title(method) if task is None else label(task, at, method)


def plain_name(task: Task, method: str) -> str:
    """A name without its bits and without that its index is smaller, which has a column of its own."""
    mine = task.rows[task.rows["method"] == method]["method_label"]
    return str(mine.iloc[0]).split(" or ")[0].replace(" (smaller index)", "") or title(method)


def named(columns: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """A row's name, by the labels of its columns, each with its scope and its words."""
    first, *others = columns or [""]
    return f"{first} ({'; '.join(f'{where(columns, name)}: {name}' for name in others)})" if others else first


def where(columns: Mapping[str, Sequence[tuple[str, str]]], label: str) -> str:
    """The scope whose columns all have the label, or those columns."""
    elsewhere = {scope for other in columns if other != label for scope, _ in columns[other]}
    return " and ".join(
        dict.fromkeys(words if scope in elsewhere else SCOPES[scope] for scope, words in columns[label])
    )


def labels(task: Task, column: Column, methods: Iterable[str]) -> str:
    return listed(label(task, column.at, method) for method in methods)


def left_out(task: Task, names: Mapping[str, str]) -> str:
    """Other tasks' methods; those that cut while they answer are no other task's."""
    return "" if task.asked.has_tokens else listed(sorted(names[name] for name in {*names} - {*task.methods}))


def fetching(names: Mapping[str, str]) -> str:
    """Of some methods, by their names, those that fetch."""
    return listed(called for name, called in names.items() if fetches(name))


def with_distances(methods: Iterable[str], names: Mapping[str, str], standing: Mapping[str, OfSkill]) -> str:
    return listed(f"{names[method]} {distance(standing[method].paired)}" for method in methods)


def listed(names: Iterable[str]) -> str:
    """Names one after the other, told apart where one has a comma of its own."""
    names = [*names]
    return ("; " if any("," in name for name in names) else ", ").join(names)


# --- numbers -------------------------------------------------------------------------------------


def percent(place: Scored) -> str:
    return f"{100 * (place.mean or 0.0):.0f}"


def score(place: Scored) -> str:
    """A mean of 0 to 100 with its 95 % interval."""
    spread = place.interval
    ends = "" if spread is None else f" ({100 * spread.low:.0f} to {100 * spread.high:.0f})"
    return f"{percent(place)}{ends}"


def hits(place: Scored) -> str:
    """The same, or so many hits where samples are few."""
    if place.n < FEW or place.interval is None:
        return f"{sum(one.value for one in place.answers):.3g} of {place.n}"
    return score(place)


def gap(pair: Paired, places: int = 0, ends: int = 0, scale: int = 100) -> str:
    """A difference with its interval."""
    spread = pair.difference
    said = "" if spread is None else f" ({scale * spread.low:+.{ends}f} to {scale * spread.high:+.{ends}f})"
    return f"{scale * pair.mean:+.{places}f}{said}"


def signed(points: float) -> str:
    return f"{points:+.0f}" if round(points) else "0"


def distance(pair: Paired) -> str:
    spread = pair.difference
    ends = "" if spread is None else f"; {signed(100 * spread.low)} to {signed(100 * spread.high)}"
    return f"({signed(100 * pair.mean)}{ends})"


def p_alone(found: Corrected) -> str:
    return p_words(found.paired.p, is_bound(found.paired.p))


def p_holm(found: Corrected) -> str:
    return p_words(found.p, found.is_bound)


def bold(words: str) -> str:
    """A cell with its score in bold."""
    first, *more = words.split(" ", 1)
    return " ".join([f"**{first}**", *more])


def spread(least: float, most: float) -> str:
    """Both ends, or one number where they agree."""
    return f"{least:,.0f}" if f"{least:,.0f}" == f"{most:,.0f}" else f"{least:,.0f} to {most:,.0f}"


def capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def small(words: str) -> str:
    return words[:1].lower() + words[1:]


def lengths(column: Column, method: str) -> tuple[str, str]:
    """Lengths of answers: a longer one costs more, and one that was cut off is wrong."""
    if method not in column.of:
        return ABSENT, ABSENT
    return f"{column.cost(method, 'generated_tokens'):.0f}", f"{100 * column.cost(method, 'cut_off'):.0f} %"


def skills_of(method: str, standing: Mapping[str, Mapping[str, OfSkill]]) -> str:
    """A method's distances, by skill; bold where it is in front."""
    mine = {skill: of[method] for skill, of in standing.items() if method in of}
    said = [
        f"{skill} {f'**{signed(one.distance)}**' if one.is_in_front else signed(one.distance)}"
        for skill, one in mine.items()
    ]
    return ", ".join(said) or ABSENT


def least_most(task: Task) -> tuple[int, int]:
    """Samples of its columns."""
    found = [column.n for column in task.columns]
    return min(found), max(found)


def code(words: str) -> str:
    return f"`{words}`"
