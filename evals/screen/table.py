"""The table that ends a run: each result next to what it really cost.

What all rows share stands once above the table, the folders stand below it. It fits 100 columns where the names of
methods do; numbers are never cut, so on a narrower terminal the lines wrap. "-" was not measured.

Not here: tables over many runs (`plots/tables/`), which read the folders again.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvbench.results import EXACT, METRICS, RunResult, few_samples, read_samples
from kvbench.results.sheet import Sheet, show, without_shared
from kvbench.results.summary import hits_of

TEXTS = ("model", "task", "budget", "comm", "scope", "seed")  # columns only where they differ
Figure = tuple[str, str, int, float]  # what one value says for all rows; key of result.json, digits, unit
NUMBERS: dict[str, Figure] = {  # after the score, its interval and n
    "tokens\nattended": ("{} tokens attended", "tokens_attended_mean", 1, 1),
    "prompt\nbudget": ("{} of the prompt's tokens as budget", "tokens_budget_mean", 1, 1),
    "KV KB\n/step": ("{} KB of K and V moved a step", "bytes_moved_kv_per_step", 1, 1e3),
    "find KB\n/step": ("{} KB read a step to find tokens", "bytes_find_per_step", 1, 1e3),
    "device\nMB": ("{} MB on the device", "bytes_resident_device", 1, 1e6),
    "reading\nMB": ("{} MB of K and V at most while the prompt is read", "bytes_prefill_peak", 1, 1e6),
    "host\nMB": ("{} MB on the host", "bytes_resident_host", 1, 1e6),
    "prefill\ns": ("prefill {} s", "prefill_s", 2, 1),
    "s\n/token": ("{} s a token", "tpot_s", 3, 1),
}
SPARSE: dict[str, Figure] = {  # of runs after a sparse prefill
    "pairs\nread": ("{} of the prompt's pairs of query and key computed", "prefill_share", 3, 1)
}
ANSWERS: dict[str, Figure] = {  # of runs that draw answers, or whose budget counts them
    "answer\ntokens": ("{} tokens an answer", "answer_tokens_mean", 1, 1),
    "cut\noff": ("{} of the answers cut off", "cut_off_share", 2, 1),
    "peak\nentries": ("at most {} entries a step", "peak_entries", 1, 1),
    "of own\nlength": ("{} of full attention's entries for as long an answer", "footprint", 3, 1),
    "of Full's\nanswers": ("{} of the entries of Full's answers", "footprint_vs_full", 3, 1),
}
TIMES = ("prefill\ns", "s\n/token")  # which a sweep shares
NO_MATTER = "any"  # budget and comm of full attention
UNEQUAL = 0.05  # of a budget, by which mean entries of rows may differ that are compared
MANY = 8  # folders; of more the first and the last are said
FEW = 3  # methods that a note names
Done = Sequence[tuple[Path, RunResult]]


def print_table(done: Done) -> None:
    """Print the table to standard output, as wide as it has to be."""
    made = sheet(done)
    below = [*remarks([result for _, result in done]), *folders([path for path, _ in done])]
    show(replace(made, notes=below), fits=True)


def sheet(done: Done) -> Sheet:
    """A row per run, above it what all rows share; runs of full attention that differ in a budget alone are one."""
    results = distinct([result for _, result in done])
    shown = [(path, result) for path, result in done if any(result is one for one in results)]
    measures = measured(results)
    pairs = SPARSE if any(result.prefill_share is not None for result in results) else {}
    about = ANSWERS if any(result.budget_counts or result.sampling for result in results) else {}
    narrow_names = (name.replace("_length", "\nlength") for name in measures)
    heads = ["method", *TEXTS, score_name(results), "95 %", "n", *pairs, *narrow_names, *about, *NUMBERS]
    rows = [
        [
            label(result, results), *texts(result), *score(path, result), *figures(result, pairs),
            *(number((result.measures or {}).get(name), 4) for name in measures), *figures(result, about | NUMBERS),
        ]
        for path, result in shown
    ]  # fmt: skip
    # A score and its interval stay where they are looked for, and a single run's costs do.
    shared = {head: NUMBERS[head] for head in (NUMBERS if len(results) > 1 else TIMES)} | about | pairs
    narrow, words = without_shared(Sheet(heads, rows), dict.fromkeys(TEXTS, "{}"), [NO_MATTER])
    made, said = without_shared(narrow, {"n": "n = {}"} | {head: saying for head, (saying, *_) in shared.items()})
    n_keys = 1 + sum(head in TEXTS for head in made.heads)
    return replace(made, n_keys=n_keys, about="\n".join(" · ".join(line) for line in (words, said) if line))


def figures(result: RunResult, columns: Mapping[str, Figure]) -> list[str]:
    """What a row says of some columns; one over its budget is marked, and an exact prefill computes all."""
    values = {key: getattr(result, key) for _, key, *_ in columns.values()}
    if values.get("prefill_share", 0) is None and result.prefill == EXACT:
        values["prefill_share"] = 1.0
    return [
        ("!" if key == "tokens_attended_mean" and result.within_budget is False else "")
        + number(values[key], digits, unit)
        for _, key, digits, unit in columns.values()
    ]


def label(result: RunResult, results: Sequence[RunResult]) -> str:
    """The method, by which parameters it differs from others of its name, and how it failed."""
    failed = {"ok": [], "oom": ["(out of memory)"]}.get(result.status, ["(NaN)"])
    return " ".join([result.method_label, *varied(result, results), *failed])


def distinct(results: Sequence[RunResult]) -> list[RunResult]:
    """Each result once: full attention answers the same whatever budget and comm it was given."""
    kept: dict[Any, RunResult] = {}
    for i, result in enumerate(results):
        is_full = attends_all(result)
        same = (texts(result), result.method_label, result.prefill, str(parameters(result)), result.status)
        kept.setdefault((*same, result.n_samples, result.score, result.dtype) if is_full else i, result)
    return list(kept.values())


def attends_all(result: RunResult) -> bool:
    """Whether every token took part in every step, and none was looked for."""
    is_whole = result.effective_ratio == 1 and result.budget_counts is None
    if result.memory_exact is not None:  # codes of all tokens are another answer at each byte budget
        return False
    return is_whole and not result.bytes_moved_meta_per_step and not result.bytes_searched_per_step


def folders(paths: Sequence[Path]) -> list[str]:
    """Where the runs lie, in the table's order: one by one, or the first and the last where they are many."""
    paths = list(dict.fromkeys(near(path) for path in paths))
    if len(paths) == 1:
        return [f"folder: {paths[0]}"]
    if not paths:
        return []
    parent = Path(os.path.commonpath([path.parent for path in paths]))
    names = [path.relative_to(parent).as_posix() for path in paths]
    if len(names) <= MANY:
        return [f"folders, in {parent}:", *(f"  {name}" for name in names)]
    return [f"folders: {len(names)} in {parent}, from", f"  {names[0]} to", f"  {names[-1]}"]


