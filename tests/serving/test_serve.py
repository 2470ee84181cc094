"""The server's command line, and the run's, where vLLM is not needed or not there."""

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench import run
from kvbench.engine.errors import ConfigError
from kvbench.evals.settings import from_words
from kvbench.results import LEDGER_MEANS
from kvbench.results.read import read_samples
from kvbench.results.served import FILE
from kvbench.serving.measure import Figures, Load, Reply, Request, bench
from kvbench.serving.order import chosen
from kvbench.serving.run import words_of
from kvbench.serving.serve import Command, main, served_name, usual_rung

NO_VLLM = pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")


def test_a_command_is_words_of_run_py_and_of_vllm() -> None:
    found = Command.read(["method=snapkv", "ratio=0.2", "port=9000", "vllm.max_model_len=4096", "rung=visible"])
    assert found.words == ["method=snapkv", "ratio=0.2"] and found.flags == {"max_model_len": 4096}
    assert (found.port, found.rung, found.as_shipped) == (9000, "visible", False)


def test_a_word_of_the_server_s_own_has_its_type() -> None:
    found = Command.read(["as_shipped=true", "chains=4"])
    assert found.as_shipped is True and found.chains == 4 and Command.read(["as_shipped=true"]).order() is None
    for word in ("as_shipped=1", "chains=true", "chains=many", "port=8000.5"):
        with pytest.raises(ConfigError, match=f"{word} is not allowed"):
            Command.read([word])
    for words in (["chains=-1"], ["chains=2", "as_shipped=true"]):
        with pytest.raises(ConfigError, match="conversations that a method keeps"):
            Command.read(words).order()


def test_a_model_is_called_after_its_method() -> None:
    order = Command.read(["method=snapkv", "ratio=0.2"]).order()
    assert order is not None and order.rung == "dropping"
    assert served_name("smollm2-135m", order) == "smollm2-135m-snapkv-0.2"
    assert served_name("smollm2-135m", None) == "smollm2-135m"
    assert usual_rung(["method=pqcache"]) == "visible"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["method=adakv"], "heads of a layer keep different counts"),
        (["method=snapkw"], "snapkw"),
        (["method=snapkv", "rung=high"], "rung=high is unknown"),
        (["method=snapkv", "port=many"], "port is of type int"),
        pytest.param(["method=snapkv"], "make setup-serving", marks=NO_VLLM),
    ],
)
def test_what_cannot_be_served_is_one_sentence_and_code_2(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1


@NO_VLLM
def test_a_run_without_vllm_says_how_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = sys.argv
    code = run.main(["task=serving", "method=snapkv", f"out={tmp_path / 'a'}"])
    sys.argv = argv
    assert code == 2 and "make setup-serving" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["method=adakv", "task.rung=dropping"], "heads of a layer keep different counts"),
        (["method=snapkv", "prefill=minference"], "prefill= is not served by vLLM"),
        (["method=snapkv", "temperature=0.6"], "temperature= is not served by vLLM"),
    ],
)
def test_a_run_refuses_what_is_not_served(
    words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method's words are composed again, within the run that Hydra composed."""
    monkeypatch.setattr("kvbench.serving.run.need_vllm", lambda: None)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    assert run.main([*words, "task=serving", "ratio=0.2", "dtype=float32", f"out={tmp_path / 'a'}"]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def engines(monkeypatch: pytest.MonkeyPatch, said: str = "nothing") -> tuple[list[Any], list[Load]]:
    """Engines that answer nothing to the point, in place of vLLM's: how each was started, and what load it had."""
    started, loads = list[Any](), list[Load]()

    def start(order: Any, model: str, **flags: Any) -> Any:
        started.append((order and order.rung, {key: flags.get(key) for key in FLAGS}))
        books = dict.fromkeys([*LEDGER_MEANS.values()], 1.0) | {"s_prompt": 300, "within_budget": True}
        told = {"books": {f"request-{i:04}-x": books for i in range(2)}, "replays": 0}
        llm = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(decode=lambda ids, **_: said))
        return SimpleNamespace(llm=llm, told=lambda: told, close=lambda: None)

    def drive(engine: Any, requests: Sequence[Request], load: Load) -> Any:
        loads.append(load)
        times, n = {"p50": 1.0, "p90": 1.0, "p99": 1.0}, len(requests)
        replies = [Reply(one, [1, 2, 3], [1.0, 1.5, 2.0]) for one in requests]
        more = 32, 568, bench(replies, 2.0, load)
        return replies, Figures(n, 3, n, n, 0, 60, 20, 15.0, 0, [20, 15, 10], 2.0, 3 * n, 1.5 * n, times, times, *more)

    monkeypatch.setattr("kvbench.serving.run.need_vllm", lambda: None)
    monkeypatch.setattr("kvbench.serving.adapter.front.Engine.start", start)
    monkeypatch.setattr("kvbench.serving.measure.drive", drive)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    return started, loads


FLAGS = "block_size", "enable_prefix_caching", "async_scheduling"
SHORT = ["task.requests=2", "task.lengths=[300,300]", "dtype=float32"]


def test_a_run_s_folder_has_the_answers_and_what_three_engines_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, _ = engines(monkeypatch)
    folder = tmp_path / "a"
    assert run.main(["method=full", "task=serving", *SHORT, f"out={folder}"]) == 0
    assert [(rung, flags["block_size"]) for rung, flags in started] == [(None, 32), (None, 32), ("visible", None)]
    made = json.loads((folder / FILE).read_text())
    assert [*made] == ["as shipped", "with the method's restrictions", "method"]
    assert {each["score"] for each in made.values()} == {0.0}
    row, _ = read_samples(folder)
    assert (row.prediction, row.score, row.generated_tokens, row.tpot_s) == ("nothing", 0.0, 3, 0.5)


def test_limits_and_flags_reach_the_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM as shipped keeps its own flags."""
    started, loads = engines(monkeypatch)
    words = ["task.prefix_caching=true", "task.async_scheduling=false", "task.max_concurrency=1", "task.warmups=2"]
    words += ["task.ttft_ms=1200", "task.tpot_ms=600", f"out={tmp_path / 'a'}"]
    assert run.main(["method=full", "task=serving", *SHORT, *words]) == 0
    given = [(flags["enable_prefix_caching"], flags["async_scheduling"]) for _, flags in started]
    assert given == [(None, None), (True, False), (True, False)]
    assert loads == [Load(1, 2, {"ttft": 1200, "tpot": 600})] * 3
    made = json.loads((tmp_path / "a" / FILE).read_text())["method"]["bench"]
    assert made["request_goodput"] == 1.0 and made["goodput"] == {"ttft": 1200, "tpot": 600}


def test_a_multirun_ends_with_a_table_of_its_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines(monkeypatch)
    words = ["-m", "method=full,snapkv", "ratio=0.2", "task=serving", *SHORT, f"out={tmp_path}/${{method}}"]
    assert run.main(words) == 0
    said = capsys.readouterr().out
    for label in ("Full, as shipped", "Full, with the method's restrictions", "SnapKV (C)", "ratio 0.2"):
        assert label in said
    assert "goodput is - without a limit" in said and "say nothing of a GPU's" in said


def test_a_cell_s_settings_are_said_in_words_again() -> None:
    words = ["method=streamingllm", "method.n_sink=8", "budget=100", "comm=1/32"]
    given = from_words(words)
    again = chosen(words_of(given)).settings
    assert again.method == given.method and again.budget == given.budget and again.model == given.model
