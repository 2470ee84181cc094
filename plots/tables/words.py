"""The runs of a frame in words: a row a run, a column for each key that tables go by.

    task, model, budget, ratio, comm, method, prefill, scope, data, prompts, limit, seed, dtype, device, version

`ANY` stands for a budget that a run has not, since it attends to everything: it stands next to all budgets.

Not here: keys whose values are the samples' (`plots/tables/pivot.py`).
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvbench.engine.budget import SIZE, parse_bytes
from kvbench.engine.terminal import say
from kvbench.plots.run_sets import CHOOSES_ROWS, usual_params
from kvbench.plots.tables.values import Frame
from kvbench.results import EXACT, OFF
from kvbench.results.frame import NoRuns, frame
from kvbench.results.names import known

At = Mapping[str, Any]  # a row of the frame; what is missing is None
ANY = "*"
UNKNOWN = "-"  # a setting that a run does not have


def samples_below(root: Path) -> Frame:
    """The samples of all finished runs below a folder; a run that is damaged is named on standard error."""
    from pandas import DataFrame

    left_out: list[str] = []
    try:
        samples = frame(root, left_out=left_out)
    except NoRuns:
        samples = DataFrame()
    for sentence in left_out:
        say(f"left out: {sentence}", file=sys.stderr)
    return samples


def as_word(value: Any) -> str:
    """A value as JSON has it; a column of whole numbers with gaps holds them as floats."""
    if value is None or value != value:
        return UNKNOWN
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else json.dumps(value)


def dicts(table: Frame) -> list[dict[str, Any]]:
    """The rows; what is missing is None."""
    objects = table.astype(object)
    return objects.where(objects.notna(), None).to_dict("records")


def in_words(column: Frame) -> Frame:
    """A column of samples as words."""
    objects = column.astype(object)
    kinds = {value: as_word(value) for value in objects[objects.notna()].unique()}
    return objects.map(kinds).fillna(UNKNOWN)


def shown_share(text: str) -> str:
    """A share as it is usually written: 0.2, 1/64; "off" as it is."""
    if text == OFF:
        return text
    share = Fraction(text)
    return f"{float(share):g}" if (share * 100).denominator == 1 else str(share)


def in_order(word: str) -> tuple[int, float, str]:
    """Numbers by size, wherever they stand in a word; then words."""
    bare = word.removeprefix("ratio ").removeprefix("memory ")
    if SIZE.fullmatch(bare):
        return 0, float(parse_bytes(bare, "memory").n), word
    for piece in bare.split():
        try:
            return 0, float(Fraction(piece)), word
        except ValueError:
            break
    return 1, 0.0, word


def settings(at: At, kind: str) -> dict[str, str]:
    """The parameters of a run's method, prefill or task; those that are null say so."""
    nulls = {name: None for name in str(at.get("nulls") or "").split() if name.startswith(f"{kind}.")}
    names = [name for name in dict.fromkeys([*at, *nulls]) if name.startswith(f"{kind}.")]
    return {
        name.removeprefix(f"{kind}."): "null" if name in nulls else as_word(at[name])
        for name in names
        if name in nulls or at[name] is not None
    }


def method_of(at: At) -> str:
    """The method whose setting a run's is: `h2o` of `h2o_paper`, with the allocator and keys and values of others."""
    name = at["method"] if at.get("config.method.digest") else known(at["method"]) or at["method"]
    return "+".join(filter(None, [name, at.get("allocator"), at.get("reuse"), at.get("keeping")]))


def own_file(at: At) -> dict[str, str]:
    """The state of the user's own file or package of the method, as if it were a parameter; {} for ours."""
    digest, package = at.get("config.method.digest"), at.get("config.method.package")
    if digest is None:
        return {}
    return {"file": str(digest)[:8]} if package is None else {"package": f"{package} {str(digest)[:8]}"}


def budget_of(at: At, is_full: bool) -> str:
    if is_full:
        return ANY
    if at.get("budget") or at.get("memory_exact") or at.get("adapts"):
        return at["asked"]
    return f"ratio {shown_share(at.get('ratio_exact') or '1')}"