def near(path: Path) -> Path:
    """A path from where the command was given, if it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path


def varied(result: RunResult, results: Sequence[RunResult]) -> list[str]:
    """The parameters that tell this run from others of its method and prefill, as `key=value`."""
    alike = [parameters(other) for other in results if (other.method, other.prefill) == (result.method, result.prefill)]
    return [
        f"{key}={value}" for key, value in parameters(result).items() if any(other.get(key) != value for other in alike)
    ]


def parameters(result: RunResult) -> dict[str, Any]:
    """The method's own, and the prefill's."""
    return result.params | {f"prefill.{k}": v for k, v in result.prefill_params.items()}


def texts(result: RunResult) -> tuple[str, ...]:
    """The columns of `TEXTS`."""
    budget, comm = (NO_MATTER, NO_MATTER) if attends_all(result) else (result.asked, f"comm {result.shown_comm}")
    task = f"{result.shown_dataset} ({result.data_source} data)"
    return result.model, task, budget, comm, result.protocol, f"seed {result.seed}"


def score_name(results: Iterable[RunResult]) -> str:
    """What the scores of a table are; "score" where they are different things."""
    names = {result.metric or "score" for result in results}
    return names.pop() if len(names) == 1 else "score"


def measured(results: Iterable[RunResult]) -> list[str]:
    """Names of the other figures that a task took, less the one that is its score."""
    names = ((name, result.metric or "score") for result in results for name in result.measures or ())
    return list(dict.fromkeys(name for name, own in names if name != own))


def score(path: Path, result: RunResult) -> tuple[str, ...]:
    """Score, interval, n; of shares in percent. Few samples have hits where all are right or wrong, and no interval."""
    is_few, scale = bool(few_samples(result.n_samples)), METRICS[result.metric or "score"].scale
    ci = None if is_few else result.score_ci95
    right = hits_of(read_samples(path), result.metric) if is_few and (path / "samples.jsonl").is_file() else ""
    ends = "-" if ci is None else " to ".join(f"{scale * end:.{1 if scale == 100 else 2}f}" for end in ci)
    return right or number(result.score, 1 if scale == 100 else 3, 1 / scale), ends, str(result.n_samples)


def number(value: float | None, digits: int, unit: float = 1) -> str:
    """A number with so many digits after the point, and none from 1,000 on."""
    return "-" if value is None else f"{value / unit:,.{0 if abs(value / unit) >= 1000 else digits}f}"


def remarks(results: Sequence[RunResult]) -> list[str]:
    """What no column says, each sentence once."""
    common = [note for note in results[0].notes if all(note in other.notes for other in results)]
    owners: dict[str, dict[str, None]] = {}
    for result in results:
        for note in result.notes:
            if note not in common:
                owners.setdefault(note, {})[result.method_label] = None
    lines = common + [f"{few([*names])}: {note}" for note, names in owners.items()]
    is_mixed = len({result.metric for result in results}) > 1
    for name, task in {(result.metric or "score", result.shown_task): None for result in results}:
        lines += [f"the score of {task} is its {name}"] if is_mixed and name != "score" else []
        lines += [f"{name}: lower is better"] if METRICS[name].better == "lower" else []
    lines += too_few(results)
    rows = max((result.batch_rows_mean or 1 for result in results), default=1)
    lines += [f"s/token is the time of a step that up to {rows:.0f} variants shared"] if rows > 1 else []
    lines += of_answers(results)
    searching = ", ".join(sorted({result.method_label for result in results if result.bytes_searched_per_step}))
    unpriced = {result.method_label: read for result in results if (read := unpriced_reads(result))}
    reads = ", ".join(f"{label} {read}" for label, read in sorted(unpriced.items()))
    lines += [
        sentence
        for sentence, holds in {
            "attended counts generated tokens too, which come on top of the prompt's budget": any(
                result.within_budget and not result.budget_counts and attends_more(result) for result in results
            ),
            "the first token of an answer comes from the prefill, not from the compressed cache": any(
                not METRICS[result.metric or "score"].of_reading and result.protocol == "full_prompt"
                for result in results
            ),
            "! attended to more tokens, or read more to find them, than the budget allows": any(
                result.within_budget is False for result in results
            ),
            "answers without a score yet: `python -m kvbench.evals.rescore --write FOLDER` gives them theirs": any(
                result.waits_for_scores for result in results
            ),
            f"reads more than any comm allows to find its tokens: {searching}": searching,
            f"comm sets how large an index is, and a step reads more of it on the device: {reads}": reads,
        }.items()
        if holds
    ]
    return list(dict.fromkeys(lines))


def attends_more(result: RunResult) -> bool:
    """Whether more tokens were attended to than the prompt's budget has."""
    attended, bound = result.tokens_attended_mean, result.tokens_budget_mean
    return attended is not None and bound is not None and attended > bound


