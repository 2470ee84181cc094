"""Values: what is refused, how text becomes typed, and what identifies a run."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import pytest
from hydra import compose

import kvbench.tasks
from kvbench.engine.budget import Bytes
from kvbench.engine.declared import PathText, build_params, reader
from kvbench.engine.errors import ConfigError
from kvbench.evals.composing import composing
from kvbench.evals.overrides import CONF
from kvbench.evals.settings import Choice, Settings, load_class, settings


def composed(*words: str) -> Settings:
    with composing(CONF):
        cfg = compose("config", list(words), return_hydra_config=True)
    return settings(cfg, cfg.hydra.runtime.choices)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


# --- the keys that every run has ---


def test_the_defaults_are_a_whole_run() -> None:
    run = composed()
    assert (run.method.name, run.task.name, run.model.name) == ("oracle", "needle", "smollm2-135m")
    assert run.method.target == "kvbench.methods.retrieving.oracle.Oracle"
    assert "_target_" not in run.method.params
    assert run.budget.ratio == Fraction(1, 5)
    assert run.budget.tokens is None
    assert run.budget.comm == Fraction(1, 64)
    assert run.budget.compensate
    assert (run.seed, run.limit, run.out, run.data_dir) == (0, None, None, None)
    assert (run.dtype, run.device, run.scope) == ("auto", "auto", "full_prompt")
    assert run.model.id == "embedded"
    assert run.cache.tokens == 0
    assert not run.is_sweep


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ratio=0"], "ratio=0 is out of range"),
        (["ratio=1.5"], "ratio=1.5 is out of range"),
        (["ratio=abc"], "ratio=abc is not a number"),
        (["ratio=true"], "ratio=true is not a number"),
        (["ratio=1/0"], "ratio=1/0 is not a number"),
        (["ratio="], "ratio= is not a number"),
        (["ratio=null"], "neither ratio, budget nor memory is given"),
        (["ratio=0.1", "budget=3"], "both given"),
        (["budget=0"], "budget=0 is out of range"),
        (["memory=4XB"], "memory=4XB is neither a share of the full cache's bytes, like 1/8, nor bytes, like 4GB"),
        (["memory=GB"], "memory=GB is neither"),
        (["memory=1/2GB"], "memory=1/2GB is neither"),
        (["memory=true"], "memory=True is neither"),
        (["memory=0GB"], "memory=0GB is out of range"),
        (["memory=-1GB"], "memory=-1GB is out of range"),
        (["memory=4"], "memory=4 is out of range; it is a share of the full cache's bytes above 0 and at most 1"),
        (["budget=abc"], "budget=abc is not a whole number"),
        (["budget=1.5"], "budget=1.5 is not a whole number"),
        (["comm=-1"], "comm=-1 is out of range"),
        (["comm=x"], "comm=x is not a number"),
        (["compensate=1"], "compensate=1 is not true or false"),
        (["limit=0"], "limit=0 is out of range"),
        (["limit=x"], "limit=x is not a whole number"),
        (["seed=-1"], "seed=-1 is out of range"),
        (["seed=1.5"], "seed=1.5 is not a whole number"),
        (["seed=true"], "seed=true is not a whole number"),
        (["seed=null"], "seed=null is not a whole number"),
        (["seed=inf"], "seed=inf is not a whole number"),
        (["seed=nan"], "seed=nan is not a whole number"),
        (["dtype=foo"], "dtype=foo is not allowed; use auto, float32, bfloat16 or float16"),
        (["device=foo"], "device=foo is not allowed; use auto, cpu, cuda or cuda:N"),
        (["device=cuda:x"], "device=cuda:x is not allowed"),
        (["device=mps:1"], "or mps or xpu where torch has one"),
        (["kernels=nonsense"], "kernels=nonsense is not allowed; use auto or torch"),
        (["device_map=even"], "device_map=even is not allowed; use auto, balanced, balanced_low_0 or sequential"),
        (["device_map=auto", "device=cuda:1"], "device=cuda:1 is one device, and device_map=auto divides"),
        (["compression_scope=foo"], "use full_prompt or context_only"),
        (["out=[a]"], "out=[a] is not a text"),
        (["cache.policy=fifo"], "cache.policy=fifo"),
        (["cache=3"], "cache=3 is a group of keys"),
        (["model=any"], "model.id is not given; add model.id=…"),
        (["model.chat=maybe"], "model.chat=maybe is not allowed; use auto, none or inst"),
        (["model.trust_remote_code=yes"], "model.trust_remote_code=yes is not true or false"),
        (["ratio=${foo}"], "ratio cannot be read"),
        (["~seed"], "seed is missing"),
        (["~method"], "method is missing"),
        (["++rato=1"], "no key 'rato'; did you mean 'ratio'?"),
        (["++model.foo=1"], "no model key 'foo'"),
    ],
)
def test_a_value_out_of_range_is_one_sentence_with_its_key(words: list[str], says: str) -> None:
    assert says in refused(lambda: composed(*words))


@pytest.mark.parametrize(("text", "exact"), [("0.29", "29/100"), ("1/64", "1/64"), ("1", "1")])
def test_shares_are_exact(text: str, exact: str) -> None:
    assert composed(f"ratio={text}").budget.ratio == Fraction(exact)


@pytest.mark.parametrize(
    ("text", "n", "exact"),
    [
        ("4GB", 4 * 10**9, "4GB"),
        ("4gb", 4 * 10**9, "4GB"),
        ("4000MB", 4 * 10**9, "4GB"),
        ("1.5GB", 1_500_000_000, "1.5GB"),
        ("0.5GB", 500_000_000, "500MB"),
        ("2gib", 2 << 30, "2GiB"),
        ("1024KiB", 1 << 20, "1MiB"),
        ("12.345kb", 12_345, "12.345KB"),
        ("1.0001KB", 1_000, "1KB"),
    ],
)
def test_bytes_have_one_spelling(text: str, n: int, exact: str) -> None:
    run = composed(f"memory={text}")
    assert (run.budget.memory, run.budget.ratio, run.budget.memory_alone) == (Bytes(n), None, True)
    assert (run.resolved()["memory"], run.resolved()["ratio"], run.resolved()["comm"]) == (exact, None, None)
    assert run.budget.label() == f"memory={exact}"


def test_the_default_ratio_steps_back_for_a_budget() -> None:
    run = composed("budget=100")
    assert (run.budget.ratio, run.budget.tokens) == (None, 100)


def test_whole_numbers_may_be_written_with_an_exponent() -> None:
    assert composed("budget=1e3").budget.tokens == 1000


def test_a_model_without_a_file_is_named_after_its_id() -> None:
    assert composed("model=any", "model.id=org/Some-1B").model.name == "some-1b"
    assert composed("model=any", "model.id=models/Some-1B.Q4.gguf").model.name == "some-1b.q4"


def test_out_may_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert composed("out='~/x'").out == tmp_path / "x"


# --- what identifies a run ---


def test_where_results_go_does_not_identify_a_run() -> None:
    run = composed()
    assert composed("out=elsewhere").resolved() == run.resolved()
    assert composed("kernels=torch").resolved() == run.resolved()
    assert replace(run, is_sweep=True).resolved() == run.resolved()


@pytest.mark.parametrize(
    "word",
    [
        *("method=full", "method.n_sink=5", "task.needles=2", "model.chat=none", "ratio=0.3"),
        *("budget=5", "comm=0", "compensate=false", "cache.tokens=256", "seed=1", "limit=3"),
        *("dtype=float32", "device=cpu", "data_dir=x", "compression_scope=context_only"),
    ],
)
def test_everything_else_does(word: str) -> None:
    assert composed(word).resolved() != composed().resolved()


def test_two_spellings_of_a_share_are_the_same_run() -> None:
    assert composed("ratio=1/5", "comm=0.015625").resolved() == composed().resolved()


# --- parameters of methods and tasks ---


class Thing:
    @dataclass(frozen=True)
    class Params:
        count: int
        share: Fraction
        rate: float
        is_on: bool
        name: str
        kind: Literal["a", "b"]
        lengths: tuple[int, ...] | None
        pair: tuple[int, str]
        depths: tuple[float, ...] | int | None
        label: str | None


GOOD: dict[str, Any] = {
    **{"count": 3, "share": "1/3", "rate": 2, "is_on": True, "name": "x", "kind": "a"},
    **{"lengths": [1, 2], "pair": [1, "y"], "depths": 3, "label": None},
}


def built(**changes: Any) -> Thing.Params:
    return build_params(Thing, GOOD | changes, "method")


def test_values_take_the_types_of_their_fields() -> None:
    params = built()
    assert params == Thing.Params(3, Fraction(1, 3), 2.0, True, "x", "a", (1, 2), (1, "y"), 3, None)
    assert isinstance(params.rate, float)
    assert built(count=4.0).count == 4
    assert built(lengths=None).lengths is None
    assert built(depths=[1, 2.5]).depths == (1.0, 2.5)
    assert built(name=7).name == "7"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"count": "abc"}, "method.count=abc is not a whole number"),
        ({"count": None}, "method.count=null is not a whole number"),
        ({"count": True}, "method.count=true is not a whole number"),
        ({"count": 1.5}, "method.count=1.5 is not a whole number"),
        ({"share": "x"}, "method.share=x is not a number"),
        ({"rate": "x"}, "method.rate=x is not a number"),
        ({"is_on": "x"}, "method.is_on=x is not true or false"),
        ({"name": [1]}, "method.name=[1] is not a text"),
        ({"kind": "c"}, "method.kind=c is not allowed; use a or b"),
        ({"lengths": 5}, "method.lengths=5 is not a list; write method.lengths=[5]"),
        ({"lengths": ["x"]}, "method.lengths=x is not a whole number"),
        ({"pair": [1]}, "method.pair=[1] has 1 elements; give 2"),
        ({"cuont": 3}, "no method key 'cuont'; did you mean 'count'"),
    ],
)
def test_a_wrong_parameter_is_one_sentence_with_its_key(changes: dict[str, Any], says: str) -> None:
    assert says in refused(lambda: built(**changes))


def test_a_missing_parameter_is_named() -> None:
    params = {key: value for key, value in GOOD.items() if key != "rate"}
    assert "method.rate is missing" in refused(lambda: build_params(Thing, params, "method"))


@pytest.mark.parametrize("target", ["tasks.nowhere.X", "kvbench.tasks.base.Nothing", "nothing", ""])
def test_a_class_that_does_not_exist_is_named(target: str) -> None:
    assert "task._target_" in refused(lambda: load_class(Choice("task", "x", target, {})))


def test_an_import_that_fails_within_a_class_is_not_the_users_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("import surely_not_installed\n")
    monkeypatch.setattr(kvbench.tasks, "__path__", [*kvbench.tasks.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        load_class(Choice("task", "x", "kvbench.tasks.broken_module.X", {}))


@pytest.mark.parametrize(
    ("group", "target"),
    [
        *(("method", target) for target in ("os.system", "this.d", "..a", "a b.c", "methods.full.Full")),
        *(("method", f"kvbench.{target}") for target in ("methods.full.", "tests.tiny.Model", "methods.full.Budget")),
        ("method", "kvbench.methods.base.SelectiveAttention"),
        *(("task", f"kvbench.{target}") for target in ("tasks.base.Task", "tasks.base.Sample", "methods.full.Full")),
        *(("prefill", "os.system"), ("logger", "os.system"), ("logger", "kvbench.evals.logger.Logger")),
    ],
)  # fmt: skip
def test_a_class_of_another_kind_is_refused_and_no_foreign_module_imported(group: str, target: str) -> None:
    before = set(sys.modules)
    says = refused(lambda: load_class(Choice(group, "x", target, {})))
    assert says.startswith(f"{group}._target_={target} is no ")
    assert not {"this", "kvbench.tests.tiny"} & (set(sys.modules) - before)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        *((NAN, float), (INF, float), (-INF, float | None), ([1.0, NAN], tuple[float, ...] | None)),
        *(
            ([[INF]], tuple[tuple[float, ...], ...]),
            (NAN, int | float),
            (INF, Fraction),
            (NAN, int),
        ),
    ],
    ids=str,
)
def test_no_number_is_infinite(value: Any, hint: Any) -> None:
    assert "method.x=" in refused(lambda: reader(hint)(value, "method.x"))


def test_numbers_have_an_end_in_time() -> None:
    assert "out of range" in refused(lambda: reader(int)(1e30, "cache.tokens"))
    for text in ("1e-99999999", "1e99999999", "1/" + "9" * 1000):
        assert "is not a number" in refused(lambda text=text: reader(Fraction)(text, "ratio"))


@pytest.mark.parametrize("key", ["out", "data_dir", "model.id", "task.path", "hydra.launcher.folder"])
@pytest.mark.parametrize("text", ["", "  ", "~nobody-has-this-name/x", "/x/" + "a" * 256])
def test_a_path_is_one_that_can_be_looked_for(key: str, text: str) -> None:
    hint: Any = Path if key == "out" else PathText
    assert refused(lambda: reader(hint | None)(text, key)).startswith(key)


def test_an_empty_folder_is_not_the_current_one() -> None:
    for words in (["out="], ["out='  '"], ["data_dir="], ["model=any", "model.id="]):
        assert "is empty" in refused(lambda words=words: composed(*words))
