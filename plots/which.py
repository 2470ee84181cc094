"""docs/which-method.md: which method to take, by what somebody has, from the scores that stand beside two other pages.

    python -m plots.which                 the page, from docs/results/scores.csv.gz and docs/cited/scores.csv.gz
    python -m plots.which --out FOLDER    the same from scores below another folder, of cited tasks where it has some

A method is in front on a task where no method of the same situation is shown to be better. Who is in front on most
tasks is taken; the mean distance to full attention stands beside it, since the first of a bad lot is in front too.

Not here: findings (`plots/findings.py`), the cited tasks' tables (`plots/cited.py`), statistics (`plots/stats.py`).
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import fsum
from pathlib import Path

from engine.terminal import say
from plots import cited, conditions, findings
from plots.evidence import FULL, HIDDEN, SHOWN, WORDS, Scores, fetches, gathered, listed, load, mean, row_name
from results.names import own_methods
from results.sheet import ABSENT, Sheet, markdown

NAME = "which-method.md"
MOST = 4  # names in a cell
SCOPES = {SHOWN: "the question is in the prompt", HIDDEN: "questions come later"}
PLACES = {False: "the device alone", True: "host memory too"}
NEEDS = {  # what a method's file says of what it takes
    "methods/retrieving/": "host memory",
    "def probes(": "a second reading of the prompt",
    "ColumnSums(": "sums of all attention weights",
}
HEAD = """\
# Which method should I take?

{conditions}The rows say what you have, the columns how much of the cache's bytes may stay on the device.

{take}

In a cell: the methods in front on most tasks, and in parentheses how far they score from full attention, of 100, as a
mean over the tasks. A method is in front on a task where no other method of the row is shown to be better (paired
test, corrected over all pairs); methods in front on as many tasks stand in the order of that mean. A small distance
means that the budget is enough. A large one means that at this budget nothing is good, and more bytes are worth more
than another method. What one task says is a hint. A task counts where a method that loses half of what full attention
answers would be shown to lose.

The tasks: {asked}. Samples and tests are in [results.md](results.md). For another model or another kind of text run
your own: `python run.py -m experiment=evidence_docs model=NAME out=runs/mine`. Then
`python -m plots.findings runs/mine --out mine` and `python -m plots.which --out mine` write both pages into `mine`.

## Every method

{every}

"2 of 3, -12": among all methods in front on two of three tasks, and 12 points below full attention as a mean over the
three. The second column says what a method takes beside its share of the bytes.

{today}## What scores do not say

- **Time.** A method that drops tokens makes each step as short as its budget. One that fetches them adds a search and
  the time of the link to the host: [cost.md](cost.md). No method of these tables reads the prompt faster; where that
  takes the most time, a [sparse prefill](prefills.md) helps more than any of them.
- **Long answers.** A budget for the prompt does not limit what the answer adds. `rkv`, `triattention` and others evict
  while they answer: [decode-time.md](decode-time.md).
- **A served engine.** Methods that drop tokens free vLLM's blocks, those that fetch read fewer of them:
  [serving.md](serving.md) says which methods run there.
- **Your model.** Latent attention, sliding windows and layers without a cache leave less to compress, and some methods
  nothing: `python run.py --check model=NAME` says which methods run, [models.md](models.md) why.
- **Several turns.** A method that dropped a token for the first question lacks it for the next: [turns.md](turns.md).
- **Fewer bits instead of fewer tokens**, or both (`compose=kivi`): [byte-budget.md](byte-budget.md).
"""
TODAY = """\
## On the tasks that are cited now, by tokens

A quarter of the prompt's tokens, the question in the prompt. A column of [cited.md](cited.md) counts where full
attention can be told from guessing and there are contexts enough to show a loss; the questions on one context count
as one.

{table}