def prefill_of(at: At) -> str:
    name = at["prefill"].removesuffix("_short")
    return name if name == EXACT else " ".join([name, *pairs(settings(at, "prefill"))])


def prompts_of(at: At) -> str:
    """The settings of a run's task and chat that make other prompts than the defaults do."""
    usual = {key: "null" if value is None else as_word(value) for key, value in usual_params(at["task"]).items()}
    chosen = settings(at, "task").items()
    words = [f"{key}={word}" for key, word in chosen if key not in CHOOSES_ROWS and usual.get(key, word) != word]
    chat, system = at.get("config.model.chat"), at.get("config.model.system_prompt")
    words += [f"chat={chat}"] if chat not in (None, "auto") else []
    return " ".join([*words, *([f"system prompt {system!r}"] if system else [])])


def limit_of(at: At) -> str:
    limit, offset = at.get("config.limit") or 0, at.get("config.offset") or 0
    return (as_word(limit) if limit else "all") + (f" behind the first {as_word(offset)}" if offset else "")


def version_of(at: At) -> str:
    version = as_word(at["task_version"])
    return f"{version}/{version if at.get('score_version') is None else as_word(at['score_version'])}"


WORDS: dict[str, Callable[[At], str]] = {
    "prefill": prefill_of,
    "scope": lambda at: at["protocol"],
    "data": lambda at: at["data_source"],
    "prompts": prompts_of,
    "limit": limit_of,
    "seed": lambda at: as_word(at["seed"]),
    "dtype": lambda at: at["dtype"],
    "device": lambda at: at["device"],
    "version": version_of,
}
KEYS = ("task", "model", "budget", "ratio", "comm", "method", *WORDS)


def runs_of(samples: Frame) -> Frame:
    """A row a run, in the folders' order.

    Beside the keys: `kind`, the method whatever its setting; `own_task`; `label`; `params` and `cache`, which tell
    variants of one label apart; `is_preset`, of settings that somebody published.
    """
    from pandas import DataFrame

    firsts = samples.drop_duplicates("run").sort_values("run", key=lambda names: names.astype(str))
    every = dicts(firsts)
    checkpoints: dict[str, set[str]] = {}
    for at in every:
        checkpoints.setdefault(at["model"], set()).add(at.get("checkpoint") or "")
    rows = []
    for at in every:
        kind, budget = method_of(at), budget_of(at, method_of(at) == "full")
        namesake = f" {at.get('checkpoint') or ''}" if len(checkpoints[at["model"]]) > 1 else ""
        is_ours = not any(at.get(key) for key in ("allocator", "reuse", "keeping"))
        rows.append(
            {
                "task": at["shown_task"],
                "model": f"{at['model']}{namesake}",
                "budget": budget,
                "ratio": budget.removeprefix("ratio "),
                "comm": ANY if kind == "full" else shown_share(at["comm_exact"]),
                "method": at["method_label"],
                **{key: of(at) for key, of in WORDS.items()},
                "run": at["run"],
                "folder": Path(at["run"]).name,
                "kind": kind,
                "own_task": at["task"],
                "label": at["method_label"],
                "asked": at["asked"],
                "tokens": as_word(at.get("budget")),
                "share": at.get("ratio_exact"),
                "notes": json.loads(at.get("notes") or "[]"),
                "asks": settings(at, "task"),
                "params": settings(at, "method") | own_file(at),
                "cache": {f"cache.{key}": word for key, word in settings(at, "config.cache").items()},
                "prefill_params": settings(at, "prefill"),
                "is_preset": is_ours and (at["method"] != kind or at["prefill"].endswith("_short")),
            }
        )
    return DataFrame(rows)


def pairs(params: Mapping[str, str]) -> Iterator[str]:
    return (f"{key}={word}" for key, word in params.items())


def differing(params: Sequence[Mapping[str, str]], apart: Callable[[str], bool] = lambda key: True) -> list[str]:
    """Of each of some variants the parameters that not all of them have alike, in words; "" where none differs."""
    every = {key: {one.get(key) for one in params} for key in dict.fromkeys(key for one in params for key in one)}
    keys = {key for key, words in every.items() if len(words) > 1 and apart(key)}
    return [" ".join(pairs({key: word for key, word in own.items() if key in keys})) for own in params]
