"""Committed answers, which lie beside the pages that are made of them, and those of runs, as one kind of frame.

    committed   the answers of all pages, a row each; `kept` those of one page
    of_runs     the answers of runs, finished or stopped, that a page asks for
    renewed     kept answers with those of later runs

A page's answers lie in docs/PAGE/scores.csv.gz. Columns are named as in `kvbench.results.frame`; `set` says where on
the page a row stands, `damage` what is wrong with a call. `sample` is the cluster: a context, a dialogue or a prompt,
whose answers are not independent; `id` is what two methods must both have answered. Of values that were not kept there
are none.

Not here: which answers a page asks for (`asked.py`), what is worked out of them (`columns.py`).
"""
# pyright: basic

import gzip
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.engine.budget import show
from kvbench.engine.foreign import CsvWriter
from kvbench.plots.calls import kind_of
from kvbench.plots.pages.asked import DOCS, FULL, SHOWN, Asked, page
from kvbench.results import SampleRow, read_config
from kvbench.results.frame import of_sample
from kvbench.results.read import parse_samples

Frame = Any  # of pandas, whose own types leave open what a cell is
KEPT = "scores.csv.gz"
SOURCES = ("results", "register", "formats", "calls")  # that have answers beside them
PLACE = ("set", "model", "protocol", "asked", "method")
NAMES = (*PLACE, "method_label", "id", "sample", "comm_exact", "damage")
NUMBERS = (
    *("score", "timing.ttft_ratio", "timing.tt2t_ratio", "prompt_tokens", "generated_tokens", "cut_off"),
    *("bytes_resident_device", "bytes_resident_host"),
    *("bytes_index_read_per_step", "moved_bytes_per_step", "bytes_prefill_peak", "index_share"),
    "within_budget",
)
COLUMNS = (*NAMES, *NUMBERS)


# --- files ---------------------------------------------------------------------------------------


def committed() -> Frame:
    """The answers of all pages."""
    return pd.concat([kept(name) for name in SOURCES], ignore_index=True)


def kept(name: str) -> Frame:
    """A page's committed answers; `page` is its name. A name that is empty is "", and no missing value."""
    return typed(load(DOCS / name / KEPT)).assign(page=name)


def typed(texts: Frame) -> Frame:
    """Texts with all columns and with numbers; `ValueError` for answers that do not say whose they are."""
    if "sample" not in texts or (texts["sample"] == "").any():
        raise ValueError("there are answers without a sample, and no test is made of those")
    found = whole(texts)
    return found.assign(**{name: pd.to_numeric(found[name]) for name in NUMBERS})


def whole(texts: Frame) -> Frame:
    """Texts with all columns; those that a file lacks are empty."""
    return texts.reindex(columns=[*COLUMNS], fill_value="")


def load(path: Path) -> Frame:
    """A file as it was written, all of it texts."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def keep(path: Path, texts: Frame) -> None:
    """Write texts, less the columns that have none; the same texts make the same bytes."""
    names = [name for name in COLUMNS if name in texts and (texts[name] != "").any()]
    out = io.StringIO()
    writer = CsvWriter(out, lineterminator="\n")
    writer.writerow(names)
    for row in texts[names].itertuples(index=False):
        writer.writerow(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(out.getvalue().encode(), mtime=0))


# --- runs ----------------------------------------------------------------------------------------


def of_runs(root: Path, name: str) -> Frame:
    """The answers of the runs below a folder that a page asks for, as texts."""
    sets = page(name).sets.values()
    rows = [
        row
        for folder, config in configured(root)
        for asked in sets
        if asked.has(config)
        for row in rows_of(asked, config, *answers(folder))
    ]
    return pd.DataFrame(rows, columns=[*COLUMNS])


def configured(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folders of runs, finished or not, and their configurations. Other programs' folders are passed over."""
    for path in sorted(root.rglob("config.yaml")):
        config = read_config(path.parent)
        if all(isinstance(config.get(key), dict) for key in ("task", "method", "model")):
            yield path.parent, config


def answers(folder: Path) -> tuple[Sequence[SampleRow], str]:
    """What a run has answered so far, and what it calls its method."""
    rows = samples_of(folder)
    return rows, label_of(folder, rows)


