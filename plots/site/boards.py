"""What the leaderboard says of runs besides the report's comparisons: the ranks that each may have, and its machine.

A rank is a range: a run ranks after those that are shown to be better and ahead of those that are shown to be worse.
Only runs that somebody could deploy are ranked, among those of one column, budget and comm. Scores and times are never
one number: times are compared on one machine with one set of versions.

Not here: differences to full attention, intervals (`plots/site/compare.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.plots.read import Run
from kvbench.plots.run_sets import is_deployable
from kvbench.plots.scored import Scored
from kvbench.plots.site.compare import AVERAGE, rows_of
from kvbench.plots.stats import rank_ranges
from kvbench.results import METRICS, few_samples

MOST_RANKED = 80  # of a column: all pairs are tested


def rank_all(runs: Sequence[Run], described: Sequence[dict[str, Any]]) -> None:
    """Give each part its `rank`, two numbers or None, and the column's reason where nothing can be ranked."""
    columns: dict[tuple[str, str, str], list[tuple[Run, dict[str, Any]]]] = {}
    for run, told in zip(runs, described, strict=True):
        for part in told["parts"]:
            part["rank"], part["unranked"] = None, ""
            if is_deployable(run) and not told["full"] and part["n"]:
                columns.setdefault((part["dataset"], told["budget"], told["comm"]), []).append((run, part))
    for members in columns.values():
        fit = [(run, part) for run, part in members if not part["over"]]
        for _, part in members:
            part["unranked"] = "" if not part["over"] else "over its budget"
        why = why_not(fit)
        for _, part in fit if why else ():
            part["unranked"] = why
        if why:
            continue
        scores = {str(i): Scored.of(rows_of(run, part)).samples for i, (run, part) in enumerate(fit)}
        better = METRICS[fit[0][1]["metric"]].better
        for i, ranks in rank_ranges(scores, better).items():
            fit[int(i)][1]["rank"] = list(ranks)


def why_not(members: Sequence[tuple[Run, Mapping[str, Any]]]) -> str:
    """Why the runs of a column cannot be ranked; "" where they can."""
    if len(members) < 2:
        return "nothing to rank it against"
    if len({part["metric"] for _, part in members}) > 1:
        return "not rankable: scores of several metrics"
    if len(members) > MOST_RANKED:
        return f"not rankable: {len(members)} runs in one column; filters choose fewer"
    words = few_samples(min(part["n"] for _, part in members))
    return f"not rankable: {words}" if words else ""


def machine(run: Run) -> str:
    """The machine on which times may be compared: the device, and the versions of what computes."""
    env = run.environment()
    device = str(env.get("gpu") or env.get("cpu") or "unknown")
    versions = {key: run.result.versions[key] for key in ("torch", "triton", "python") if key in run.result.versions}
    said = " ".join(f"{key} {value}" for key, value in versions.items())
    return f"{run.result.device}: {device}, {env.get('n_cores', '?')} cores, {run.result.dtype}, {said}"


def evidence(benchmark: str, described: Sequence[dict[str, Any]], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A line per compressed run for the pages of methods: what it cost and how it compares, of averages if any."""
    found: list[dict[str, Any]] = []
    for run, told in zip(runs, described, strict=True):
        if told["full"]:
            continue
        average = [one for one in told["parts"] if one["dataset"] == AVERAGE]
        part = (average or told["parts"])[0]
        if part["score"] is None:
            continue
        pair, scale = part["paired"], METRICS[part["metric"]].scale
        if pair is not None and few_samples(pair["n"]):
            pair = None  # few samples speak for nobody
        found.append({
            "at": benchmark, "key": told["key"], "method": run.method, "variant": told["variant"],
            "share": part["cost"]["memory"] if part["cost"]["memory"] is not None else part["cost"]["share"],
            "host": bool(told["audit"]["bytes_resident_host"]), "moved": part["cost"]["moved"],
            "score": scale * part["score"], "metric": part["metric"], "n": part["n"], "over": part["over"],
            "less": None if pair is None else pair["sign"] < 0, "p": None if pair is None else pair["holm"],
            "p_is_bound": None if pair is None else pair["holm_is_bound"],
            "mean": None if pair is None else (1 if pair["unit"] else scale) * pair["mean"],
            "rank": part["rank"], "of_answers": run.result.budget_counts is not None,
            "answer": run.result.answer_tokens_mean, "question": run.result.protocol == "full_prompt",
            "whole": told["whole_layers"], "unpriced": told["unpriced"],
            "learned": run.setting("method_data_digest") is not None,
        })  # fmt: skip
    return found
