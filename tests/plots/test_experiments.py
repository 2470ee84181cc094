"""Every file of conf/experiment composes at both scales into cells whose settings and parameters are accepted."""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.evals.cells import ask_one
from kvbench.evals.composing import composition
from kvbench.evals.every import methods_for
from kvbench.evals.overrides import CONF, check_overrides
from kvbench.evals.settings import Choice, Settings, load_class, settings
from kvbench.results.names import FIRST

FILES = sorted((CONF / "experiment").glob("*.yaml"))
PAPERS = {
    "pqcache": "table2 table3 table4 table5 table6 figure1 figure6 figure8 figure9 figure10a figure10b figure10c "
    "figure10d figure11a figure11b figure11c figure11d figure12a figure12b figure12c figure12c_latency",
    "clusterkv": "table1 figure9 figure10 figure11a figure11b figure12 figure13a figure13b",
    "xkv": "table3 table4 figure2 figure3 figure4 figure5 figure10 figure11 figure12",
    **dict.fromkeys(("snapkv", "adakv", "quest", "kvzip", "rkv"), "table"),
    "formats": "docs needle",  # docs/formats.md
    "register": "docs needle ruler shared gsm8k dialogues calls generating facts tool_calls",  # docs/register.md
    "evidence": "docs many presets costs tool_calls",  # docs/results.md
}


def sampled(paths: Sequence[Path], step: int) -> list[Any]:
    """All of them, of which one in `step` is looked at by `make test` and the others by `make test-slow`."""
    slow = pytest.mark.slow
    return [pytest.param(path, id=path.stem, marks=[slow] if i % step else []) for i, path in enumerate(paths)]


NO_FILE: Any = lambda of, settings: None  # noqa: E731  what is looked up of a model


@cache
def cells(*words: str) -> list[list[str]]:
    """What Hydra's sweeper makes of a command line."""
    checked = [word for word in check_overrides(["-m", *words]) if word != "-m"]
    params = composition(CONF, tuple(checked)).hydra.sweeper.params
    parser = OverridesParser.create()
    swept = parser.parse_overrides([*(f"{key}={value}" for key, value in params.items()), *checked])
    (batch,) = BasicSweeper.split_arguments(swept, None)
    return [list(cell) for cell in batch]


def composed(cell: list[str]) -> Settings:
    cfg = composition(CONF, tuple(cell))
    return settings(cfg, cfg.hydra.runtime.choices, is_sweep=True)


def test_every_table_and_figure_has_a_file() -> None:
    wanted = {f"{paper}_{item}" for paper, items in PAPERS.items() for item in items.split()}
    others = {"first_look"}  # of `make run`
    others |= {"answers", "answers_math500"}  # of docs/decode-time.md
    others |= {"mbe", "mbe_system"}  # of docs/own-figures.md
    others |= {"acceptance_vegas"}  # of docs/fidelity.md
    assert {path.stem for path in FILES} == wanted | others


def test_it_opens_with_its_commands() -> None:
    for path in FILES:
        head = path.read_text().splitlines()
        assert head[0] == "# @package _global_"
        assert re.fullmatch(rf"# python run\.py -m experiment={path.stem}( data_dir=FOLDER)?", head[1])
        assert head[2] == f"# python run.py -m experiment={path.stem} scale=smoke"


def test_a_command_line_alone_knows_what_experiments_are_made_of() -> None:
    """Without what other tests have loaded by then."""
    names = [path.stem for path in FILES if "every_method" in path.read_text()]
    words = "[check_overrides(['-m', f'experiment={n}']) for n in sys.argv[1:]]"
    code = f"import sys; from kvbench.evals.overrides import check_overrides; {words}"
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert names and not done.returncode, done.stderr[-500:]


@pytest.mark.parametrize("path", sampled(FILES, 4))
def test_it_composes_in_small(path: Path) -> None:
    made = cells(f"experiment={path.stem}", "scale=smoke")
    for cell in {tuple(made[0]), tuple(made[-1])}:
        ready = composed(list(cell))
        assert ready.model.name == "smollm2-135m" and ready.data_dir is None
        for part in (ready.task, ready.method):
            build_params(load_class(part), part.params, part.group)