def few(names: Sequence[str]) -> str:
    """Some of many names."""
    return "; ".join(names) if len(names) <= FEW else f"{'; '.join(names[:FEW])} and {len(names) - FEW} others"


def too_few(results: Sequence[RunResult]) -> list[str]:
    """Which tasks have too few samples to tell their variants apart."""
    groups: dict[tuple[str, ...], list[RunResult]] = {}
    for result in distinct(results):
        if result.score is not None:
            groups.setdefault((result.task, result.dataset, result.model, result.protocol), []).append(result)
    lines: list[str] = []
    for group in groups.values():
        name = f"{group[0].task}: " if len(groups) > 1 else ""
        few = few_samples(min(result.n_samples for result in group))
        lines += [f"{name}{few}"] if few else []
    return lines


def unpriced_reads(result: RunResult) -> str | None:
    """What a run within its budget read of its index, where that is more than `comm` prices."""
    read, allowed = result.bytes_index_read_per_step, result.bytes_comm_per_step
    if read is None or allowed is None or read <= allowed or result.within_budget is False:
        return None
    return f"{number(read, 1, 1e3)} of {number(allowed, 1, 1e3)} KB /step"


def of_answers(results: Sequence[RunResult]) -> list[str]:
    """What no column says of budgets of prompt and answer, and of answers that were drawn."""
    lines, counted = [], [result for result in results if result.budget_counts]
    for result in counted:
        if result.reached_answers is not None and result.reached_answers < 1:
            skips_before = not result.reached_answers and result.effective_ratio != 1  # a budget that is never reached
            others = "" if skips_before else "; the others are full attention's"
            lines.append(
                f"{result.method_label}, {result.asked}: {result.reached_answers:.0%} of the answers grew to the "
                f"budget{others}"
            )
    by_budget: dict[int | None, list[float]] = {}
    for result in counted:
        by_budget.setdefault(result.budget, []).append(result.tokens_attended_mean or 0)
    for budget, means in by_budget.items():
        if budget and max(means) - min(means) > UNEQUAL * budget:
            lines.append(
                f"rows with budget={budget} hold {min(means):.0f} to {max(means):.0f} entries a step on average, which "
                "is no equal cost; compare them by their entries"
            )
    full = [result for result in results if attends_all(result) and result.score is not None and result.sampling]
    for one, other in pairwise(full):
        if one.seed != other.seed and (one.model, one.task, one.dataset) == (other.model, other.task, other.dataset):
            lines.append(
                f"Full differs from itself by {abs((one.score or 0) - (other.score or 0)):.3f} between seeds "
                f"{one.seed} and {other.seed}; smaller differences are noise"
            )
    for result in results:
        if result.pass_at_k is not None:
            shown = ", ".join(f"pass@{k} {value:.3f}" for k, value in result.pass_at_k.items() if value is not None)
            lines.append(f"{result.method_label}, {'no budget' if attends_all(result) else result.asked}: {shown}")
    return lines