def samples_of(folder: Path) -> Sequence[SampleRow]:
    """Samples of a run that has ended or not, of whatever version of result.json."""
    path = folder / "samples.jsonl"
    return [*parse_samples(path, path.read_bytes())[0].values()] if path.is_file() else []


def label_of(folder: Path, rows: Sequence[SampleRow]) -> str:
    """A run's name for its method, with all that warns of what it is; "" where it has not ended and is older than that.

    Each sample says it, with what a byte budget chose for it, such as its bits. Runs from before that have it in
    result.json.
    """
    names = dict.fromkeys(name for row in rows if isinstance(name := row.fields.get("variant"), str))
    ended = folder / "result.json"
    if not names and ended.is_file():
        return str(json.loads(ended.read_text(encoding="utf-8")).get("method_label", ""))
    return " or ".join(names)


def rows_of(asked: Asked, config: Mapping[str, Any], rows: Sequence[SampleRow], label: str) -> Iterator[dict[str, str]]:
    """A run's answers of a set."""
    names = {
        "set": asked.key, "model": config["model"]["name"], "method": method_of(config), "method_label": label,
        "protocol": asked.scope or config.get("compression_scope") or SHOWN, "asked": budget_of(config),
        "comm_exact": str(config.get("comm") or ""),
    }  # fmt: skip
    for one in rows:
        row = of_sample(one)
        if asked.takes(row) and row.get("score") is not None and one.status == "ok":
            # Questions that have a prompt of their own each are samples of one trace or dialogue all the same.
            of = {"id": row["id"], "sample": one.sample_id.partition("/")[0]}
            of["damage"] = kind_of(one.fields.get("measures", {})) or ""
            yield dict.fromkeys(COLUMNS, "") | names | {name: said(row.get(name)) for name in NUMBERS} | of


def method_of(config: Mapping[str, Any]) -> str:
    """A run's method, with what makes codes of the tokens that it keeps: snapkv+fp8."""
    codes = config.get("compose") or {}
    return "+".join([config["method"]["name"], *([codes["name"]] if codes else [])])


def budget_of(config: Mapping[str, Any]) -> str:
    """The budget in the words of `results.frame`; "" for full attention, which has one run for all of them."""
    if config["method"]["name"] == FULL:
        return ""
    if (tokens := config.get("budget")) is not None:
        return f"{tokens} tokens"
    key = "ratio" if config.get("memory") is None else "memory"
    return f"{key} {show(Fraction(str(config.get(key) or 1)))}"


def said(value: Any) -> str:
    if value is None:
        return ""
    number = float(value)
    return f"{number:.0f}" if number.is_integer() else f"{number:.6g}"


# --- both ----------------------------------------------------------------------------------------


def renewed(kept: Frame, later: Frame, name: str) -> Frame:
    """Kept answers with those of later runs, which decide place by place (`PLACE`).

    If the runs ask one of a place's kept samples again, nothing older of it stays, so that no mean mixes two versions
    of a method. If they have other samples alone, as those of a run that went on elsewhere, these are added. A place
    that they do not ask stays as it is. So runs with fewer samples than were kept make n smaller for all methods of
    that column: ask as many as were kept, or write the page elsewhere (`--out`).

    Known samples stay in the order they had, and new ones follow: a comparison says how many were known when it was
    chosen, and those are full attention's first.
    """
    both = pd.concat([whole(kept), whole(later)], ignore_index=True)
    both["is_later"] = [False] * len(kept) + [True] * len(later)
    order = {key: i for i, key in enumerate(page(name).sets)}
    places: dict[Any, Frame] = dict(iter(both.groupby([*PLACE], sort=False)))
    found = [of_place(places[key]) for key in sorted(places, key=lambda key: (order[key[0]], key))]
    return pd.concat(found, ignore_index=True)[[*COLUMNS]] if found else both[[*COLUMNS]]


def of_place(rows: Frame) -> Frame:
    """The answers of a place, each once, in the order in which they came to be known."""
    first = rows.drop_duplicates("id")["id"]
    before, now = rows[~rows["is_later"]], rows[rows["is_later"]]
    if len(before) and len(now) and before["sample"].isin(now["sample"]).any():
        rows = now
    last = rows.drop_duplicates("id", keep="last").set_index("id", drop=False)
    return last.loc[[id for id in first if id in last.index]]