@cache
def choice_of(method: str) -> Choice:
    return composed([f"method={method}"]).method


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_method_that_it_sweeps_is_accepted_at_its_published_scale(path: Path) -> None:
    """With the first value of all other keys that are swept, as far as no file of the model is asked; and the last cell
    composes.
    """
    asked = cells(f"experiment={path.stem}")
    made = [dict(word.split("=", 1) for word in cell) for cell in asked]
    first, last = composed(asked[0]), composed(asked[-1])
    for part in (last.task, last.method):
        build_params(load_class(part), part.params, part.group)
    for name in dict.fromkeys(cell.get("method", first.method.name) for cell in made):
        try:
            ask_one(replace(first, method=choice_of(name)), NO_FILE)
        except ConfigError as error:
            assert " is missing (looked in " in str(error), "it is refused for more than a benchmark's data"


@pytest.mark.parametrize("name", [path.stem for path in FILES if "task: latency" in path.read_text()])
def test_every_method_can_meet_its_budget_of_the_prompts_that_are_timed_at_smoke_scale(name: str) -> None:
    shape = ModelShape("smollm2-135m", 30, 9, 3, 64, 8192, tuple(range(30)))
    for cell in cells(f"experiment={name}", "scale=smoke"):
        ready = composed(cell)
        kind = load_class(ready.method)
        params = build_params(kind, ready.method.params, "method")
        for length in ready.task.params["lengths"]:
            kind.variant_for(params, ready.budget, shape, length)


@pytest.mark.parametrize("name", ["pqcache_table2", "pqcache_figure12a", "clusterkv_table1", "xkv_figure5"])
def test_at_full_scale_it_is_the_papers_model(name: str) -> None:
    made = cells(f"experiment={name}", "data_dir=/data")
    ready = composed(made[-1])
    assert ready.model.name in (
        *("llama-3.1-8b-instruct", "mistral-7b-instruct-v0.2"),
        *("glm4-9b-chat", "llama-3-8b-instruct"),
    )
    assert ready.task.params.get("source", "local") == "local"


def test_table_2_has_every_method_at_two_budgets_and_the_command_line_wins() -> None:
    made = [composed(cell) for cell in cells("experiment=pqcache_table2")]
    assert {cell.method.name for cell in made} == {
        *("full", "oracle", "h2o", "snapkv", "pyramidkv", "infllm", "sparq", "pqcache")
    }
    assert {str(cell.budget.ratio) for cell in made} == {"1/5", "1/10"}
    assert {str(cell.budget.comm) for cell in made} == {"1/128"}
    fewer = cells("experiment=pqcache_table2", "method=oracle", "ratio=1/3")
    assert [(cell.method.name, str(cell.budget.ratio)) for cell in map(composed, fewer)] == [("oracle", "1/3")]


def test_table_5_is_behind_an_exact_and_a_sparse_prefill() -> None:
    for scale, sparse in (([], "minference"), (["scale=smoke"], "minference_short")):
        made = [composed(cell) for cell in cells("experiment=pqcache_table5", *scale)]
        found = {(cell.method.name, cell.prefill and cell.prefill.name) for cell in made}
        assert found == {(m, p) for m in ("full", "pqcache") for p in (None, sparse)}


def test_the_first_methods_and_the_others_are_all_that_take_a_byte_budget() -> None:
    """But those whose least size is more than the others' budget, and FINCH, which must see the question."""
    first, others = (
        {
            word.split("=", 1)[1]
            for cell in cells(f"experiment=evidence_{name}")
            for word in cell
            if word[:7] == "method="
        }
        for name in ("docs", "many")
    )
    assert first == {"full", *FIRST} and not first & others
    assert first | others == {*methods_for("memory")} - {"think", "shadowkv", "finch"}
