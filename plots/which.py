"""docs/which-method.md: which method to take, by what somebody has, from the scores that stand next to two other pages.

    python -m kvbench.plots.which                 the page, from docs/results/scores.csv.gz and docs/cited/scores.csv.gz
    python -m kvbench.plots.which --out FOLDER    the same from scores below another folder, cited tasks too

A method is in front on a skill where on none of its tasks a method of the same situation is shown to be better. Each
skill counts once. The distance to full attention stands next to it, since the first of a bad lot is in front too.

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

from kvbench.engine.terminal import say
from kvbench.plots import cited, conditions, findings
from kvbench.plots.evidence import FULL, HIDDEN, SHOWN, WORDS, Scores, fetches, gathered, listed, load, row_name
from kvbench.plots.stats import Paired, paired_over_datasets
from kvbench.results.names import own_methods
from kvbench.results.sheet import ABSENT, Sheet, markdown

NAME = "which-method.md"
MOST = 3  # names in a cell
SKILLS = ("copying", "finding", "following", "counting", "summing")
SCOPES = {SHOWN: "the question is in the prompt", HIDDEN: "questions come later"}
PLACES = {False: "the device alone", True: "host memory too"}
NEEDS = {  # what a method's file says of what it takes
    "methods/retrieving/": "host memory",
    "def second_passes(": "a second reading of the prompt",
    "ColumnSums(": "sums of all attention weights",
}
HEAD = """\
# Which method should I take?

{conditions}The rows say what you have, the columns how much of the cache's bytes may stay on the device.

{take}

In a cell: who is in front, and in parentheses how far that is from full attention's score, of 100, with its 95 %
interval. A skill counts once, however many tasks ask for it; its distance is the mean over these. A method is in front
where on none of a skill's tasks another method of the row is shown to be better (paired test, corrected over all
pairs). "Cannot be told": these are in front together. A small distance means that the budget is enough. A large one
means that at this budget nothing is good, and more bytes are worth more than another method. A task counts where a
method that loses half of what full attention answers would be shown to lose.

The tasks: {asked}. Samples and tests are in [results.md](results.md). For another model or another kind of text run
your own: `python run.py -m experiment=evidence_docs model=NAME out=runs/mine`. Then
`python -m kvbench.plots.findings runs/mine --out mine` and `python -m kvbench.plots.which --out mine` write both pages
into `mine`.

## Every method

{every}

By skill, the distance to full attention's score; **bold** where the method is in front among all. The second column
says what a method takes beside its share of the bytes.

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
class OfSkill:
    """A method on the tasks of one skill, at a budget."""

    is_in_front: bool  # on each task no other method is shown to be better
    paired: Paired  # its scores less full attention's, each task as much as another

    @property
    def distance(self) -> float:
        """Distance to full attention's score, of 100."""
        return 100 * self.paired.mean

    @property
    def words(self) -> str:
        spread = self.paired.difference
        ends = "" if spread is None else f"; {signed(100 * spread.low)} to {signed(100 * spread.high)}"
        return f"({signed(self.distance)}{ends})"


@cache
def source(method: str) -> tuple[str, str]:
    """A method's file, from the repository's root, and what it says."""
    path = own_methods()[method]
    return f"methods/{path.parent.name}/", path.read_text(encoding="utf-8")


def needs(method: str) -> str:
    return ", ".join(words for sign, words in NEEDS.items() if any(sign in text for text in source(method))) or ABSENT


def shared(sets: Sequence[Scores]) -> list[Scores]:
    """Scores of the methods that papers compare first, and by bytes: what happens in an answer is another question."""
    return [one for one in sets if not one.asked.has_tokens and not one.asked.others_of]


def standings(sets: Sequence[Scores], scope: str, memory: str, has_host: bool) -> dict[str, dict[str, OfSkill]]:
    """Standings by skill, of the methods that such a machine can run and that were asked all its tasks, the best first.

    A task that full attention hardly does does not count.
    """
    by_skill: dict[str, list[Scores]] = {}
    for one in shared(sets):
        if (scope, memory, FULL) in one.of and not one.is_tight(scope, memory):
            by_skill.setdefault(one.asked.skill, []).append(one)
    found: dict[str, dict[str, OfSkill]] = {}
    for skill, tasks in by_skill.items():
        best = [in_front(one, scope, memory, has_host) for one in tasks]
        names = [name for name in best[0] if all(name in of for of in best)]
        full = [[*one.full(scope, memory).values()] for one in tasks]
        standing = {
            name: OfSkill(
                all(of[name] for of in best),
                paired_over_datasets([[*one.of[scope, memory, name].values()] for one in tasks], full),
            )
            for name in names
        }
        found[skill] = dict(sorted(standing.items(), key=lambda item: (-item[1].distance, item[0])))
    return {skill: found[skill] for skill in SKILLS if found.get(skill)}


