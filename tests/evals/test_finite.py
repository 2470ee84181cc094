"""Numbers that are none: a model whose weights are NaN, and one row whose attention is, whatever is asked."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.engine.attend import Part
from kvbench.engine.sampling.draws import drawn, marked, said
from kvbench.engine.sampling.spec import Sampling
from kvbench.methods.dropping.streamingllm import StreamingLLM
from kvbench.results import RunResult, SampleRow
from kvbench.run import main
from kvbench.tasks import fidelity
from kvbench.tests.tiny_run import run, save_tiny, sweep

NEEDLE = (
    "task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[30,60]", "task.max_new_tokens=12",
)  # fmt: skip
DRAWN = ("temperature=1", "top_p=0.9", "n_answers=2")
PG19 = ("task=pg19", "task.source=embedded", "task.lengths=[60]", "task.targets=8")
FIDELITY = ("task=fidelity", "task.prompt_tokens=60", "task.steps=6", "task.windows=1")
VARIANTS = [["method=full"], ["method=oracle", "ratio=0.3"], ["method=streamingllm", "ratio=0.3"]]
# What a method makes of NaN is its own affair: it may hang on to it, or its linear algebra may refuse it.
METHODS = ("full", "snapkv", "oracle", "shadowkv", "infinigen")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return words_of(save_tiny(tmp_path_factory.mktemp("finite")))


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """A model with such a number among the weights of its second layer's keys."""

    @cache
    def made(number: str) -> list[str]:
        from transformers import AutoModelForCausalLM

        folder = save_tiny(tmp_path_factory.mktemp("damaged"))
        hf: Any = AutoModelForCausalLM.from_pretrained(folder)
        hf.model.layers[1].self_attn.k_proj.weight.data[0, 0] = float(number)
        hf.save_pretrained(folder)
        return words_of(folder)

    return made


def words_of(folder: Path) -> list[str]:
    return ["model=any", f"model.id={folder}", "model.name=tiny"]


def breaks_at(step: int) -> Any:
    """`resident` of a method whose values are NaN from that step of any prompt on, in its first layer."""
    resident = StreamingLLM.resident

    def broken(self: Any, layer: int, q: torch.Tensor) -> list[Part]:
        parts = resident(self, layer, q)
        if layer == 0 and self.store[layer].n_seen - self.trace.s_prompt >= step:
            parts[0].v = parts[0].v * float("nan")
        return parts

    return broken


def answers(done: Sequence[tuple[RunResult, list[SampleRow]]]) -> list[list[tuple[Any, ...]]]:
    return [[(row.id, row.prediction, row.score, row.status) for row in rows] for _, rows in done]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_choose_nothing_are_marked_and_others_are_not(number: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    logits[:, 7] = -torch.inf  # a token that may not be said
    logits[1, 40] = number
    logits[2] = number
    told = [said(token) for token in marked(logits.argmax(-1), logits).tolist()]
    lost = [number != -float("inf"), True]
    assert [token is None for token in told] == [False, *lost, False]
    assert [told[0], told[3]] == logits[[0, 3]].argmax(-1).tolist()


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(0.7, 0.9), Sampling(0.7, 0.9, 20)])
def test_a_row_of_nan_draws_beside_others(sampling: Sampling) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    numbers = torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64)
    right = drawn(logits, numbers, sampling)
    logits[1] = float("nan")
    found = drawn(logits, numbers, sampling)
    assert found[[0, 2]].tolist() == right[[0, 2]].tolist() and 0 <= int(found[1]) < 5000


@pytest.mark.parametrize("method", METHODS)
def test_a_model_with_nan_among_its_weights_answers_nothing(
    method: str, damaged: Callable[[str], list[str]], tmp_path: Path
) -> None:
    result, rows = run([*NEEDLE, *damaged("nan"), f"method={method}", "ratio=0.5", "comm=1/8"], tmp_path / "run")
    assert (result.status, result.n_samples, result.n_oom, result.n_failed) == ("failed", 0, 0, 2)
    assert result.score is None and {(row.status, row.score, row.prediction) for row in rows} == {("failed", None, "")}
    assert all("NaN or infinite" in str(row.error) and "\n" not in str(row.error) for row in rows)
    assert any("2 of 2 samples have no answer" in note for note in result.notes)


