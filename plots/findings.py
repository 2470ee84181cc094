"""docs/results.md: findings first, then a figure and a short table per task, from scores that stand next to the page.

    python -m kvbench.plots.findings             the page again, from docs/results/scores.csv.gz
    python -m kvbench.plots.findings RUNS    with runs of conf/experiment/evidence_*.yaml in place of what is kept
                                         of the same task, model, scope, budget and method; all else stays
    python -m kvbench.plots.findings RUNS --out FOLDER   a page of these runs alone, where FOLDER holds none yet

RUNS with fewer samples of a method than are kept make n smaller for all methods compared with it
(`kvbench.plots.evidence.renewed`).

A finding is a comparison that `plots/contrasts.py` fixed beforehand; its numbers come from the samples, and it is left
out where the test does not show it. What is on the page is made anew by either command, to the byte.

Not here: statistics (`plots/stats.py`), reading (`plots/evidence.py`), the figures (`plots/figures/evidence.py`).
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path

import matplotlib

from kvbench.engine.foreign import write_csv
from kvbench.plots import conditions, style
from kvbench.plots.contrasts import CONTRASTS, LOOKED, OTHER_SCOPE, Contrast, looked_at, outcomes
from kvbench.plots.evidence import (
    FULL,
    SETS,
    WORDS,
    Asked,
    Scores,
    fetches,
    gathered,
    keep,
    less,
    listed,
    load,
    mean,
    read,
    renewed,
    row_name,
    title,
)
from kvbench.plots.figures.evidence import picture
from kvbench.plots.figures.results import SVG, save
from kvbench.plots.kept import KEPT, run
from kvbench.plots.stats import Corrected, corrected, is_bound, p_words, rank_ranges
from kvbench.results import interval
from kvbench.results.sheet import ABSENT, Sheet, markdown

NAME = "results"
HEADS = (
    "scope", "share of bytes", "method", "n", "score", "low", "high", "difference to full", "difference low",
    "difference high", "p", "p after Holm", "only below", "compared", "best rank", "worst rank",
    "bytes held, share of full", "answer in tokens", "cut off",
)  # fmt: skip

HEAD = """\
# Results

{conditions}How well {models} answer with a compressed cache.
The prompt's cache is compressed: on the device, every method may hold the same share of the bytes that full attention's
keys and values take, and methods that fetch ({fetching}) keep all of them in host memory besides. Two things vary: that
share, and what the method sees while it compresses. It sees the prompt with its question ("question shown"), or the
prompt is compressed before anybody asks ("question hidden"). Where sums have no exemplars, the prompt is short
and the answer long: methods cut the cache while the answer grows, and all may keep the same number of tokens.

{findings}

