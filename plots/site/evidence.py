"""The scores that the repository keeps next to its pages, as runs: what a site shows where nobody gives it other runs.

A method at a budget on one task is a run here. Its samples have scores and costs, and no answers: nobody can score
them again, so they are only reported. Samples of one context count as one, with their mean. Times are left to their
page.

Not here: how scores are kept (`plots/pages/read.py`).
"""
# pyright: basic

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.plots.pages.asked import DOCS, FULL, page
from kvbench.plots.pages.methods import title
from kvbench.plots.pages.read import KEPT, PLACE, SOURCES, Frame, kept
from kvbench.plots.site.origin import Kept
from kvbench.results import LEDGER_MEANS, RunFacts, SampleRow, config_hash, prompt_hash, summarise

SUBMISSIONS = DOCS / "submissions"
COSTS = ("bytes_resident_device", "bytes_resident_host", "bytes_prefill_peak")  # of a ledger, as far as they are kept
UNPRICED = frozenset({"oracle"})  # read all keys to find their tokens, which the kept scores do not say


def committed() -> list[Path]:
    """The submissions that stand in the repository, which have answers."""
    return sorted(path.parent for path in SUBMISSIONS.glob("*/manifest.json"))


def kept_runs() -> list[Kept]:
    """The runs of all scores that are here; none where KVBench is installed without its pages."""
    frames = {name: kept(name) for name in SOURCES if (DOCS / name / KEPT).is_file()}
    return [
        run_of(name, dict(zip(PLACE, place, strict=True)), rows)
        for name, frame in frames.items()
        for place, rows in frame.groupby([*PLACE], sort=False)
        if not page(name).sets[place[0]].is_cost
    ]


def run_of(name: str, place: dict[str, Any], rows: Frame) -> Kept:
    """A run that was never on a disk; what nobody kept is null, as in runs that did not measure it."""
    asked, method = page(name).sets[place["set"]], place["method"]
    task = asked.title
    kind, _, size = place["asked"].rpartition(" ")
    tokens = int(place["asked"].split()[0]) if place["asked"].endswith("tokens") else None
    # Runs with bytes alone have their share as `ratio` too.
    ratio = "1" if method == FULL else None if tokens else size
    comm = next(iter(rows["comm_exact"])) or "off"
    label = " or ".join(dict.fromkeys(filter(None, rows["method_label"]))) or title(method)
    config = {
        "method": {"name": method, "params": {}}, "task": {"name": task, "params": {}},
        "model": {"name": place["model"], "id": place["model"]}, "compression_scope": place["protocol"],
        "ratio": ratio, "budget": tokens, "memory": size if kind == "memory" else None, "comm": comm, "page": name,
    }  # fmt: skip
    facts = RunFacts(
        method=method, method_label=label, params={}, task=task, task_version=1, dataset=task, data_source="kept",
        model=place["model"], compressed_layers=[], dtype="", device="", seed=0, ratio_exact=ratio, budget=tokens,
        comm_exact="0" if method == FULL else comm, protocol=place["protocol"], config_hash=config_hash(config),
        versions={}, git_sha=None, peak_rss_bytes=0, memory_exact=config["memory"],
        budget_counts="target" if tokens else None,
    )  # fmt: skip
    names = ["score", "prompt_tokens", "generated_tokens", *COSTS, "within_budget"]
    numbers = rows.groupby("sample", sort=False)[names].mean()
    samples = tuple(row_of(f"{name} {place['protocol']}", one) for one in numbers.reset_index().to_dict("records"))
    result = summarise(samples, facts)
    if method in UNPRICED:
        result = replace(result, bytes_searched_per_step=1.0)
    command = f"python run.py -m experiment={asked.experiment}"
    folder = Path("docs") / name / facts.config_hash
    return Kept(folder, result, samples, config, page=f"docs/{name}.md", command=command)


def row_of(where: str, numbers: dict[str, Any]) -> SampleRow:
    known = {key: value for key, value in numbers.items() if value == value}  # all but NaN
    prompt = round(known.get("prompt_tokens", 0))
    ledger: dict[str, Any] = dict.fromkeys(LEDGER_MEANS.values()) | {key: known.get(key) for key in COSTS}
    return SampleRow(
        id=known["sample"], prompt_sha256=prompt_hash([*f"{where} {known['sample']}".encode()]), prompt_tokens=prompt,
        original_prompt_tokens=prompt, generated_tokens=round(known.get("generated_tokens", 0)), prediction="",
        references=[], score=known["score"], status="ok", error=None, prefill_s=None, decode_s=None, tpot_s=None,
        batch_rows=1, ledger=ledger | {"within_budget": known.get("within_budget", 1) == 1},
    )  # fmt: skip