"""


@dataclass(frozen=True)
class Standing:
    """A method at a budget, over the tasks where it was asked."""

    in_front: int
    tasks: int
    distance: float  # to full attention's score, of 100

    @property
    def rank(self) -> tuple[float, float]:
        """The best first."""
        return -self.in_front / self.tasks, -self.distance


@cache
def source(method: str) -> tuple[str, str]:
    """A method's file, from the repository's root, and what it says."""
    path = own_methods()[method]
    return f"methods/{path.parent.name}/", path.read_text(encoding="utf-8")


def needs(method: str) -> str:
    return ", ".join(words for sign, words in NEEDS.items() if any(sign in text for text in source(method))) or ABSENT


def shared(sets: Sequence[Scores]) -> list[Scores]:
    """Those of the methods that papers compare first, and by bytes: what happens in an answer is another question."""
    return [one for one in sets if not one.asked.has_tokens and not one.asked.others_of]


def standings(sets: Sequence[Scores], scope: str, memory: str, has_host: bool) -> dict[str, Standing]:
    """Of the methods that such a machine can run, the best first; what full attention hardly does does not count."""
    found: dict[str, list[tuple[bool, float]]] = {}
    asked = [one for one in shared(sets) if (scope, memory, FULL) in one.of and not one.is_tight(scope, memory)]
    for one in asked:
        mine = {p: each for p, each in one.of.items() if p[2] == FULL or has_host or not fetches(p[2])}
        best, worse = replace(one, of=mine).groups(scope, memory)
        for name in (*best, *worse):
            distance = 100 * (mean(one.of[scope, memory, name]) - mean(one.full(scope, memory)))
            found.setdefault(name, []).append((name in best, distance))
    standing = {
        name: Standing(sum(first for first, _ in each), len(each), fsum(far for _, far in each) / len(each))
        for name, each in found.items()
    }
    return dict(sorted(standing.items(), key=lambda item: (item[1].rank, item[0])))


def budgets(sets: Sequence[Scores], scope: str) -> list[str]:
    return sorted(
        {memory for one in shared(sets) for each, memory in one.columns if each == scope}, key=Fraction, reverse=True
    )


def take(sets: Sequence[Scores]) -> str:
    """Situations down, budgets across: who is in front on most tasks."""
    shares = sorted({memory for scope in SCOPES for memory in budgets(sets, scope)}, key=Fraction, reverse=True)
    rows = []
    for scope, when in SCOPES.items():
        for has_host, where in PLACES.items():
            rows.append(
                [
                    when,
                    where,
                    *(first(standings(sets, scope, m, has_host), labels(sets, scope, m)) for m in shares),
                ]
            )
    heads = ["what you have", "the cache may lie on", *(str(Fraction(m)) for m in shares)]
    return markdown(Sheet(heads, rows, n_keys=len(heads)))


def labels(sets: Sequence[Scores], scope: str, memory: str) -> dict[str, str]:
    """What readers call the variants at a budget, by method."""
    found: dict[str, dict[str, None]] = {}
    for one in shared(sets):
        for place in one.of:
            if place[:2] == (scope, memory):
                found.setdefault(place[2], {})[one.label(place)] = None
    return {name: " or ".join(each) for name, each in found.items()}


def first(standing: Mapping[str, Standing], labels: Mapping[str, str]) -> str:
    """The names in front on as many tasks as the best of them."""
    if len(standing) < 2:
        return ABSENT
    most = max(one.in_front / one.tasks for one in standing.values())
    names = [
        f"{labels[name]} ({signed(one.distance)})" for name, one in standing.items() if one.in_front / one.tasks == most
    ]
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    n = max(one.tasks for one in standing.values())
    return f"{listed(names[:MOST])}{more}; {n} task{'s' * (n > 1)}"


def every(sets: Sequence[Scores]) -> str:
    columns = [(scope, memory) for scope in SCOPES for memory in budgets(sets, scope)]
    found = [standings(sets, *column, has_host=True) for column in columns]
    names = sorted({name for each in found for name in each}, key=lambda name: overall(name, found))
    heads = ["method", "it takes", *(f"{WORDS[scope]}, {Fraction(memory)}" for scope, memory in columns)]
    called = [(scope, f"{WORDS[scope]}, {Fraction(memory)}", labels(sets, scope, memory)) for scope, memory in columns]
    rows = []
    for name in names:
        said = [(of[name], scope, column) for scope, column, of in called if name in of]
        rows.append([row_name(said), needs(name), *(words(each.get(name)) for each in found)])
    return markdown(Sheet(heads, rows, n_keys=2))


def overall(name: str, found: Sequence[Mapping[str, Standing]]) -> tuple[float, float]:
    each = [one[name] for one in found if name in one]
    return -sum(one.in_front for one in each) / sum(one.tasks for one in each), -fsum(one.distance for one in each)


def signed(points: float) -> str:
    return f"{points:+.0f}" if round(points) else "0"


def words(one: Standing | None) -> str:
    return ABSENT if one is None else f"{one.in_front} of {one.tasks}, {signed(one.distance)}"


def today(lines: Sequence[cited.Line]) -> str:
    """Methods by how many columns show a loss to full attention."""
    every = [column for asked in cited.SETS for column in cited.columns_of(asked, lines)]
    columns = [column for column in every if not column.is_at_chance and not column.few]
    lost: dict[str, list[str]] = {}
    compared: dict[str, int] = {}
    for column in columns:
        for name, one in column.against_full().items():
            if name == "oracle":  # nobody can run it
                continue
            compared[name] = compared.get(name, 0) + 1
            if one.sign == (1 if column.asked.measure else -1):
                lost.setdefault(name, []).append(
                    f"{column.asked.title.partition(':')[0]}: {column.asked.columns[column.name]}"
                )
    names = sorted(compared, key=lambda name: (len(lost.get(name, ())) / compared[name], name))
    rows = []
    for name in names:
        where = lost.get(name, [])
        rows.append([cited.name_in(columns, name), f"{len(where)} of {compared[name]}", "; ".join(where) or ABSENT])
    return markdown(Sheet(["method", "shown to lose", "in"], rows, n_keys=3))


def sources(sets: Sequence[Scores]) -> str:
    """The tasks, with model and number of samples."""
    found = []
    for one in (one for one in shared(sets) if not all(one.is_tight(*column) for column in one.columns)):
        name = one.asked.title[0].lower() + one.asked.title[1:]
        found.append(f"{name} ({one.model}, n = {spread([one.n(*column) for column in one.columns])})")
    return "; ".join(found)


def spread(ns: Sequence[int]) -> str:
    return str(min(ns)) if min(ns) == max(ns) else f"{min(ns)} to {max(ns)}"


def page(sets: Sequence[Scores], lines: Sequence[cited.Line]) -> str:
    cited_now = TODAY.format(table=today(lines)) if lines else ""
    first_lines = conditions.head([conditions.of_comm(shared(sets)), conditions.collapse(sets)])
    return HEAD.format(conditions=first_lines, take=take(sets), every=every(sets), today=cited_now, asked=sources(sets))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m plots.which", description=f"Write docs/{NAME}.")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where the scores lie and the page is written")
    out: Path = parser.parse_args(arguments).out
    try:
        sets = gathered(load(out / findings.NAME / findings.KEPT))
        values = out / cited.NAME / cited.KEPT
        (out / NAME).write_text(page(sets, cited.load(values) if values.exists() else []), encoding="utf-8")
    except (ValueError, OSError) as error:
        say(f"plots.which: {error}", file=sys.stderr)
        return 2
    say(out / NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