@pytest.mark.parametrize("asked", [NEEDLE, (*NEEDLE, *DRAWN), FIDELITY, PG19])
def test_infinite_weights_fail_whatever_is_asked(
    asked: Sequence[str], damaged: Callable[[str], list[str]], tmp_path: Path
) -> None:
    for result, rows in sweep([*asked, *damaged("inf")], VARIANTS, tmp_path):
        assert (result.status, result.score) == ("failed", None) and {row.status for row in rows} == {"failed"}


@pytest.mark.parametrize(
    ("asked", "step"),
    [(NEEDLE, 1), (NEEDLE, 5), ((*NEEDLE, *DRAWN), 5), ((*NEEDLE, "compression_scope=context_only"), 5)],
)
def test_a_row_of_nan_stops_and_its_neighbours_answer_as_ever(
    asked: Sequence[str], step: int, model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sweep([*asked, *model], VARIANTS, tmp_path / "right")
    monkeypatch.setattr(StreamingLLM, "resident", breaks_at(step))
    found = sweep([*asked, *model], VARIANTS, tmp_path / "found")
    assert answers(found)[:2] == answers(right)[:2] and {row.status for _, rows in right for row in rows} == {"ok"}
    assert [result.status for result, _ in found] == ["ok", "ok", "failed"]
    lost, rows = found[2]
    assert lost.n_failed == len({row.sample_id for row in rows})
    assert {(row.status, row.score) for row in rows} == {("failed", None)}
    n_said = 0 if "compression_scope=context_only" in asked else step
    assert {row.error.partition(" generated")[0] for row in rows if row.error} == {f"after {n_said}"}


def test_a_row_of_nan_is_compared_with_nothing_and_the_others_are(
    model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sweep([*FIDELITY, *model], VARIANTS, tmp_path / "right")
    monkeypatch.setattr(StreamingLLM, "resident", breaks_at(3))
    found = sweep([*FIDELITY, *model], VARIANTS, tmp_path / "found")
    assert answers(found)[:2] == answers(right)[:2]
    assert (found[2][0].status, found[2][0].score) == ("failed", None)


def test_variants_are_compared_with_no_full_attention_that_is_nan(
    model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(self: fidelity.Comparison, order: Sequence[int], logits: torch.Tensor) -> None:
        logits[list(order).index(len(self.rows))] = float("nan")
        predicted(self, order, logits)

    predicted = fidelity.Comparison.predicted
    monkeypatch.setattr(fidelity.Comparison, "predicted", nowhere)
    result, _ = run([*FIDELITY, *model, "method=oracle", "ratio=0.3"], tmp_path / "run")
    assert (result.status, result.score) == ("failed", None)


@pytest.mark.parametrize("mode", ["independent", "golden", "dialogue"])
def test_a_turn_of_nan_is_lost_and_neighbours_answer_as_ever(
    mode: str, model: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (*NEEDLE, "task.questions=2", f"task.mode={mode}", "limit=1", *model)
    right = sweep(asked, VARIANTS, tmp_path / "right")
    monkeypatch.setattr(StreamingLLM, "resident", breaks_at(2))
    found = sweep(asked, VARIANTS, tmp_path / "found")
    assert answers(found)[:2] == answers(right)[:2]
    lost, rows = found[2]
    assert lost.status == "failed" and {row.fields["turn"] for row in rows} == {1, 2}
    assert rows[0].status == "failed" and (mode != "dialogue" or rows[1].status == "failed")


def test_a_run_of_nan_ends_with_code_1_and_says_so(
    damaged: Callable[[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*NEEDLE, *damaged("nan"), "method=full", f"out={tmp_path / 'run'}"]
    assert main(asked) == 1
    assert "(NaN)" in capsys.readouterr().out
