"""`make report`: every finished run on one HTML page that opens from disk and asks no network.

    python -m plots.report [RUNS] [--out FILE]

The page holds its data as JSON: what the runs say (small, read at once) and the samples (compressed, unpacked when the
reader first looks at one). Predictions, references and names are untrusted: the page's script writes them as text
only, and its content policy runs no script but the page's own, by their hashes.

Charts are Vega-Lite's, specified with Altair. Its scripts are 0.9 MB (0.3 MB packed, as they stand in the page),
Bokeh's 1.3 MB and Plotly's 4.8 MB; its marks are SVG, so they print, scale and carry labels for screen readers; and a
specification is data, so that filters need no code per chart.

Not here: statistics (`plots/stats.py`), tables and figures for a paper (`plots/tables/`), the page's behaviour
(`plots/report/page.js`).
"""

import argparse
import base64
import gzip
import hashlib
import html
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import fsum, log
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from evals.foreign import NoJson, one_line, opened, parse_json, read_bytes
from evals.results import METRICS, SampleRow, combined, combined_ci95
from plots.read import Run, default_root, key_bytes_per_token, load
from plots.report.charts import heatmap_chart, look, pareto_chart, vega_script
from plots.stats import holm, paired

ASSETS = Path(__file__).resolve().parent
LONGEST = 2_000  # characters of a text that the page shows; the run's folder has the rest
HASHED = ("config.yaml", "samples.jsonl", "ledger.parquet", "result.json")
AUDITED = (
    *("tokens_budget_mean", "tokens_attended_mean", "effective_ratio", "within_budget"),
    *("bytes_moved_kv_per_step", "bytes_moved_meta_per_step", "bytes_searched_per_step"),
    *("bytes_resident_device", "bytes_resident_host", "bytes_resident_device_actual"),
    *("cache_hit_rate", "prefill_s", "tpot_s", "batch_rows_mean"),
)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m plots.report", description="Write every finished run into one HTML page."
    )
    parser.add_argument("runs", nargs="?", type=Path, default=default_root(), help="folder of runs")
    parser.add_argument("--out", type=Path, help="the page; RUNS/report.html where not given")
    given = parser.parse_args(argv)
    out: Path = given.out or given.runs / "report.html"
    runs = load(given.runs)
    if not runs:
        return refuse(
            f"{given.runs} holds no finished run; make some first, for example with "
            "python run.py -m method=full,snapkv,quest task=needle ratio=0.2"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # A name may hold bytes that are no character.
        out.write_text(page(runs, given.runs), encoding="utf-8", errors="replace")
    except OSError as error:
        return refuse(f"{out} cannot be written ({error.strerror}); choose another file with --out")
    print(f"{one_line(str(out))}: {len(runs)} runs, {out.stat().st_size / 1e6:.1f} MB")
    return 0


def refuse(sentence: str) -> int:
    print("report:", one_line(sentence), file=sys.stderr)
    return 2


# --- what the page says ---


def overview(runs: Sequence[Run], root: Path) -> dict[str, Any]:
    """Everything but the samples, as plain data."""
    baselines, others = Baselines(runs), Others(runs)
    described = [describe(run, others, root, baselines) for run in runs]
    adjust(described)
    looks = {run.result.method: look(run.method) for run in runs}
    return {"runs": described, "metrics": {name: m.better for name, m in METRICS.items()}, "looks": looks}


def describe(run: Run, others: "Others", root: Path, baselines: "Baselines") -> dict[str, Any]:
    """One run: its settings, what was measured, how its scores compare."""
    result = run.result
    label = " ".join([result.method_label, *others.varied(run)])
    return {
        "folder": run.folder.relative_to(root).as_posix() if run.folder != root else run.folder.name,
        "label": label,
        "variant": label if run.is_full else " · ".join([label, budget(run), f"comm {result.comm_exact}"]),
        "full": run.is_full and run.is_exact,
        "method": result.method,
        "task": result.task,
        "model": result.model,
        "budget": "full" if run.is_full else budget(run),
        "comm": "none" if run.is_full else result.comm_exact,
        "group": matrix_of(run),
        "status": result.status,
        "n": result.n_samples,
        "n_oom": result.n_oom,
        "audit": {key: getattr(result, key) for key in AUDITED} | comm_allowed(run, others),
        "parts": [describe_dataset(run, name, rows, baselines) for name, rows in run.datasets().items()],
        "provenance": provenance(run),
    }


def matrix_of(run: Run) -> str:
    """What runs must share to stand in one matrix of scores, as words."""
    result, limit = run.result, run.setting("limit")
    conditions = [
        result.model,
        f"{result.data_source} data",
        result.protocol,
        f"seed {result.seed}",
        f"first {limit} samples" if limit else "all samples",
        f"{result.dtype} on {result.device}",
    ]
    return " · ".join(conditions)


def budget(run: Run) -> str:
    result = run.result
    return f"ratio {result.ratio_exact}" if result.budget is None else f"{result.budget} tokens"


class Others:
    """What each run needs of all others, gathered once, so that thousands of runs are not compared pairwise."""

    def __init__(self, runs: Sequence[Run]) -> None:
        models: dict[str, list[Run]] = {}
        params: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for run in runs:
            models.setdefault(run.result.model, []).append(run)
            params.setdefault((run.result.method, run.result.prefill), []).append(run.params)
        self.key_bytes = {model: key_bytes_per_token(alike) for model, alike in models.items()}
        self.varying = {
            same: {key for one in alike for key in {*one, *alike[0]} if one.get(key) != alike[0].get(key)}
            for same, alike in params.items()
        }

    def varied(self, run: Run) -> list[str]:
        """The parameters that tell this run from others of its method and prefill, as `key=value`."""
        varying = self.varying[run.result.method, run.result.prefill]
        return [f"{key}={value}" for key, value in run.params.items() if key in varying]


def comm_allowed(run: Run, others: Others) -> dict[str, float | None]:
    """The bytes per step that `comm` allows, from the size of a key in a run of full attention on this model."""
    per_token = others.key_bytes[run.result.model]
    lengths = [row.prompt_tokens for row in run.rows if row.status == "ok"]
    comm = None
    if per_token and lengths and not run.is_full:
        comm = float(Fraction(run.result.comm_exact)) * per_token * fsum(lengths) / len(lengths)
    return {"comm_bytes": comm, "prompt_tokens": fsum(lengths) / len(lengths) if lengths else None}


def describe_dataset(run: Run, name: str, rows: Sequence[SampleRow], baselines: "Baselines") -> dict[str, Any]:
    """One dataset of a run: its score, and how it compares with full attention."""
    metric = metric_of(run, rows)
    ok = [row for row in rows if row.score is not None]
    is_whole = len(rows) == len(run.rows) and metric == (run.result.metric or "score")
    return {
        "dataset": name,
        "metric": metric,
        "n": len(ok),
        "score": combined(ok, metric),
        # Of all of a run's samples its result has the interval.
        "ci": run.result.score_ci95 if is_whole else combined_ci95(ok, metric),
        "paired": None if run.is_full and run.is_exact else baselines.compare(run, name, metric, ok),
        "heat": heat(ok),
        "over": any(row.ledger.get("within_budget") is False for row in ok),
    }


def metric_of(run: Run, rows: Iterable[SampleRow]) -> str:
    """What the scores of these samples are."""
    return next(
        (str(row.fields["metric"]) for row in rows if "metric" in row.fields),
        run.result.metric or "score",
    )


class Baselines:
    """The runs of full attention, by what a run must share with one to be compared with it."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.rows: dict[str, dict[str, SampleRow]] = {}
        for run in runs:
            if run.is_full and run.is_exact:
                rows = self.rows.setdefault(self.key(run), {})
                for row in run.rows:
                    if row.score is not None:
                        rows.setdefault(row.id, row)

    @staticmethod
    def key(run: Run) -> str:
        keys = ("model", "model_digest", "task", "task_version", "data_digest", "compression_scope", "seed", "dtype",
                "device")  # fmt: skip
        return json.dumps([run.setting(key) for key in keys], sort_keys=True)

    def compare(self, run: Run, name: str, metric: str, rows: Iterable[SampleRow]) -> dict[str, Any] | None:
        """A run against full attention on the samples with the same prompt; None without such a sample."""
        full = self.rows.get(self.key(run), {})
        pairs = [
            (row, full[row.id]) for row in rows if row.id in full and full[row.id].prompt_sha256 == row.prompt_sha256
        ]
        if not pairs:
            return None
        # Perplexities are compared as losses, whose differences can be averaged.
        is_loss = METRICS[metric].weight is not None
        ours, theirs = ([value(row, is_loss) for row in side] for side in zip(*pairs, strict=True))
        found = paired(ours, theirs)
        return {
            "mean": found.mean,
            "ci": None if found.difference is None else [found.difference.low, found.difference.high],
            "p": found.p,
            "n": found.n,
            "more": found.wins,
            "same": found.ties,
            "less": found.losses,
            "unit": "nats" if is_loss else "",
        }


def value(row: SampleRow, is_loss: bool) -> float:
    assert row.score is not None, f"{row.id} has no score"
    return log(row.score) if is_loss else row.score


def adjust(described: Sequence[dict[str, Any]]) -> None:
    """Holm's p-values: a family is all variants that one column of one matrix compares with full attention."""
    families: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in described:
        for one in run["parts"]:
            if one["paired"]:
                key = run["group"], run["task"], one["dataset"]
                families.setdefault(key, []).append(one["paired"])
    for family in families.values():
        for found, p in zip(family, holm([found["p"] for found in family]), strict=True):
            found["holm"] = float(p)
            found["family"] = len(family)


def heat(rows: Iterable[SampleRow]) -> list[list[float]] | None:
    """[length, depth, mean score, n] per cell of a needle run; None for other tasks."""
    cells: dict[tuple[float, float], list[float]] = {}
    for row in rows:
        length, depth = row.fields.get("length"), row.fields.get("depth")
        if isinstance(length, int | float) and isinstance(depth, int | float) and row.score is not None:
            cells.setdefault((length, depth), []).append(row.score)
    return [[*cell, fsum(s) / len(s), len(s)] for cell, s in sorted(cells.items())] or None


def provenance(run: Run) -> dict[str, Any]:
    """Where a result comes from, and what would show that it was changed."""
    result = run.result
    prompts = "\n".join(sorted(f"{row.id} {row.prompt_sha256}" for row in run.rows))
    return {
        "config_hash": result.config_hash,
        "git_sha": result.git_sha,
        "model_id": run.setting("model", "id"),
        "model_revision": run.setting("model", "revision"),
        "model_digest": run.setting("model_digest"),
        "dtype": result.dtype,
        "device": result.device,
        "data_source": result.data_source,
        "data_digest": run.setting("data_digest"),
        "task_version": result.task_version,
        "method_version": run.setting("method_version"),
        "prompts_sha256": hashlib.sha256(prompts.encode()).hexdigest()[:16],
        "peak_rss_bytes": result.peak_rss_bytes,
        "versions": result.versions,
        "params": result.params,
        "notes": result.notes,
        "files": {name: digest(path) for name in HASHED if (path := run.folder / name).is_file()},
        "env": environment(run.folder / "env.json"),
    }


def digest(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def environment(path: Path) -> dict[str, Any]:
    """env.json less the versions, which result.json has too; {} where it was lost."""
    try:
        found = parse_json(read_bytes(path))
    except (ConfigError, NoJson):
        return {}
    kept = ("platform", "cpu", "n_cores", "ram_bytes", "started", "ended")
    return {key: found[key] for key in kept if key in found} if isinstance(found, Mapping) else {}


# --- samples ---


def samples(runs: Sequence[Run]) -> dict[str, Any]:
    """The answers of each run. Each prompt's references stand once, however many runs answered it."""
    asked: dict[tuple[str, str, str], int] = {}
    shared: list[dict[str, Any]] = []
    answers = []
    for run in runs:
        lines = []
        for row in run.rows:
            key = run.result.task, row.id, row.prompt_sha256
            if key not in asked:
                asked[key] = len(shared)
                shared.append(question(run, row))
            lines.append([asked[key], *answer(row)])
        answers.append(lines)
    return {"asked": shared, "answers": answers}


def question(run: Run, row: SampleRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "sha": row.prompt_sha256,
        "dataset": str(row.fields.get("dataset", run.result.dataset)),
        "tokens": row.prompt_tokens,
        "original_tokens": row.original_prompt_tokens,
        "references": [cut(text) for text in row.references],
    }


def answer(row: SampleRow) -> list[Any]:
    """In the order that page.js reads: the ledger's null and the report's absence are both null."""
    fields = {key: v for key, v in row.fields.items() if key not in ("dataset", "metric", "method_report")}
    report = row.fields.get("method_report")
    return [
        row.score,
        row.status,
        cut(row.prediction),
        row.generated_tokens,
        row.error,
        {key: rounded(v) for key, v in row.ledger.items()},
        bounded(fields) or None,
        bounded(report),
    ]


def cut(text: str) -> str:
    """A text as long as the page shows it."""
    more = len(text) - LONGEST
    return text if more <= 0 else f"{text[:LONGEST]} … ({more} more characters)"


def rounded(number: Any) -> Any:
    """Five significant digits: nobody reads more, and they do not compress."""
    return float(f"{number:.5g}") if isinstance(number, float) else number


def bounded(tree: Any) -> Any:
    """A task's or method's own data, numbers rounded; where it is longer than a text may be, its beginning as text."""

    def short(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: short(v) for key, v in node.items()}
        return [short(v) for v in node] if isinstance(node, list) else rounded(node)

    if not tree:
        return tree
    tree = short(tree)
    text = json.dumps(tree, ensure_ascii=False)
    return tree if len(text) <= LONGEST else cut(text)


# --- the page ---


def page(runs: Sequence[Run], root: Path) -> str:
    """The whole page."""
    script = (ASSETS / "page.js").read_text(encoding="utf-8")
    data = {
        "overview": as_json(overview(runs, root)),
        "charts": as_json({"pareto": pareto_chart(), "heatmap": heatmap_chart()}),
        "vega": packed(vega_script()),
        "samples": packed(json.dumps(samples(runs), separators=(",", ":"), ensure_ascii=False)),
    }
    filled = {
        "policy": html.escape(policy(script)),
        "style": (ASSETS / "page.css").read_text(encoding="utf-8"),
        "script": script,
        "summary": html.escape(f"{len(runs)} runs of {root.resolve().name}"),
        **data,
    }
    text = (ASSETS / "page.html").read_text(encoding="utf-8")
    # In one pass over the template: what is filled in may itself contain what looks like a place.
    pieces = text.split("@@")
    assert len(pieces) % 2, "page.html has a place that does not end"
    return "".join(filled[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def policy(script: str) -> str:
    """No network, and no script but the page's own and Vega's, which it unpacks.

    Unpacked scripts and the expressions of charts, which Vega compiles, are ours; data are never expressions.
    """
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{own}' 'unsafe-eval'; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def as_json(tree: Any) -> str:
    """JSON that cannot end the element that it stands in."""
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def packed(text: str) -> str:
    """gzip and base64; the same text gives the same page."""
    data = text.encode("utf-8", "surrogatepass")
    return base64.b64encode(gzip.compress(data, compresslevel=9, mtime=0)).decode()
