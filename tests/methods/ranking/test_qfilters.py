from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Known
from kvbench.engine.shapes import Checkpoint
from kvbench.methods.calibration import files
from kvbench.methods.calibration.qfilters import directions, filters
from kvbench.methods.ranking.qfilters import QFilters, calibrated
from kvbench.tests.vectors import Check, at, differs, first, load, request, row_of, step, trace_of

PARAMS = QFilters.Params(64, "prompt", "missing", None)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "qfilters").glob("*.npz"))


def row(k: Tensor, of: Tensor, params: QFilters.Params, s_prompt: int | None = None, h: int = 4, **more: Any) -> Any:
    trace = trace_of(k, k, h, s_prompt)
    trace.know(calibrated(params), Known({0: of}))
    return row_of(QFilters, params, trace, **more)


def run_vectors(path: Path) -> list[Check]:
    """The authors' filter, kvpress' scores and set, and the authors' cache over several steps."""
    meta, x = load(path)
    k, of = torch.from_numpy(x["k"]), torch.from_numpy(x["filter"][0])
    if "queries" in x:
        made = filters(torch.from_numpy(x["queries"]), meta["Hk"])
        budget = request(ratio=str(1 - Fraction(str(meta["compression_ratio"]))))
        found = row(k, of, replace(PARAMS, window=0), h=meta["H"], budget=budget)
        kept = found.store[0].positions().sort(-1).values
        scores = found.shared_scores(0)
        problem = first(
            differs("filter", made, x["filter"][0], 1e-5),
            differs("scores", scores, x["score"], 1e-5 * float(np.abs(x["score"]).max())),
            differs("kept", kept, x["kept_idx"]),
        )
        return [(path.stem, problem)]
    plan = QFilters.Plan(meta["max_length"], meta["window"])
    params = replace(PARAMS, window=meta["window"], evict="always")
    found = row(k, of, params, meta["prompt"], meta["Hk"], budget=request(tokens=meta["max_length"]), plan=plan)
    problems = [held_differs(found, x["held"][0])]
    for t in range(meta["steps"]):
        now = at(x["k"], meta["prompt"] + t)
        step(found, now, now, now, t + 1)
        problems.append(held_differs(found, x["held"][t + 1]))
    return [(path.stem, first(*problems))]


def held_differs(found: Any, theirs: np.ndarray) -> str | None:
    return differs("held", found.store[0].positions()[0].sort(-1).values, np.sort(theirs, -1))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_qfilters_agree_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def drawn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def test_equal_queries_have_their_own_direction() -> None:
    q = drawn(3, 1, 8)
    assert torch.allclose(directions(q.expand(-1, 7, -1)), q[:, 0] / q[:, 0].norm(dim=-1, keepdim=True), atol=1e-6)


def test_half_of_the_queries_is_not_more_than_half() -> None:
    u = torch.eye(4)[0]
    found = directions(torch.stack([u, -u, u, -u]).unsqueeze(0))[0]
    flipped = directions(torch.stack([u, u, u, -u]).unsqueeze(0))[0]
    assert torch.allclose(flipped, u, atol=1e-6) and torch.allclose(found.abs(), u, atol=1e-6)


def kept(k: Tensor, of: Tensor) -> list[list[int]]:
    found = row(k, of, replace(PARAMS, window=4), budget=request(tokens=20))
    return found.store[0].positions()[0].sort(-1).values.tolist()


def test_lengths_of_heads_and_what_is_across_the_direction_change_nothing() -> None:
    k, of = drawn(1, 2, 60, 8), drawn(2, 8, seed=1)
    across = drawn(2, 8, seed=2)
    across -= (across * of).sum(-1, keepdim=True) / of.square().sum(-1, keepdim=True) * of
    assert kept(k * torch.tensor([2.0, 5.0]).view(1, 2, 1, 1), of) == kept(k, of)
    assert kept(k + across.view(1, 2, 1, 8), of) == kept(k, of)
    assert [head[-4:] for head in kept(k, of)] == [[56, 57, 58, 59]] * 2


def test_a_window_is_a_quarter_of_the_budget_at_most() -> None:
    assert row(drawn(1, 2, 60, 8), drawn(2, 8), PARAMS, budget=request(tokens=20)).plan == QFilters.Plan(20, 5)


def file_of(path: Path, of: np.ndarray, kind: str = "qfilters") -> Path:
    shape = trace_of(drawn(1, 2, 10, 8), drawn(1, 2, 10, 8), 4).shape
    said = files.about(kind, shape, "0123", "a text", 100, "2026-01-01")
    files.write(path, files.Calibration(said, {"filters": of}))
    return path


@pytest.mark.parametrize(
    ("of", "says"),
    [
        (np.zeros((1, 2, 8), np.float32) * np.nan, "has directions that are no finite numbers"),
        (np.zeros((1, 4, 8), np.float32), r"has an array of \(1, 4, 8\) for filters"),
    ],
)
def test_a_file_that_is_no_good_is_refused(tmp_path: Path, of: np.ndarray, says: str) -> None:
    shape = trace_of(drawn(1, 2, 10, 8), drawn(1, 2, 10, 8), 4).shape
    params = replace(PARAMS, calibration_file=file_of(tmp_path / "x.npz", of))
    with pytest.raises(ConfigError, match=says):
        QFilters.check(params, request(tokens=5), shape)


def test_another_models_file_and_a_model_without_one_are_refused(tmp_path: Path) -> None:
    shape = trace_of(drawn(1, 2, 10, 8), drawn(1, 2, 10, 8), 4).shape
    model = Checkpoint(shape, ("4567",), 8)
    params = replace(PARAMS, calibration_file=file_of(tmp_path / "x.npz", np.zeros((1, 2, 8), np.float32)))
    QFilters.check(params, request(tokens=5), shape)
    with pytest.raises(ConfigError, match="is the calibration of another model"):
        QFilters.check_model(params, model)
    with pytest.raises(ConfigError, match="there is no calibration of kind qfilters"):
        QFilters.check_model(replace(PARAMS, calibrate="never"), model)
    with pytest.raises(ConfigError, match="is a calibration of kind pca"):
        other = file_of(tmp_path / "pca.npz", np.zeros((1, 2, 8), np.float32), "pca")
        QFilters.check(replace(PARAMS, calibration_file=other), request(tokens=5), shape)
