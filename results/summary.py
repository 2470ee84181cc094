"""From the rows of a run to its result, as pure functions: means, `combined_ci95`, `summarise`.

The order of the rows never matters, so a run that was stopped says the same as one that was not.

Not here: what an interval is (`results/intervals.py`), statistics over runs (`plots/stats.py`).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import comb, exp, fsum, log
from typing import Any, cast

from kvbench.results.intervals import hits, interval
from kvbench.results.schema import LEDGER_MEANS, METRICS, OFF, SCHEMA_VERSION, STATUSES, RunFacts, RunResult, SampleRow
from kvbench.results.scores import Scores, describe


def mean(values: Iterable[float | None]) -> float | None:
    """Mean over what was measured; fsum is exact, so the order of the samples does not matter."""
    measured = [value for value in values if value is not None]
    return fsum(measured) / len(measured) if measured else None


def combined(rows: Iterable[SampleRow], metric: str | None = None) -> float | None:
    """The score of a run from those of its samples: their mean, or of perplexities exp of the mean loss."""
    return combined_of([pair for each in by_sample(rows, metric) for pair in each], metric)


def combined_ci95(rows: Iterable[SampleRow], metric: str | None = None) -> list[float] | None:
    """The 95 % interval of what `combined` says; None where a single sample, or none, has a score."""
    return interval_of(by_sample(rows, metric), metric)


Weighed = Sequence[tuple[float, int]]  # scores with their weights


def by_sample(rows: Iterable[SampleRow], metric: str | None) -> list[list[tuple[float, int]]]:
    """Scores and weights of the lines of each sample."""
    key, samples = METRICS[metric or "score"].weight, dict[str, list[tuple[float, int]]]()
    for row in rows:
        if row.score is not None:
            weight = 1 if key is None else int(row.fields[key])
            samples.setdefault(row.sample_id, []).append((row.score, weight))
    return list(samples.values())


def combined_of(scored: Weighed, metric: str | None = None) -> float | None:
    """The mean of scores, or of perplexities exp of the mean loss."""
    if METRICS[metric or "score"].weight is None or not scored:
        return mean(score for score, _ in scored)
    return exp(fsum(log(score) * n for score, n in scored) / sum(n for _, n in scored))


def interval_of(samples: Sequence[Weighed], metric: str | None = None) -> list[float] | None:
    """The 95 % interval of the mean of samples' scores.

    Turns and draws of one sample are not independent: they count as one, with their mean.
    """
    kind = METRICS[metric or "score"]
    if kind.weight is None:
        means = [fsum(score for score, _ in of) / len(of) for of in samples]
        found = interval(means, kind.bounds, [len(of) for of in samples])
        return None if found is None else [found.low, found.high]
    low, high = kind.bounds
    losses = [fsum(n * log(score) for score, n in of) / sum(n for _, n in of) for of in samples]
    found = interval(losses, (log(low), log(high)), [sum(n for _, n in of) for of in samples])
    return None if found is None else [exp(found.low), exp(found.high)]


def hits_of(rows: Iterable[SampleRow], metric: str | None = None) -> str:
    """The words for few samples that are all right or wrong, turns and draws of one together; "" of others."""
    means = [fsum(score for score, _ in of) / len(of) for of in by_sample(rows, metric)]
    return hits(means) if METRICS[metric or "score"].is_share else ""


def means_of_measures(rows: Sequence[SampleRow]) -> dict[str, float | None] | None:
    """Means of what a task's samples carry as `measures`, a null being no measurement; None without any."""
    each = [cast(dict[str, Any], row.fields["measures"]) for row in rows if "measures" in row.fields]
    names = dict.fromkeys(name for measures in each for name in measures)
    return {name: mean(measures.get(name) for measures in each) for name in names} or None


def costs(rows: Sequence[SampleRow], full: Sequence[SampleRow]) -> dict[str, Any]:
    """What answers cost in tokens and entries; `full` are lines of full attention on the same prompts."""
    answers = [row for row in rows if "cut_off" in row.fields]
    peaks = [peak for row in answers if (peak := row.ledger.get("peak_entries")) is not None]
    reached = [row.ledger.get("reached_steps") for row in rows]
    return {
        "answer_tokens_mean": mean(row.generated_tokens for row in answers),
        "cut_off_share": mean(bool(row.fields["cut_off"]) for row in answers),
        "peak_entries": max(peaks, default=None),  # memory is bought for the largest
        "footprint": mean(row.ledger.get("footprint") for row in answers),
        "footprint_vs_full": footprint_vs_full(answers, full),
        "reached_answers": mean(None if share is None else float(share > 0) for share in reached),
        "reached_steps": mean(reached),
    }


def footprint_vs_full(rows: Sequence[SampleRow], full: Sequence[SampleRow]) -> float | None:
    """Entries of answers relative to those of full attention on the same prompt, mean over its draws."""
    entries = {each[0].sample_id: mean(row.ledger.get("footprint_entries") for row in each) for each in by_prompt(full)}
    shares: list[float] = []
    for row in rows:
        own, of_full = row.ledger.get("footprint_entries"), entries.get(row.sample_id)
        if own is None or not of_full:
            return None
        shares.append(own / of_full)
    return mean(shares)


def extremes(values: Iterable[float | None]) -> list[float] | None:
    """The least and the most of what was measured."""
    found = [value for value in values if value is not None]
    return [min(found), max(found)] if found else None


