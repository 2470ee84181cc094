"""Methods of others that would break a run, or its books: refused, stopped with a sentence, or marked."""

from pathlib import Path

import pytest

from kvbench.results import RunResult, read_runs
from kvbench.run import main
from kvbench.tests.cheats import CHEATS, HEAD
from kvbench.tests.tiny_run import save_tiny

TASK = ("task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[50]", "task.max_new_tokens=4")
SELECTS = (
    HEAD.format(drops=False)
    + """
    def arrange(self, layer):
        return Offloaded(0, 4)
    def select(self, layer, q):
        idx = torch.arange({first}, {first} + 20)
        {change}
        return Selection(idx.expand(1, self.trace.shape.h_kv, -1), Cost(moved_bytes={moved}))
"""
)
LEAVES = {
    "while selecting": SELECTS.format(first=0, change="import sys; sys.exit(0)", moved=0),
    "in a plan": HEAD.format(drops=True)
    + """
    @classmethod
    def plan_for(cls, params, budget, shape):
        raise SystemExit
    def arrange(self, layer):
        return Kept(self.budget.tokens)
""",
    "in a label": HEAD.format(drops=True)
    + """
    @classmethod
    def label(cls, params, request):
        quit()
    def arrange(self, layer):
        return Kept(self.budget.tokens)
""",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def run(body: str, model: Path, folder: Path, *words: str) -> tuple[int, list[RunResult]]:
    """The exit code of a run of this method, and the results that it left."""
    path, out = folder / "mine.py", folder / "out"
    path.write_text(body)
    given = ["model=any", f"model.id={model}", "ratio=0.1", "comm=1/64", "dtype=float32", "device=cpu", f"out={out}"]
    code = main([f"method={path}", *TASK, *given, *words])
    return code, [result for _, result in read_runs(folder)] if out.exists() else []


@pytest.mark.parametrize("where", LEAVES)
def test_a_method_that_ends_the_process_is_an_error(
    where: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(LEAVES[where], model, tmp_path) == (1, [])
    said = capsys.readouterr().err
    assert f"{tmp_path / 'mine.py'}, line" in said and "a method must not end the process" in said
    assert not list(tmp_path.rglob("result.json"))


@pytest.mark.parametrize(
    ("first", "change", "says"),
    [
        (10**6, "pass", "hold positions 1000000, 1000001"),
        (0, "idx[3] = -5", "hold position -5, and there are 0 to"),
        (0, "idx[3] = self.store[layer].n_seen", "and there are 0 to"),
        (0, "idx[3] = 2", "hold position 2 of head 0 twice"),
        (0, "idx[3] = self.store[layer].n_seen - 1", "which the device holds and the step attends to already"),
        (0, "idx = idx.float()", "are torch.float32, and positions are whole numbers"),
        (0, "return idx", "have the shape (20,)"),
    ],
)
def test_a_selection_of_what_is_not_there_stops_the_run(
    first: int, change: str, says: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(SELECTS.format(first=first, change=change, moved=0), model, tmp_path)
    said = capsys.readouterr().err
    assert code == 1
    assert "Mine: the positions selected in step 1 of layer 0" in said and says in said, said


@pytest.mark.parametrize("chosen", ["torch.full((1, 2, 5), 10**7)", "torch.zeros(1, 2, 5, dtype=torch.int64)"])
def test_what_is_kept_is_checked_as_well(
    chosen: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = HEAD.format(drops=True) + f"\n    def arrange(self, layer):\n        return Kept({chosen})\n"
    assert run(body, model, tmp_path) == (1, [])
    assert "Mine: the positions kept in layer 0 hold position" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["PSEUDO_TOKENS", "COUNTED_PSEUDO_TOKENS", "TOKENS_BESIDE"])
def test_what_attention_reads_is_counted_whatever_a_method_says(name: str, model: Path, tmp_path: Path) -> None:
    code, (result,) = run(CHEATS[name], model, tmp_path)
    assert code == 0
    assert result.within_budget is False


@pytest.mark.parametrize("name", ["ATTENDS_LATER_TO_COPIES", "SEARCHES_A_COPY"])
def test_tensors_far_beyond_what_is_counted_are_marked(name: str, model: Path, tmp_path: Path) -> None:
    _, (result,) = run(CHEATS[name], model, tmp_path)
    assert result.within_budget is False
    assert any("tensors of its own, far more than it counts" in note for note in result.notes)


@pytest.mark.parametrize("name", ["SKIPS_EVERYTHING", "SKIPS_AFTERWARDS"])
def test_a_method_that_skips_every_layer_is_refused(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(CHEATS[name], model, tmp_path) == (2, [])
    assert "whole_layers() of Mine names all" in capsys.readouterr().err


def test_an_honest_method_is_not_marked(model: Path, tmp_path: Path) -> None:
    honest = SELECTS.format(first=0, change="", moved=10)
    _, (result,) = run(honest, model, tmp_path)
    assert result.within_budget is True and not any("tensors" in note for note in result.notes)
