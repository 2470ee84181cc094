"""The scores that the repository keeps next to its pages, as runs: what a site shows where nobody gives it other runs.

A method at a budget on one task is a run here. Its samples have scores and costs, and no answers: nobody can score
them again, so they are only reported. Samples of one context count as one, with their mean.

Not here: how scores were kept (`plots/evidence.py`, `plots/pages/register.py`, `plots/cited.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import fsum
from pathlib import Path
from typing import Any

from kvbench.plots import cited, evidence
from kvbench.plots.evidence import FULL, SHOWN, title
from kvbench.plots.kept import load
from kvbench.plots.pages import register
from kvbench.plots.read import ROOT
from kvbench.plots.site.origin import Kept
from kvbench.results import LEDGER_MEANS, RunFacts, SampleRow, config_hash, prompt_hash, summarise

DOCS = ROOT / "docs"
RESULTS, REGISTER, CITED = (DOCS / name / "scores.csv.gz" for name in ("results", "register", "cited"))
REGISTERED = DOCS / "register.yaml"
SUBMISSIONS = DOCS / "submissions"
UNPRICED = frozenset({"oracle"})  # read all keys to find their tokens, which the kept scores do not say


@dataclass(frozen=True)
class Variant:
    """What was asked of one method, and the page that has its scores."""

    task: str
    page: str
    model: str
    scope: str
    method: str
    label: str
    comm: str
    command: str
    memory: str = ""  # share of the full cache's bytes
    tokens: int = 0  # a budget in tokens instead, of prompt and answer together
    ratio: str = ""  # or a share of the prompt's tokens


@dataclass
class Sample:
    """The scores of one sample, of which there are several where it is a context with questions, and its costs."""

    scores: list[float] = field(default_factory=list[float])
    prompt: int = 0
    answer: int = 0
    ledger: dict[str, float] = field(default_factory=dict[str, float])


Samples = dict[Variant, dict[str, Sample]]


def kept_runs() -> list[Kept]:
    """The runs of all scores that are here; none where KVBench is installed without its pages."""
    found: Samples = {}
    for path, add in ((RESULTS, add_results), (REGISTER, add_registered), (CITED, add_cited)):
        if path.is_file():
            add(found, path)
    return [run_of(variant, samples) for variant, samples in found.items()]


def add_results(found: Samples, path: Path) -> None:
    sets = {asked.key: asked for asked in evidence.SETS}
    for line in evidence.load(path):
        asked, (scope, memory, method) = sets[line.asked], line.place
        budget: dict[str, Any] = {"tokens": int(memory)} if asked.has_tokens and memory else {"memory": memory}
        variant = Variant(
            asked.title, "docs/results.md", line.model, scope, method, line.label or title(method), line.comm,
            f"python run.py -m experiment={asked.experiment}", **budget,
        )  # fmt: skip
        sample = found.setdefault(variant, {}).setdefault(line.sample, Sample())
        sample.scores.append(line.score)
        sample.prompt, sample.answer = round(line.costs.prompt_tokens), round(line.costs.tokens)
        sample.ledger = {"bytes_resident_device": line.costs.device_bytes}


def add_registered(found: Samples, path: Path) -> None:
    sets = register.register(REGISTERED).sets
    for row in load(path):
        asked, budget = sets[row["set"]], row["budget"]
        given: dict[str, Any] = {"tokens": int(budget.split()[0])} if budget.endswith("tokens") else {"memory": budget}
        variant = Variant(
            asked.title, "docs/register.md", row["model"], row["scope"], row["method"], row["label"], "off",
            f"python run.py -m experiment={asked.experiment}", **given,
        )  # fmt: skip
        sample = found.setdefault(variant, {}).setdefault(row["cluster"], Sample())
        sample.scores.append(float(row["score"]))
        sample.prompt, sample.answer = int(row["prompt_tokens"]), int(row["answer_tokens"])
        for name in ("device_bytes", "host_bytes", "peak_bytes"):
            if row[name]:
                sample.ledger[register.MEASURES[name]] = float(row[name])


def add_cited(found: Samples, path: Path) -> None:
    """Losses in nats a token are left to docs/cited.md: they are no share of full attention's score."""
    sets = {asked.experiment: asked for asked in cited.SETS if not asked.measure}
    for line in cited.load(path):
        if (asked := sets.get(line.asked)) is not None:
            variant = Variant(
                f"{asked.title}: {asked.columns[line.column]}", "docs/cited.md", line.model, SHOWN, line.method,
                line.label or title(line.method), line.comm, f"python run.py -m experiment=cited_{asked.experiment}",
                ratio="1/4",
            )  # fmt: skip
            found.setdefault(variant, {}).setdefault(line.sample, Sample()).scores.append(line.value)


def run_of(variant: Variant, samples: Mapping[str, Sample]) -> Kept:
    """A run that was never on a disk; what nobody kept is null, as in runs that did not measure it."""
    is_full = variant.method == FULL
    memory = None if is_full or not variant.memory else str(Fraction(variant.memory))
    tokens = None if is_full else variant.tokens or None
    ratio = "1" if is_full else memory or variant.ratio or None  # as runs with bytes alone have it
    config: dict[str, Any] = {
        "method": {"name": variant.method, "params": {}},
        "task": {"name": variant.task, "params": {}},
        "model": {"name": variant.model, "id": variant.model},
        "ratio": ratio, "memory": memory, "budget": tokens, "comm": variant.comm, "compression_scope": variant.scope,
        "kept": [variant.page, variant.label],
    }  # fmt: skip
    rows = [row_of(variant, name, sample) for name, sample in samples.items()]
    facts = RunFacts(
        method=variant.method, method_label=variant.label, params={}, task=variant.task, task_version=1,
        dataset=variant.task, data_source="kept", model=variant.model, compressed_layers=[], dtype="", device="",
        seed=0, ratio_exact=ratio, budget=tokens, comm_exact="0" if is_full else variant.comm or "off",
        protocol=variant.scope, config_hash=config_hash(config), versions={}, git_sha=None, peak_rss_bytes=0,
        memory_exact=memory, budget_counts="target" if tokens else None,
    )  # fmt: skip
    folder = Path(variant.page) / config_hash(config)
    result = summarise(rows, facts)
    if variant.method in UNPRICED:
        result = replace(result, bytes_searched_per_step=1.0)
    return Kept(folder, result, tuple(rows), config, page=variant.page, command=variant.command)


def row_of(variant: Variant, name: str, sample: Sample) -> SampleRow:
    ledger: dict[str, float | bool | None] = dict.fromkeys(LEDGER_MEANS.values())
    ledger |= sample.ledger | {"within_budget": True}
    return SampleRow(
        id=name, prompt_sha256=prompt_hash([*f"{variant.page} {variant.scope} {name}".encode()]),
        prompt_tokens=sample.prompt, original_prompt_tokens=sample.prompt, generated_tokens=sample.answer,
        prediction="", references=[], score=fsum(sample.scores) / len(sample.scores), status="ok", error=None,
        prefill_s=None, decode_s=None, tpot_s=None, batch_rows=1, ledger=ledger,
    )  # fmt: skip


def committed() -> list[Path]:
    """The submissions that stand in the repository, which have answers."""
    return sorted(path.parent for path in SUBMISSIONS.glob("*/manifest.json"))