Scores are 0 to 100. Intervals are 95 % over samples ([one rule for every n](intervals.md)). Differences are paired,
sample by sample; p is that of the sign-flip test after Holm's correction. "Fixed beforehand": the comparison was chosen
before the samples that test it were asked, and only those count ([what was tested](#what-was-tested)). So a finding's
scores may differ from those of the tables, which take all samples. "Chosen afterwards": it was chosen because its
scores stood out, and new samples have yet to confirm it. An interval may hold 0 where p is small: few samples cannot
exclude a rare large loss. All methods at a budget are asked the same samples, and have their default settings. With the
question hidden the prompt becomes tokens in two parts, and the tokens at their seam may differ; so may full attention's
score.
{short}
Every sample's score is in [scores.csv.gz](results/{kept}), and `python -m kvbench.plots.findings` makes this page from
it. Each task names the command of its runs, which goes on where it was stopped. Each experiment fixes how many samples
it asks. Where n is lower, the machine's time was over: it is two cores, and for their sake RULER's prompts have 2,048
tokens and not 4,096. Budgets with a comparison fixed beforehand were asked first. No run was ended or prolonged because
of what a method scored. RULER's common words were given up, of which full attention named none in five samples. Scores
were read while runs were under way: this page was made with fewer samples before, and p is not corrected for those
looks. Needles are asked in the order of their depth, so a budget counts when all were asked. Where a table has a dash,
the method needs more bytes: KIVI a fifth of them, Quest those of a page.
No paper whose tables `make paper-tables` knows ran these two models, so no published figure stands here; that command
puts published figures beside runs of the papers' own models.
"""
REGISTER = """\
## What was tested

{n} comparisons were fixed in [plots/contrasts.py](../plots/contrasts.py). "Known before" is the number of the task's
samples, the first ones, whose scores were known when the comparison was chosen. Only later samples test it, and n is
their number. p is corrected over all {n}; one without samples counts as if its p were the largest. Intervals are not
corrected. Groups further down are corrected over the pairs at a budget alone, and the ranks in figures over a method's
own comparisons. So groups may tell two methods apart that this table does not, and ranks two that groups do not.

{table}
"""
REST = """\
## All methods at one budget

The methods above, and those that papers compare less often, on the same samples.

{commands}

{table}

**Bold**: shown to be better than {beside} (paired test, corrected over the methods of a column). \\* full attention is
shown to be better. In parentheses: the 95 % interval. A dash: the method needs more bytes, chooses by a question that
is hidden, or needs a table that is not there for this model. Left out are methods whose least size is more than a
quarter of the bytes (ShadowKV, ThinK), those that learned gates decide for (KVzap, Fast KVzip, DMS), and those that
work while the answer grows. A method that fetches pays for its index with tokens that it might choose;
[cited.md](cited.md) counts tokens, and there an index costs none. Oracle reads every key: a reference, no method to
deploy.

All figures: {files}.
"""
BESIDE = "snapkv"  # what papers compare with first
GGUF = """\
`qwen2.5-coder-0.5b` was read from Qwen's own GGUF file (Q4_K_M, `model.id=FILE`; its sha256 is in
[conf/model](../conf/model/qwen2.5-coder-0.5b.yaml)), `smollm2-135m` is the embedded model.
"""


@dataclass(frozen=True)
class Finding:
    """A comparison that a reader should remember, if it is shown."""

    contrast: Contrast
    words: str  # with {one}, {other}, {share} and the two scores {a}, {b}
    beside: Contrast | None = None  # a second one
    beside_words: str = ""
    is_turned: bool = False  # the second must be shown, and the other way round; else it is told if it agrees


DOCS, NEEDLES, SHARED = CONTRASTS[:6], CONTRASTS[6:8], CONTRASTS[10]
FINDINGS = (
    Finding(
        DOCS[0],
        "**Hide the question, and a method that keeps what the prompt's end attends to loses its answers**: at {share} "
        "of the bytes {one} scores {a} with the question hidden and {b} with it shown.",
        NEEDLES[1],
        "Of needles that are names it finds {a} of 100 with the question hidden and {b} with it shown.",
    ),
    Finding(
        DOCS[1],
        "**A method that fetches what each step needs loses far less**: with the question hidden, {one} scores {a} at "
        "{share} of the bytes, {other} {b}.",
    ),
    Finding(
        DOCS[2],
        "**Reading the prompt twice stands in for the question**: with it hidden, {one} scores {a} at {share} of the "
        "bytes, {other} {b}.",
        NEEDLES[0],
        "Of needles of seven digits {one} finds {a} of 100, {other} {b}.",
    ),
    Finding(
        DOCS[3],
        "**The same method fails where bytes are fewest**: with the question shown, {one} scores {a} at {share} "
        "of the bytes, {other} {b}.",
    ),
    Finding(
        SHARED,
        "**One compressed context can serve many questions**: with eight questions asked afterwards, {one} scores {a} "
        "at {share} of the bytes, {other} {b}.",
    ),
    Finding(
        DOCS[4],
        "**Fewer bits are not free**: {one} keeps every token at {share} of the bytes and scores {a}, full attention "
        "{b}.",
    ),
    Finding(
        DOCS[5],
        "**No eviction reaches full attention at {share} of the bytes**: with the question shown, the best of them, "
        "{one}, scores {a}, full attention {b}.",
    ),
    Finding(
        LOOKED[0],
        "**Which needle is hidden decides who finds it**: of seven digits {one} finds {a} of 100 at {share} of the "
        "bytes, {other} {b}, the question shown.",
        LOOKED[1],
        "Of names {one} finds {a}, {other} {b}.",
        is_turned=True,
    ),
)
MOST = 5


def shown(finding: Finding, sets: Sequence[Scores]) -> str:
    """The finding with its numbers; "" where it was not asked or the test does not show it."""
    found = told(finding.contrast, finding.words, sets)
    if found is None or finding.beside is None:
        return "" if found is None else found[0]
    second = told(finding.beside, finding.beside_words, sets)
    if second is not None and (second[1] != found[1]) == finding.is_turned:
        return f"{found[0]} {second[0]}"
    return "" if finding.is_turned else found[0]


def told(contrast: Contrast, words: str, sets: Sequence[Scores]) -> tuple[str, int] | None:
    """Words with the numbers of the samples that test it, or of all; and which is better. None where not shown."""
    scores, fresh = contrast.of(sets), contrast.fresh(sets)
    if scores is None:
        return None
    found = outcomes(sets).get(contrast) or looked_at(contrast, scores)
    if found is None or not found.sign:
        return None
    ours, theirs = fresh or (scores.of[contrast.place], scores.of[contrast.beside])
    a, b = (f"{100 * mean(values):.0f}" for values in (ours, theirs))
    share = scores.asked.share(contrast.place[1])
    one, other = scores.label(contrast.place), scores.label(contrast.beside)
    words = words.format(one=one, other=other, a=a, b=b, share=share)
    kind = "the {} comparisons fixed beforehand" if fresh else "all {} of its kind, chosen afterwards"
    where = f"{scores.model}, `experiment={scores.asked.experiment}`"
    over = f"Holm over {kind.format(found.family)}"
    p = p_words(found.p, found.is_bound)
    p = p if p.startswith("<") else f"= {p}"
    difference = f"Difference {gap(found)}, n = {found.paired.n}, p {p} ({over}; {where})."
    return f"{words} {difference}", found.sign


def gap(found: Corrected) -> str:
    spread = found.paired.difference
    assert spread is not None
    return f"{100 * found.paired.mean:+.0f} ({100 * spread.low:+.0f} to {100 * spread.high:+.0f})"


def register(sets: Sequence[Scores]) -> str:
    """Every comparison that was fixed beforehand, whatever came of it."""
    found = outcomes(sets)
    rows = [[words_of(one, one.of(sets)), *numbers_of(one, found.get(one), one.of(sets))] for one in CONTRASTS]
    return markdown(Sheet(["comparison", "known before", "n", "difference", "p", "p after Holm", "shown"], rows))


def words_of(contrast: Contrast, scores: Scores | None) -> str:
    scope, memory, _ = contrast.place
    places = contrast.place, contrast.beside
    one, other = (title(place[2]) if scores is None else scores.label(place) for place in places)
    seen = "" if asked_of(contrast).has_tokens else f", {WORDS[scope]}"
    pair = "question hidden against shown" if contrast.against == OTHER_SCOPE else f"against {other}{seen}"
    task = asked_of(contrast)
    return f"{task.title}: {one} {pair}, {task.share(memory)}"


def asked_of(contrast: Contrast) -> Asked:
    return next(asked for asked in SETS if asked.key == contrast.asked)


def numbers_of(contrast: Contrast, found: Corrected | None, scores: Scores | None) -> list[str]:
    if found is None:
        is_low = scores is not None and not contrast.has_room(scores)
        return [str(contrast.seen), *[ABSENT] * 4, "too few answers" if is_low else "not yet"]
    p = p_words(found.paired.p, is_bound(found.paired.p)), p_words(found.p, found.is_bound)
    return [str(contrast.seen), str(found.paired.n), gap(found), *p, "yes" if found.sign else "no"]


# --- tasks ---------------------------------------------------------------------------------------


def section(scores: Scores, every: Mapping[str, str] | None = None) -> str:
    """A task's part; of `every` method of the page, by its name, it says which were not asked."""
    asked = scores.asked
    ns = "; ".join(asked_so_far(scores, scope) for scope in scores.scopes)
    parts = [
        f"## {asked.title}",
        f"{asked.about} {scores.model}; {ns}{lengths_of(scores)}.{left_out(scores, every or {})}",
        f"    python run.py -m experiment={asked.experiment}",
    ]
    if tight := [column for column in scores.columns if scores.is_tight(*column)]:
        parts.append(what_can_be_lost(scores, min(tight, key=lambda column: scores.answered(*column))))
    if not scores.is_comparable:
        return "\n\n".join(parts) + "\n"
    by = "tokens" if asked.has_tokens else "share of the bytes"
    parts += [f"![{asked.title}: methods by {by}]({NAME}/{asked.key}.svg)", table(scores)]
    parts += ["\n".join(f"- {line}" for line in groups(scores))]
    parts.append(
        f"All figures, with differences, p-values, ranks and bytes held: [{asked.key}.csv]({NAME}/{asked.key}.csv)."
    )
    return "\n\n".join(parts) + "\n"


def lengths_of(scores: Scores) -> str:
    """Lengths of prompts, the question in them: the median and both ends."""
    if not (tokens := scores.prompts):
        return ""
    return f"; prompts of {conditions.typical(scores):,} tokens ({tokens[0]:,} to {tokens[-1]:,})"


def rest(sets: Sequence[Scores]) -> list[str]:
    """The part on all methods at one budget: a table of all tasks where they were asked."""
    sets = [one for one in sets if one.is_comparable]
    if not sets:
        return []
    columns = [(one, *column) for one in sets for column in one.columns]
    names = {name for one in sets for name in one.methods}
    of = {name: [100 * mean(one.of[s, m, name]) for one, s, m in columns if (s, m, name) in one.of] for name in names}
    ahead = [ahead_of(one, s, m) for one, s, m in columns]
    heads = ["method", *(f"{one.asked.title}, {one.asked.column(s, m)}; n = {one.n(s, m)}" for one, s, m in columns)]
    rows = [["Full", *(f"{100 * mean(one.full(s, m)):.0f}" for one, s, m in columns)]]
    for name in sorted(names, key=lambda name: (-fsum(of[name]) / len(of[name]), name)):
        cells = [cell(one, (s, m, name)) for one, s, m in columns]
        cells = [bold(words) if name in them else words for words, them in zip(cells, ahead, strict=True)]
        labels = [(one.label((s, m, name)), s, f"{one.asked.title}, {one.asked.column(s, m)}") for one, s, m in columns
                  if (s, m, name) in one.of]  # fmt: skip
        rows.append([row_name(labels), *cells])
    commands = dict.fromkeys(f"    python run.py -m experiment={one.asked.experiment}" for one in sets)
    files = ", ".join(f"[{one.asked.key}.csv]({NAME}/{one.asked.key}.csv)" for one in sets)
    return [
        REST.format(commands="\n".join(commands), table=markdown(Sheet(heads, rows)), files=files, beside=title(BESIDE))
    ]


def ahead_of(scores: Scores, scope: str, memory: str) -> set[str]:
    """Methods that are shown to be better than the one that papers compare with first, corrected over all methods."""
    of = {name: scores.of[scope, memory, name] for name in scores.methods if (scope, memory, name) in scores.of}
    found = corrected({name: less(of[name], of[BESIDE]) for name in of if name != BESIDE} if BESIDE in of else {})
    return {name for name, one in found.items() if one.sign > 0}


def bold(words: str) -> str:
    """A cell with its score in bold."""
    score, *more = words.split(" ", 1)
    return " ".join([f"**{score}**", *more])


def what_can_be_lost(scores: Scores, column: tuple[str, str]) -> str:
    """How large a loss the samples can show, where it is half of what full attention has, or more."""
    answered, least, level = scores.answered(*column), scores.least_lost(column[0]), 100 * mean(scores.full(*column))
    told = f"Full attention scores {level:.0f}, and above 0 on {answered} of {scores.n(*column)} samples."
    if not scores.has_room(*column):
        return f"{told} To be shown to be worse, a method would have to lose on {least}: no comparison is possible."
    return (
        f"{told} A method is shown to be worse only where it does worse on {least} of those and better on none: "
        "smaller losses cannot be seen here."
    )


def left_out(scores: Scores, every: Mapping[str, str]) -> str:
    """Words on other tasks' methods; those that cut while they answer are no other task's."""
    names = [] if scores.asked.has_tokens else sorted(every[name] for name in {*every} - {*scores.methods})
    return f" Not asked: {listed(names)}." if names else ""


def asked_so_far(scores: Scores, scope: str) -> str:
    """How many samples there are at each budget, and of how many, where the experiment was stopped."""
    ns: dict[int, list[str]] = {}
    for each, memory in scores.columns:
        if each == scope:
            ns.setdefault(scores.n(scope, memory), []).append(scores.asked.share(memory))
    found = ", ".join(f"n = {n}" + (f" at {' and '.join(at)}" if len(ns) > 1 else "") for n, at in ns.items())
    words = found if scores.asked.has_tokens else f"{WORDS[scope]}: {found}"
    return words if min(ns) >= scores.asked.n else f"{words}, of {scores.asked.n} that the experiment asks"


def table(scores: Scores) -> str:
    """Methods down; budgets across, within each scope. * marks a shown difference to full attention."""
    has_lengths = scores.asked.has_tokens
    heads = ["method", *(scores.asked.column(*column) for column in scores.columns)]
    rows = [["Full", *(f"{100 * mean(scores.full(*column)):.0f}" for column in scores.columns)]]
    rows += [
        [scores.name(name), *(cell(scores, (*place, name)) for place in scores.columns)] for name in scores.methods
    ]
    if has_lengths:
        heads += ["answer in tokens", "cut off"]
        for name, row in zip((FULL, *scores.methods), rows, strict=True):
            row += lengths(scores, (*scores.columns[0], name))
    note = "\\* full attention is shown to be better. In parentheses: the 95 % interval."
    return f"{markdown(Sheet(heads, rows))}\n\n{note}"


def lengths(scores: Scores, place: tuple[str, str, str]) -> list[str]:
    """Lengths of answers: a longer one costs more, and one that was cut off is wrong."""
    if place not in scores.costs:
        return [ABSENT, ABSENT]
    return [f"{scores.costs[place].tokens:.0f}", f"{100 * scores.costs[place].cut_off:.0f} %"]


def cell(scores: Scores, place: tuple[str, str, str]) -> str:
    if place not in scores.of:
        return ABSENT
    found = interval([*scores.of[place].values()])
    ends = "" if found is None else f" ({100 * found.low:.0f} to {100 * found.high:.0f})"
    star = " *" if scores.against_full[place].sign < 0 else ""
    return f"{100 * mean(scores.of[place]):.0f}{ends}{star}"


def groups(scores: Scores) -> list[str]:
    """Words on who is ahead at each budget, with all that cannot be told from the best."""
    found = []
    for scope, memory in scores.columns:
        best, worse = scores.groups(scope, memory)
        where = scores.asked.column(scope, memory)
        where = f"{where[0].upper()}{where[1:]}:"
        labels = [scores.label((scope, memory, name)) for name in best]
        names = listed(labels)
        if len(best) == 1:
            found.append(f"{where} {names} is ahead of all others.")
        elif not worse:
            found.append(f"{where} no method is shown to be behind {labels[0]}, the highest mean.")
        else:
            found.append(f"{where} {names} cannot be told apart from the best; {others(len(worse))} behind it.")
    return found


def others(n: int) -> str:
    return "one other is" if n == 1 else f"{n} others are"


def full_table(path: Path, scores: Scores) -> None:
    rows = []
    for scope, memory in scores.columns:
        head, n = [WORDS[scope], memory], scores.n(scope, memory)
        full = [*head, "Full", n, *numbers(scores, (scope, memory, FULL))]
        beside = [1, *lengths(scores, (scope, memory, FULL))]
        rows.append([*full, *[""] * (len(HEADS) - len(full) - len(beside)), *beside])
        places = {name: (scope, memory, name) for name in scores.methods if (scope, memory, name) in scores.of}
        ranks = rank_ranges({name: scores.of[place] for name, place in places.items()})
        for name, place in places.items():
            beside = [*against(scores, place), *ranks[name], f"{scores.held(place):.3g}", *lengths(scores, place)]
            rows.append([*head, scores.label(place), n, *numbers(scores, place), *beside])
    write_csv(path, [*HEADS], rows)


def numbers(scores: Scores, place: tuple[str, str, str]) -> list[str]:
    found = interval([*scores.of[place].values()])
    ends = ["", ""] if found is None else [f"{100 * end:.1f}" for end in (found.low, found.high)]
    return [f"{100 * mean(scores.of[place]):.1f}", *ends]


def against(scores: Scores, place: tuple[str, str, str]) -> list[str]:
    found = scores.against_full[place]
    spread = found.paired.difference
    ends = ["", ""] if spread is None else [f"{100 * end:.1f}" for end in (spread.low, spread.high)]
    below = ["p"] * is_bound(found.paired.p) + ["p after Holm"] * found.is_bound
    p = f"{found.paired.p:.4g}", f"{found.p:.4g}", ", ".join(below)
    return [f"{100 * found.paired.mean:.1f}", *ends, *p, str(found.family)]


# --- the page ------------------------------------------------------------------------------------


def page(sets: Sequence[Scores]) -> str:
    shown_ones = [words for finding in FINDINGS if (words := shown(finding, sets))][:MOST]
    findings = "\n".join(f"{i}. {words}" for i, words in enumerate(shown_ones, start=1))
    models = " and ".join(f"`{name}`" for name in dict.fromkeys(one.model for one in sets))
    short = GGUF if any(one.model.startswith("qwen") for one in sets) else ""
    beside = [one for one in sets if one.asked.others_of]
    sets = [one for one in sets if not one.asked.others_of]
    every: dict[str, str] = {}
    for one in sets:
        every |= {name: one.name(name) for name in one.methods if not one.asked.has_tokens and name not in every}
    fetching = listed(called for name, called in every.items() if fetches(name))
    found = findings or "No comparison is shown."
    said = conditions.head([conditions.of_comm(sets), conditions.collapse(sets)])
    head = HEAD.format(
        conditions=said, models=models, fetching=fetching or "none here", findings=found, kept=KEPT, short=short
    )
    tested = REGISTER.format(n=len(CONTRASTS), table=register(sets))
    return "\n".join([head, tested, *(section(one, every) for one in sets), *rest(beside)])


def write(out: Path, runs: Path | None) -> list[Path]:
    folder = out / NAME
    folder.mkdir(parents=True, exist_ok=True)
    if runs is not None:
        kept = load(folder / KEPT) if (folder / KEPT).exists() else []
        keep(folder / KEPT, renewed(kept, read(runs)))
    sets = gathered(load(folder / KEPT))
    paths = []
    with matplotlib.rc_context({**style.RC, **SVG}):
        for one in filter(lambda one: one.is_comparable, sets):
            if not one.asked.others_of:
                save(picture(one), folder / f"{one.asked.key}.svg")
                paths.append(folder / f"{one.asked.key}.svg")
            full_table(folder / f"{one.asked.key}.csv", one)
            paths.append(folder / f"{one.asked.key}.csv")
    (out / f"{NAME}.md").write_text(page(sets), encoding="utf-8")
    return [out / f"{NAME}.md", *paths]


def main(arguments: Sequence[str]) -> int:
    return run("kvbench.plots.findings", "Write docs/results.md.", write, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
