from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.engine.budget import Frame
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import LastQueries
from kvbench.engine.passes.trace import Trace
from kvbench.engine.post_processing import AS_THEY_ARE
from kvbench.engine.softmax import Softmax
from kvbench.methods.ranking.finch import Finch
from kvbench.methods.scorers import window_votes
from kvbench.tests.engine.test_post_processing import turn_of
from kvbench.tests.vectors import Check, built, differs, first, load, request, trace_of

PARAMS = Finch.Params(None, True, "head", None, False)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "finch").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """kvpress' and the authors' scores, kept tokens, and keys turned to the first positions."""
    meta, x = load(path)
    q, k, theirs = (torch.from_numpy(x[name]) for name in ("q_window", "k", "k_rerotated"))
    s, n, w = k.shape[2], theirs.shape[2], q.shape[2]
    trace, turn = trace_of(k, k, meta["H"]), turn_of(meta["rope_theta"], meta["d"])
    trace.turn = {0: turn}
    trace.observe(0, LastQueries(w), q, k, Softmax(meta["d"] ** -0.5))
    is_kvpress = "compression_ratio" in meta
    params = replace(PARAMS, normalize=False, per="layer")
    if is_kvpress:
        params = replace(PARAMS, normalize=meta["normalize"], chunk=meta["chunk"], match_published=True)
    asked = request(ratio=str(1 - Fraction(str(meta["compression_ratio"])))) if is_kvpress else request(tokens=n + w)
    row = built(Finch.variant_for(params, asked, trace.shape, s, frame=Frame(n_question=w)).row(trace, 4))
    kept, k_kept = row.store[0].positions().sort(-1).values, torch.cat([p.k for p in row.store[0].resident()], 2)
    n_all = k_kept.shape[2]
    below = turn(k_kept, torch.full((1, n_all), n_all - s))[:, :, :n]  # to 0 and on, where others have them
    scores, wanted = row.shared_scores(0), x["score"]
    if is_kvpress:
        scores, wanted = scores[..., : s - w], wanted[..., : s - w]
    else:
        scores = scores[0, 0] * w * trace.shape.g
    problem = first(
        differs("scores", scores, wanted, 1e-5 * float(abs(wanted).max())),
        *(
            differs("kept", head[:n], x["kept_idx"][0, i] if is_kvpress else x["kept_idx"])
            for i, head in enumerate(kept[0])
        ),
        differs("keys", below, theirs, 1e-4),
    )
    return [(path.stem, problem)]


def wanted_of(kept: np.ndarray, head: int) -> np.ndarray:
    """Of a head, or of all alike."""
    return kept if kept.ndim == 1 else kept[0, head]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_finch_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def traced(w: int, s: int = 80) -> Trace:
    draw = torch.Generator().manual_seed(1)
    q, k = torch.randn(1, 4, s, 16, generator=draw), torch.randn(1, 2, s, 16, generator=draw)
    trace = trace_of(k, k, 4)
    trace.turn = {0: turn_of(10000.0, 16)}
    trace.observe(0, LastQueries(w), q, k, trace.softmax[0])
    return trace


def row(n: int, w: int = 6, post_processing: Any = None, **changes: Any) -> Any:
    trace = traced(w)
    variant = Finch.variant_for(
        replace(PARAMS, **changes),
        request(tokens=n),
        trace.shape,
        80,
        frame=Frame(n_question=w),
        post_processing=post_processing,
    )
    return built(variant.row(trace, 8))


def kept(found: Any) -> list[list[int]]:
    return found.store[0].positions()[0].sort(-1).values.tolist()


def test_one_question_token_without_normalising_is_the_last_querys_vote() -> None:
    found = row(20, w=1, normalize=False)
    votes = window_votes(found.trace, LastQueries(1), 1, 0).unflatten(1, (2, -1)).mean(2)
    assert torch.allclose(found.shared_scores(0), votes)


def test_the_set_is_the_same_whether_gaps_are_closed_or_not_and_the_question_stays() -> None:
    closed, open_ = row(20), row(20, post_processing=AS_THEY_ARE)
    assert kept(closed) == kept(open_) and all(head[-6:] == [*range(74, 80)] for head in kept(closed))
    turned, as_they_were = (torch.cat([p.k for p in found.store[0].resident()], 2) for found in (closed, open_))
    assert not torch.allclose(turned, as_they_were)


def test_a_chunk_keeps_its_share_and_no_token_of_the_question_goes() -> None:
    found = row(26, chunk=30)
    assert [len(head) for head in kept(found)] == [26, 26]
    for head in kept(found):
        assert head[-6:] == [*range(74, 80)]
        assert [sum(start <= p < start + 30 for p in head if p < 74) for start in (0, 30, 60)] == [9, 8, 3]


def test_one_set_for_a_layer() -> None:
    assert kept(row(20, per="layer"))[0] == kept(row(20, per="layer"))[1]
    assert kept(row(20))[0] != kept(row(20))[1]


@pytest.mark.parametrize(
    ("changes", "frame", "says"),
    [
        ({}, Frame(n_question=20), "a budget of 20 tokens leaves nothing beside the 20 of the question"),
        ({}, Frame(n_question=0), "the prompt has no question by which FINCH could choose"),
        ({"window": 30}, Frame(n_question=2), "beside the 30 of the question"),
    ],
)
def test_questions_that_cannot_be_kept_are_refused(changes: dict[str, Any], frame: Frame, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Finch.variant_for(replace(PARAMS, **changes), request(tokens=20), traced(2).shape, 80, frame=frame)
