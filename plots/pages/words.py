"""Words for numbers and names, which templates put into their sentences and tables.

Not here: sentences (the templates), numbers (`queries.py`).
"""

from collections.abc import Mapping

from kvbench.plots.pages.asked import At
from kvbench.plots.pages.columns import Column, Task, less
from kvbench.plots.pages.methods import default_of, title
from kvbench.plots.pages.queries import in_front, unlike_floor
from kvbench.plots.scored import Scored
from kvbench.plots.stats import Corrected, Paired, is_bound, p_words
from kvbench.results.sheet import ABSENT

# --- names ---------------------------------------------------------------------------------------


def label(task: Task, at: At, method: str) -> str:
    """A variant's name for readers, with all that warns of what it is."""
    names = {name: task.labels.get((at, name)) or title(name) for name in (method, default_of(method))}
    return told_apart(task, method, names)


def plain_name(task: Task, method: str) -> str:
    """The shortest of its names, without its bits and without that its index is smaller."""
    return told_apart(task, method, {name: shortest(task, name) for name in (method, default_of(method))})


def shortest(task: Task, method: str) -> str:
    mine = {name for name in task.rows[task.rows["method"] == method]["method_label"] if name}
    found = min(mine, key=lambda name: (len(name), name), default=title(method))
    return found.split(" or ")[0].replace(" (smaller index)", "")


def told_apart(task: Task, method: str, names: Mapping[str, str]) -> str:
    """A name, with that of its preset where the method as it is here stands beside it under the same one."""
    base = default_of(method)
    if base == method or base not in task.methods or names[base] != names[method]:
        return names[method]
    return f"{names[method]} ({method.removeprefix(base + '_')})"


# --- numbers -------------------------------------------------------------------------------------


def percent(place: Scored) -> str:
    return f"{100 * (place.mean or 0.0):.0f}"


def score(place: Scored) -> str:
    """A mean of 0 to 100 with its 95 % interval."""
    spread = place.interval
    ends = "" if spread is None else f" ({100 * spread.low:.0f} to {100 * spread.high:.0f})"
    return f"{percent(place)}{ends}"


def gap(pair: Paired, places: int = 0, ends: int = 0, scale: int = 100) -> str:
    """A difference with its interval."""
    spread = pair.difference
    said = "" if spread is None else f" ({scale * spread.low:+z.{ends}f} to {scale * spread.high:+z.{ends}f})"
    return f"{scale * pair.mean:+z.{places}f}{said}"


def p_alone(found: Corrected) -> str:
    return p_words(found.paired.p, is_bound(found.paired.p))


def p_holm(found: Corrected) -> str:
    return p_words(found.p, found.is_bound)


def lengths(column: Column, method: str) -> tuple[str, str]:
    """Lengths of answers: a longer one costs more, and one that was cut off is wrong."""
    n_tokens, cut = (column.cost(method, key) for key in ("generated_tokens", "cut_off"))
    return "" if n_tokens is None else f"{n_tokens:.0f}", "" if cut is None else f"{100 * cut:.0f} %"


def percent_of(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:.0f} %"


def standing(column: Column | None, has_host: bool, task: Task) -> str:
    """The best that such a machine can run, and how many cannot be told from it."""
    if column is None or task.is_tight(column):
        return ABSENT
    front = in_front(column, has_host)
    distance = gap(less(column.of[front[0]], column.full))
    if column.floor and front[0] not in unlike_floor(column):
        distance += ", not told from random tokens"
    more = "" if len(front) == 1 else f"; {len(front) - 1} more cannot be told from it"
    return f"{plain_name(task, front[0])}: {distance}{more}"


def small(words: str) -> str:
    return words[:1].lower() + words[1:]


def capital(words: str) -> str:
    return words[:1].upper() + words[1:]
