"""Several answers to a prompt: whose they are, that they depend on nothing else, and what a run says of them."""

from collections import defaultdict
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.engine.errors import ConfigError
from kvbench.evals.runner import run_cells
from kvbench.methods.decoding.random_decode import RandomDecode
from kvbench.results import RunFolder, read_samples
from kvbench.results.summary import chance_of_one
from kvbench.tests.tiny_run import cell, save_tiny, sweep

NEEDLE = (
    "task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[30,60]", "task.max_new_tokens=24",
)  # fmt: skip
DRAWN = ("temperature=1", "top_p=0.95", "n_answers=3")
SMALL = ("method.interval=8", "budget=64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"{save_tiny(tmp_path_factory.mktemp('model'))}"


def words(model: str) -> list[str]:
    return [*NEEDLE, *DRAWN, "model=any", f"model.id={model}"]


def test_draws_are_the_same_alone_and_beside_others(model: str, tmp_path: Path) -> None:
    variants = [
        ["method=full"],
        ["method=rkv", *SMALL],
        ["method=h2o_decode", *SMALL],
        ["method=streamingllm_decode", *SMALL, "budget_counts=peak"],
        ["method=random_decode_unprotected", *SMALL],
        ["method=vase", *SMALL, "method.window=8"],
        ["method=append_only", "method.scorer=random"],
    ]
    together = sweep(words(model), variants, tmp_path / "together")
    for i, (result, rows) in enumerate(together):
        ((alone, alone_rows),) = sweep(words(model), [variants[i]], tmp_path / f"alone-{i}")
        assert [row.id for row in rows] == [row.id for row in alone_rows]
        assert [row.prediction for row in rows] == [row.prediction for row in alone_rows]
        assert result.score == alone.score and result.pass_at_k == alone.pass_at_k
    (full, full_rows), (rkv, rkv_rows), _, (peak, _), *_ = together
    assert [row.fields["draw"] for row in full_rows] == [0, 1, 2] * 2
    assert len({row.sample_id for row in full_rows}) == 2 and len({row.prediction for row in full_rows}) == 6
    assert full.footprint == full.footprint_vs_full == 1
    assert full.n_samples == 2 and full.answer_tokens_mean is not None and full.cut_off_share is not None
    assert full.sampling == {"temperature": 1.0, "top_p": 0.95, "n_answers": 3}
    assert rkv.budget_counts == "target" and rkv.peak_entries == 72 and rkv.reached_answers == rkv.reached_steps == 1
    assert peak.budget_counts == "peak" and peak.peak_entries == 64
    assert rkv.footprint is not None and rkv.footprint_vs_full is not None and 0 < rkv.footprint_vs_full
    # The first token comes from the prefill, and so from the same logits and the same number.
    assert [row.prediction[:1] for row in rkv_rows] == [row.prediction[:1] for row in full_rows]


def test_draws_of_a_prompt_lose_tokens_of_their_own(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reorder, kept = RandomDecode.reorder, defaultdict[tuple[int, int], dict[int, Tensor]](dict)

    def seen(self: RandomDecode, layer: int, slots: Tensor) -> None:
        reorder(self, layer, slots)
        kept[layer, self.n_cuts[layer]].setdefault(self.draw, slots)

    monkeypatch.setattr(RandomDecode, "reorder", seen)
    sweep(words(model), [["method=random_decode_unprotected", *SMALL]], tmp_path)
    assert {n for _, n in kept} == {1, 2, 3, 4}, "the prompt, and three cuts of the answer"
    for by_draw in kept.values():
        assert by_draw.keys() == {0, 1, 2}
        assert not any(torch.equal(one, other) for one, other in combinations(by_draw.values(), 2))


def test_a_run_that_was_killed_between_draws_goes_on_with_the_same(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [cell([*words(model), "method=rkv", *SMALL], tmp_path / name) for name in ("whole", "killed")]
    ((whole, result),) = run_cells(cells[:1])
    append, n = RunFolder.append, 0

    def dies(self: RunFolder, *args: object) -> None:
        nonlocal n
        n += 1
        if n == 3:
            raise KeyboardInterrupt
        append(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "append", dies)
        run_cells(cells[1:])
    assert [row.id.partition("#")[2] for row in read_samples(tmp_path / "killed")] == ["0", "1"]
    ((killed, again),) = run_cells(cells[1:])
    texts = [[(row.id, row.prediction, row.score) for row in read_samples(path)] for path in (whole, killed)]
    assert texts[0] == texts[1]
    assert (again.score, again.score_ci95, again.pass_at_k) == (result.score, result.score_ci95, result.pass_at_k)


def test_the_first_of_several_draws_is_the_only_one_of_one(model: str, tmp_path: Path) -> None:
    several, one = (
        sweep([*words(model)[:-3], f"n_answers={n}", *words(model)[-2:]], [["method=full"]], tmp_path / str(n))[0][1]
        for n in (2, 1)
    )
    assert [row.prediction for row in several[::2]] == [row.prediction for row in one]


def test_pass_at_k_is_without_bias() -> None:
    assert chance_of_one(4, 1, 1) == 0.25 and chance_of_one(4, 2, 2) == pytest.approx(1 - 1 / 6)
    assert chance_of_one(4, 0, 4) == 0 and chance_of_one(4, 1, 4) == 1
    right = [True, True, False, False, False]
    for k in range(1, 6):
        pairs = [any(draw) for draw in combinations(right, k)]
        assert chance_of_one(5, 2, k) == pytest.approx(sum(pairs) / len(pairs))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["method=rkv", "ratio=0.2"], "ratio=0.2 is a share of a prompt"),
        (["method=rkv"], "give budget=N tokens"),
        (["method=rkv", "budget=64", "comm=1/64"], "comm=1/64 means nothing for R-KV"),
        (["method=rkv", "budget=64", "memory=1/8"], "memory=1/8 limits a prompt's cache"),
        (["method=rkv", "budget=8"], "budget=8 is too small"),
        (["method=triattention", "budget=200"], "does not hold a protected prompt of"),
        (["method=snapkv", "budget=64", "budget_counts=mean"], "use method=snapkv_decode"),
        (["method=knorm", "budget=64", "budget_counts=peak"], "use one of append_only_budget, full_stopped"),
        (["method=rkv", "budget=64", "budget_counts=most"], "use target, mean or peak"),
        (["method=full", "temperature=-1"], "temperature=-1 is out of range"),
        (["method=full", "temperature=1", "top_p=0"], "top_p=0 is out of range"),
        (["method=full", "temperature=1", "n_answers=3000000000"], "takes 1,152 GB of keys and values"),
        (["method=full", "temperature=1", "n_answers=100000"], "n_answers=100000 is out of range; it is at most 1024"),
        (["method=full", "temperature=1e-320"], "temperature=1e-320 is out of range"),
        (["method=full", "n_answers=2"], "n_answers=2 means nothing with temperature=0"),
        (["method=full", "task.max_new_tokens=900"], "holds with the answer; the longest that fits is 174"),
    ],
)
def test_what_is_refused_before_anything_is_made(given: list[str], says: str, model: str, tmp_path: Path) -> None:
    base = [word for word in NEEDLE if not word.startswith("task.max")] if "max_new" in given[-1] else [*NEEDLE]
    with pytest.raises(ConfigError) as error:
        run_cells([cell([*base, *given, "model=any", f"model.id={model}"], tmp_path / "run")])
    assert says in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_answers_that_no_memory_holds_are_refused_before_the_model_is_loaded(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.evals.models.load", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr("kvbench.evals.prepare.machine_bytes", lambda device: 10**6)
    many = [*words(model), "n_answers=1000", "method=full"]  # 24 tokens of 384 bytes each
    with pytest.raises(ConfigError, match=r"of 900 answers of up to 24 tokens at once take 0\.00829 GB, and cpu has"):
        run_cells([cell([*many, "sweep.max_variants=900"], tmp_path / "run")])
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    assert run_cells([cell([*many, "n_answers=3", "sweep.max_variants=900"], tmp_path / "few")])


def test_answers_that_memory_holds_one_by_one_are_not_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.evals.prepare.machine_bytes", lambda device: 10**4)
    ((result, rows),) = sweep(words(model), [["method=full"]], tmp_path)
    assert (result.status, len(rows)) == ("ok", 6)
