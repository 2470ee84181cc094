"""docs/results.md: findings first, then a figure and a short table per task, from scores that stand beside the page.

    python -m plots.findings             the page again, from docs/results/scores.csv.gz
    python -m plots.findings RUNS        the scores of the runs of conf/experiment/evidence_*.yaml, and the page

A finding is a comparison that is named here; its numbers come from the samples, and it is left out where the test does
not show it. What is on the page is made anew by either command, to the byte.

Not here: statistics (`plots/stats.py`), reading (`plots/evidence.py`), the figures (`plots/figures/evidence.py`).
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import matplotlib

from engine.foreign import write_csv
from engine.terminal import say
from plots import style
from plots.evidence import FULL, HIDDEN, SHOWN, Scores, gathered, keep, load, mean, read, title
from plots.figures.evidence import picture
from plots.figures.results import SVG, save
from plots.stats import Corrected, rank_ranges
from results import interval
from results.sheet import ABSENT, Sheet, markdown

NAME = "results"
KEPT = "scores.csv.gz"
WORDS = {SHOWN: "question shown", HIDDEN: "question hidden"}
LEAST = 30  # of 100 that full attention must score; below it methods have nothing to lose
HEADS = (
    "scope", "share of bytes", "method", "n", "score", "low", "high", "difference to full", "difference low",
    "difference high", "p", "p after Holm", "compared", "best rank", "worst rank", "bytes held, share of full",
)  # fmt: skip

HEAD = """\
# Results

How well {models} answer with a compressed cache, by bytes:
every method may hold the same share of the bytes of full attention's keys and values. Two things are varied: how small
the share is, and whether the method sees the question while it compresses ("question shown") or not, because the prompt
is compressed before anybody asks ("question hidden").

{findings}