def counts(rows: Iterable[SampleRow]) -> dict[str, int]:
    """How many samples have a line of each status; turns and draws of one do not count apart."""
    seen = {(row.status, row.sample_id) for row in rows}
    return {
        name: sum(status == of for of, _ in seen)
        for name, status in zip(("n_samples", "n_oom", "n_failed"), STATUSES, strict=True)
    }


def of_today(result: RunResult, rows: Iterable[SampleRow]) -> RunResult:
    """A result of an earlier version as it would be written now."""
    is_old = result.schema_version != SCHEMA_VERSION
    return replace(result, schema_version=SCHEMA_VERSION, **counts(rows)) if is_old else result


def summarise(rows: Sequence[SampleRow], facts: RunFacts, full: Sequence[SampleRow] = ()) -> RunResult:
    """What a finished run says of itself; the order of `rows` does not matter.

    `full` are the lines of the run of full attention that was asked the same, where there is one.
    """
    ok = [row for row in rows if row.status == "ok"]
    means: dict[str, Any] = {name: mean(row.ledger[key] for row in ok) for name, key in LEDGER_MEANS.items()}
    return RunResult(
        **vars(facts),
        **means,
        status=max((row.status for row in rows), key=STATUSES.index, default="ok"),
        **counts(rows),
        score=combined(ok, facts.metric),
        score_ci95=combined_ci95(ok, facts.metric),
        ratio=None if facts.ratio_exact is None else float(Fraction(facts.ratio_exact)),
        comm=None if facts.comm_exact == OFF else float(Fraction(facts.comm_exact)),
        index_share=mean(row.ledger.get("index_share") for row in ok),
        within_budget=all(row.ledger["within_budget"] for row in ok) if ok else None,
        prefill_s=mean(row.prefill_s for row in ok),
        tpot_s=mean(row.tpot_s for row in ok),
        batch_rows_mean=mean(row.batch_rows for row in ok),
        measures=means_of_measures(ok),
        probe_s=mean(row.fields.get("probe_s") for row in ok),
        prefill_share=mean(row.fields.get("prefill_share") for row in ok),
        prefill_estimate=mean(row.fields.get("prefill_estimate") for row in ok),
        resident_share=mean(row.ledger.get("resident_share") for row in ok),
        moved_bytes_per_step=mean(row.ledger.get("moved_bytes_per_step") for row in ok),
        bytes_index_read_per_step=mean(row.ledger.get("bytes_index_read_per_step") for row in ok),
        bytes_prefill_peak=mean(row.ledger.get("bytes_prefill_peak") for row in ok),
        bytes_comm_per_step=mean(row.ledger.get("bytes_comm_per_step") for row in ok),
        pseudo_tokens_mean=mean(row.ledger.get("pseudo_tokens_mean") for row in ok) or None,
        **costs(ok, [row for row in full if row.status == "ok"]),
        effective_ratios=extremes(row.ledger.get("effective_ratio") for row in ok) if facts.adapts else None,
        pass_at_k=pass_at_k(ok) if METRICS[facts.metric or "score"].is_share else None,
    )


def with_scores(result: RunResult, rows: Sequence[SampleRow], scores: Scores | None) -> RunResult:
    """The result of a run whose rows have other scores now; `scores` are laid over the rows already."""
    ok = [row for row in rows if row.status == "ok"]
    metric = next((row.fields.get("metric") for row in ok), result.metric)
    return replace(
        result,
        score=combined(ok, metric),
        score_ci95=combined_ci95(ok, metric),
        metric=metric,
        measures=means_of_measures(ok),
        pass_at_k=pass_at_k(ok) if METRICS[metric or "score"].is_share else None,
        **describe(scores),
    )


def disagreement(result: RunResult, rows: Collection[SampleRow]) -> str | None:
    """What a result says that its samples do not, or None."""
    own, found = (result.n_samples, result.n_oom, result.n_failed), tuple(counts(rows).values())
    if result.schema_version == 1:
        found = tuple(sum(row.status == status for row in rows) for status in STATUSES)
    if own != found:
        return "{} samples, {} oom and {} failed, samples.jsonl {}, {} and {}".format(*own, *found)
    kind = METRICS[result.metric or "score"]
    if any(METRICS[row.fields.get("metric", "score")] != kind for row in rows if row.score is not None):
        return "another metric than samples.jsonl"
    same = result.score == combined(rows, result.metric)
    return None if same else "another score than samples.jsonl"


# --- several answers to one prompt ---


def by_prompt(rows: Iterable[SampleRow]) -> list[list[SampleRow]]:
    """Lines of one prompt together."""
    found: dict[str, list[SampleRow]] = {}
    for row in rows:
        found.setdefault(row.sample_id, []).append(row)
    return list(found.values())


def chance_of_one(n: int, n_right: int, k: int) -> float:
    """The chance that of `k` answers out of `n`, of which so many are right, one at least is: without bias."""
    assert 1 <= k <= n and 0 <= n_right <= n, (n, n_right, k)
    return 1 - comb(n - n_right, k) / comb(n, k)


def pass_at_k(rows: Sequence[SampleRow]) -> dict[str, float | None] | None:
    """pass@k by k = 1, 2, 4 … up to the draws of a prompt; None without draws, or where an answer is partly right."""
    drawn = [row for row in rows if "draw" in row.fields]
    if not drawn or any(row.score not in (0, 1) for row in drawn):
        return None
    prompts = by_prompt(drawn)
    n = min(map(len, prompts))
    ks = [1 << i for i in range(n.bit_length()) if 1 << i < n] + [n]
    right = [(len(each), sum(row.score == 1 for row in each)) for each in prompts]
    return {str(k): fsum(chance_of_one(*counts, k) for counts in right) / len(right) for k in ks}