def in_front(scores: Scores, scope: str, memory: str, has_host: bool) -> dict[str, bool]:
    """For each method that may run: whether none of them is shown to be better on this task."""
    mine = {p: each for p, each in scores.of.items() if p[2] == FULL or has_host or not fetches(p[2])}
    best, worse = replace(scores, of=mine).groups(scope, memory)
    return dict.fromkeys(best, True) | dict.fromkeys(worse, False)


def budgets(sets: Sequence[Scores], scope: str) -> list[str]:
    return sorted(
        {memory for one in shared(sets) for each, memory in one.columns if each == scope}, key=Fraction, reverse=True
    )


def take(sets: Sequence[Scores]) -> str:
    """Situations and skills down, budgets across: who is in front."""
    shares = sorted({memory for scope in SCOPES for memory in budgets(sets, scope)}, key=Fraction, reverse=True)
    rows = []
    for scope, when in SCOPES.items():
        for has_host, where in PLACES.items():
            found = [standings(sets, scope, m, has_host) for m in shares]
            called = [labels(sets, scope, m) for m in shares]
            for skill in SKILLS:
                if any(skill in each for each in found):
                    cells = [first(each.get(skill, {}), names) for each, names in zip(found, called, strict=True)]
                    rows.append([when, where, skill, *cells])
    heads = ["what you have", "the cache may lie on", "skill", *(str(Fraction(m)) for m in shares)]
    return markdown(Sheet(heads, rows, n_keys=len(heads)))


def labels(sets: Sequence[Scores], scope: str, memory: str) -> dict[str, str]:
    """Names of the variants at a budget, by method."""
    found: dict[str, dict[str, None]] = {}
    for one in shared(sets):
        for place in one.of:
            if place[:2] == (scope, memory):
                found.setdefault(place[2], {})[one.label(place)] = None
    return {name: " or ".join(each) for name, each in found.items()}


def first(standing: Mapping[str, OfSkill], labels: Mapping[str, str]) -> str:
    """Words on who is in front; several that cannot be told apart are said to be."""
    if len(standing) < 2:
        return ABSENT
    names = [f"{labels[name]} {one.words}" for name, one in standing.items() if one.is_in_front]
    if not names:
        return "none on all of its tasks"
    if len(names) > MOST:
        return f"cannot be told: {names[0]} and {len(names) - 1} more"
    return f"cannot be told: {listed(names)}" if len(names) > 1 else names[0]


def every(sets: Sequence[Scores]) -> str:
    columns = [(scope, memory) for scope in SCOPES for memory in budgets(sets, scope)]
    found = [standings(sets, *column, has_host=True) for column in columns]
    names = sorted({name for each in found for of in each.values() for name in of}, key=lambda n: overall(n, found))
    heads = ["method", "it takes", *(f"{WORDS[scope]}, {Fraction(memory)}" for scope, memory in columns)]
    called = [(scope, f"{WORDS[scope]}, {Fraction(memory)}", labels(sets, scope, memory)) for scope, memory in columns]
    rows = []
    for name in names:
        said = [(of[name], scope, column) for scope, column, of in called if name in of]
        rows.append([row_name(said), needs(name), *(words(name, each) for each in found)])
    return markdown(Sheet(heads, rows, n_keys=2))


def overall(name: str, found: Sequence[Mapping[str, Mapping[str, OfSkill]]]) -> tuple[float, float, str]:
    each = [of[name] for one in found for of in one.values() if name in of]
    return -sum(one.is_in_front for one in each) / len(each), -fsum(one.distance for one in each), name


def signed(points: float) -> str:
    return f"{points:+.0f}" if round(points) else "0"


def words(name: str, standing: Mapping[str, Mapping[str, OfSkill]]) -> str:
    """A method's distances, by skill; bold where it is in front."""
    said = [
        f"{skill} {f'**{signed(of[name].distance)}**' if of[name].is_in_front else signed(of[name].distance)}"
        for skill, of in standing.items()
        if name in of
    ]
    return ", ".join(said) or ABSENT


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
    parser = argparse.ArgumentParser(prog="python -m kvbench.plots.which", description=f"Write docs/{NAME}.")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where the scores lie and the page is written")
    out: Path = parser.parse_args(arguments).out
    try:
        sets = gathered(load(out / findings.NAME / findings.KEPT))
        values = out / cited.NAME / cited.KEPT
        (out / NAME).write_text(page(sets, cited.load(values) if values.exists() else []), encoding="utf-8")
    except (ValueError, OSError) as error:
        say(f"kvbench.plots.which: {error}", file=sys.stderr)
        return 2
    say(out / NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