Scores are 0 to 100. Intervals are 95 % over samples ([one rule for every n](intervals.md)); differences are paired,
sample by sample, and p is that of the sign-flip test after Holm's correction over all comparisons of the same kind,
whose number is given. The samples of a task are the same for all methods. Every method has its default settings.
{short}
Every sample's score is in [scores.csv.gz](results/{kept}), and `python -m plots.findings` makes this page from it. The
command of its runs stands with each task; it goes on where it was stopped. Some of these were stopped, as their n says;
who stopped them looked at the clock and not at the scores. [What the harness shows in an hour](hour.md) has all methods
at five budgets in tokens, with few samples.
"""
GGUF = """\
`qwen2.5-coder-0.5b` was read from Qwen's own GGUF file (Q4_K_M, `model.id=FILE`), `smollm2-135m` is the embedded model.
"""


@dataclass(frozen=True)
class Finding:
    """A comparison that a reader should remember, if it is shown."""

    asked: str  # a set's key
    words: str  # with {one}, {other}, {full} and the two scores {a}, {b}
    place: tuple[str, str, str]
    against: str  # "full", "shown" for the same with the question shown, or another method at the same budget
    but: str = ""  # another set, of which the opposite must be shown
    but_words: str = ""  # with its two scores


FINDINGS = (
    Finding(
        "docs",
        "**Hide the question, and a method of last queries loses its answers**: at {share} of the bytes "
        "{one} scores {a} with the question hidden and {b} with it shown.",
        (HIDDEN, "0.125", "snapkv"),
        "shown",
    ),
    Finding(
        "docs",
        "**A method that fetches loses far less**: with the question hidden, {one} scores {a} at {share} of the "
        "bytes, {other} {b}.",
        (HIDDEN, "0.125", "pqcache"),
        "snapkv",
    ),
    Finding(
        "docs",
        "**Reading the prompt twice stands in for the question**: with it hidden, {one} scores {a} at {share} of the "
        "bytes, {other} {b}.",
        (HIDDEN, "0.125", "kvzip"),
        "snapkv",
    ),
    Finding(
        "docs",
        "**The same method fails where bytes are fewest**: with the question shown, {one} scores {a} at {share} "
        "of the bytes, {other} {b}.",
        (SHOWN, "0.0625", "kvzip"),
        "snapkv",
    ),
    Finding(
        "needle",
        "**Which needle is hidden decides who finds it**: of seven digits {one} finds {a} of 100 at {share} of the "
        "bytes, {other} {b}, the question shown.",
        (SHOWN, "0.125", "keydiff"),
        "snapkv",
        "needle-name",
        "Of names {one} finds {a}, {other} {b}.",
    ),
    Finding(
        "docs",
        "**Fewer bits are not free**: {one} keeps every token at {share} of the bytes and scores {a}, full attention "
        "{b}.",
        (SHOWN, "0.25", "kivi"),
        FULL,
    ),
    Finding(
        "docs",
        "**No eviction reaches full attention at {share} of the bytes**: with the question shown, the best of them, "
        "{one}, scores {a}, full attention {b}.",
        (SHOWN, "0.0625", "tova"),
        FULL,
    ),
)
MOST = 5


def compared(finding: Finding, scores: Scores) -> Corrected | None:
    """With its corrected p-value, among all comparisons of its kind."""
    scope, memory, method = finding.place
    if finding.against == FULL:
        return scores.against_full.get(finding.place)
    if finding.against == "shown":
        return scores.hiding.get(finding.place)
    pairs = scores.between(scope, memory)
    if (found := pairs.get((method, finding.against))) is not None:
        return found
    turned = pairs.get((finding.against, method))
    return None if turned is None else turned.turned


def shown(finding: Finding, sets: Sequence[Scores]) -> str:
    """The finding with its numbers; "" where it was not asked or the test does not show it."""
    found = told(finding, finding.asked, finding.words, sets)
    if found is None or not finding.but:
        return "" if found is None else found[0]
    opposite = told(finding, finding.but, finding.but_words, sets)
    return "" if opposite is None or opposite[1] == found[1] else f"{found[0]} {opposite[0]}"


def told(finding: Finding, key: str, words: str, sets: Sequence[Scores]) -> tuple[str, int] | None:
    """Words with the numbers of a set, and which of the two is better; None where that is not shown."""
    scores = next((one for one in sets if one.asked.key == key), None)
    found = None if scores is None else compared(finding, scores)
    if scores is None or found is None or not found.sign:
        return None
    scope, memory, method = finding.place
    beside = {FULL: (scope, "", FULL), "shown": (SHOWN, memory, method)}.get(
        finding.against, (scope, memory, finding.against)
    )
    a, b = (f"{100 * mean(scores.of[place]):.0f}" for place in (finding.place, beside))
    share = f"{Fraction(memory)}"
    words = words.format(one=title(method), other=title(finding.against), a=a, b=b, share=share)
    spread = found.paired.difference
    assert spread is not None
    ends = f"{100 * spread.low:+.0f} to {100 * spread.high:+.0f}"
    where = f"{scores.model}, `experiment={scores.asked.experiment}`"
    tested = f"p = {found.p:.2g} after Holm over {found.family} comparisons ({where})"
    difference = f"Difference {100 * found.paired.mean:+.0f} ({ends}), n = {found.paired.n}, {tested}."
    return f"{words} {difference}", found.sign


# --- tasks ---------------------------------------------------------------------------------------


def section(scores: Scores) -> str:
    asked = scores.asked
    ns = ", ".join(f"{WORDS[scope]}: n = {asked_so_far(scores, scope)}" for scope in scores.scopes)
    parts = [
        f"## {asked.title}",
        f"{asked.about} {scores.model}, {ns}.",
        f"    python run.py -m experiment={asked.experiment}",
    ]
    low = [scope for scope in scores.scopes if 100 * mean(scores.full(scope)) < LEAST]
    if low:
        levels = " and ".join(f"{100 * mean(scores.full(scope)):.0f}" for scope in low)
        parts.append(
            f"Full attention scores {levels}: methods have nothing to lose here, and no comparison is possible."
        )
        return "\n\n".join(parts) + "\n"
    parts += [f"![{asked.title}: methods at three shares of the bytes]({NAME}/{asked.key}.svg)", table(scores)]
    parts += ["\n".join(f"- {line}" for line in groups(scores))]
    parts.append(
        f"All figures, with differences, p-values, ranks and bytes held: [{asked.key}.csv]({NAME}/{asked.key}.csv)."
    )
    return "\n\n".join(parts) + "\n"


def asked_so_far(scores: Scores, scope: str) -> str:
    """How many samples there are, and of how many, where the experiment was stopped."""
    n = scores.n(scope)
    return f"{n}" if n >= scores.asked.n else f"{n} of the {scores.asked.n} that the experiment asks"


def table(scores: Scores) -> str:
    """Methods down; budgets across, within each scope. * marks a shown difference to full attention."""
    places = [(scope, memory) for scope in scores.scopes for memory in scores.memories]
    heads = ["method", *(f"{WORDS[scope]}, {Fraction(memory)}" for scope, memory in places)]
    full = [f"{100 * mean(scores.full(scope)):.0f}" for scope, _ in places]
    rows = [["Full", *full]]
    for method in scores.methods:
        rows.append([title(method), *(cell(scores, (*place, method)) for place in places)])
    note = "\\* full attention is shown to be better. In parentheses: the 95 % interval."
    return f"{markdown(Sheet(heads, rows))}\n\n{note}"


def cell(scores: Scores, place: tuple[str, str, str]) -> str:
    if place not in scores.of:
        return ABSENT
    found = interval([*scores.of[place].values()])
    ends = "" if found is None else f" ({100 * found.low:.0f} to {100 * found.high:.0f})"
    star = " *" if scores.against_full[place].sign < 0 else ""
    return f"{100 * mean(scores.of[place]):.0f}{ends}{star}"


def groups(scores: Scores) -> list[str]:
    """Who is ahead at each budget, with all that cannot be told from the best."""
    found = []
    for scope in scores.scopes:
        for memory in scores.memories:
            best, worse = scores.groups(scope, memory)
            where = f"{WORDS[scope][0].upper()}{WORDS[scope][1:]}, {Fraction(memory)}:"
            names = ", ".join(map(title, best))
            if len(best) == 1:
                found.append(f"{where} {names} is ahead of all others.")
            elif not worse:
                found.append(f"{where} no method is shown to be behind {title(best[0])}, the highest mean.")
            else:
                found.append(f"{where} {names} cannot be told apart from the best; {others(len(worse))} behind it.")
    return found


def others(n: int) -> str:
    return "one other is" if n == 1 else f"{n} others are"


def full_table(path: Path, scores: Scores) -> None:
    rows = []
    for scope in scores.scopes:
        full = [WORDS[scope], 1, "Full", scores.n(scope), *numbers(scores, (scope, "", FULL))]
        rows.append([*full, *[""] * (len(HEADS) - len(full) - 1), 1])
        for memory in scores.memories:
            places = {name: (scope, memory, name) for name in scores.methods if (scope, memory, name) in scores.of}
            ranks = rank_ranges({name: scores.of[place] for name, place in places.items()})
            for name, place in places.items():
                beside = [*against(scores, place), *ranks[name], f"{scores.share(place):.3g}"]
                row = [WORDS[scope], memory, title(name), scores.n(scope), *numbers(scores, place), *beside]
                rows.append(row)
    write_csv(path, [*HEADS], rows)


def numbers(scores: Scores, place: tuple[str, str, str]) -> list[str]:
    found = interval([*scores.of[place].values()])
    ends = ["", ""] if found is None else [f"{100 * end:.1f}" for end in (found.low, found.high)]
    return [f"{100 * mean(scores.of[place]):.1f}", *ends]


def against(scores: Scores, place: tuple[str, str, str]) -> list[str]:
    found = scores.against_full[place]
    spread = found.paired.difference
    ends = ["", ""] if spread is None else [f"{100 * end:.1f}" for end in (spread.low, spread.high)]
    return [f"{100 * found.paired.mean:.1f}", *ends, f"{found.paired.p:.4g}", f"{found.p:.4g}", str(found.family)]


# --- the page ------------------------------------------------------------------------------------


def page(sets: Sequence[Scores]) -> str:
    shown_ones = [words for finding in FINDINGS if (words := shown(finding, sets))][:MOST]
    findings = "\n".join(f"{i}. {words}" for i, words in enumerate(shown_ones, start=1))
    models = " and ".join(f"`{name}`" for name in dict.fromkeys(one.model for one in sets))
    short = GGUF if any(one.model.startswith("qwen") for one in sets) else ""
    head = HEAD.format(models=models, findings=findings or "No comparison is shown.", kept=KEPT, short=short)
    return "\n".join([head, *(section(one) for one in sets)])


def write(out: Path, runs: Path | None) -> list[Path]:
    folder = out / NAME
    folder.mkdir(parents=True, exist_ok=True)
    if runs is not None:
        keep(folder / KEPT, read(runs))
    sets = gathered(load(folder / KEPT))
    paths = []
    with matplotlib.rc_context({**style.RC, **SVG}):
        for one in sets:
            save(picture(one), folder / f"{one.asked.key}.svg")
            full_table(folder / f"{one.asked.key}.csv", one)
            paths += [folder / f"{one.asked.key}.{kind}" for kind in ("svg", "csv")]
    (out / f"{NAME}.md").write_text(page(sets), encoding="utf-8")
    return [out / f"{NAME}.md", *paths]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m plots.findings", description="Write docs/results.md.")
    parser.add_argument("runs", nargs="?", type=Path, help="folder of runs; without it the kept scores")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where to write")
    options = parser.parse_args(arguments)
    try:
        paths = write(options.out, options.runs)
    except (ValueError, OSError) as error:
        say(f"plots.findings: {error}", file=sys.stderr)
        return 2
    for path in paths:
        say(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
