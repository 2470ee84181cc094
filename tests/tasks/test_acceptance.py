"""Acceptance against reference vectors, its definition, and a rejection sampler that draws."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.engine.errors import ConfigError
from kvbench.engine.sampling.spec import Sampling
from kvbench.evals.screen.table import sheet
from kvbench.plots.table import main
from kvbench.results import read_runs
from kvbench.tasks.acceptance import Drafts, alphas, chances, drafts, expected_length
from kvbench.tasks.fidelity import Comparison
from kvbench.tests.tasks.test_fidelity import STEPS, TASK, watched_decoding
from kvbench.tests.tiny_run import run, save_tiny, sweep
from kvbench.tests.vectors import Check, load

GOLDEN = Path(__file__).parents[1] / "golden" / "acceptance"


# --- vectors ---


def run_vectors(path: Path) -> list[Check]:
    meta, arrays = load(path)
    sampling = Sampling(meta["temperature"], meta["top_p"], meta["top_k"] or None)
    p = chances(torch.from_numpy(arrays["logits_full"]), sampling)
    checks: list[Check] = []
    for i, logits in enumerate(torch.from_numpy(arrays["logits_draft"])):
        alpha = alphas(p, chances(logits, sampling))
        agrees = (torch.from_numpy(arrays["logits_full"]).argmax(-1) == logits.argmax(-1)).tolist()
        wanted, lengths = meta["measures"][i], meta["measures"][i]["expected_length"]
        off = [
            "alpha" if (alpha - torch.from_numpy(arrays["alpha"][i])).abs().max() > 1e-6 else "",
            "agreement" if agrees != arrays["agreement"][i].tolist() else "",
            "acceptance" if abs(alpha.double().mean().item() - wanted["acceptance"]) > 1e-6 else "",
            *(f"length {n}" for n, x in lengths.items() if not is_near(expected_length(alpha, int(n)), x)),
            *(f"greedy {n}" for n, x in wanted["greedy"].items() if differs(drafts(agrees, int(n)), x)),
        ]
        found = ", ".join(word for word in off if word)
        checks.append((f"{path.stem}[{i}]", f"{found} differ" if found else None))
    return checks


def run_blocks(path: Path) -> list[Check]:
    checks: list[Check] = []
    for i, case in enumerate(json.loads(path.read_text())["cases"]):
        flags, alpha = [bool(flag) for flag in case["flags"]], torch.tensor(case["alpha"], dtype=torch.float64)
        off = [f"drafts of {n}" for n, x in case["blocks"].items() if differs(drafts(flags, int(n)), x)]
        lengths = case["expected_length"].items()
        off += [f"length {n}" for n, x in lengths if not is_near(expected_length(alpha, int(n)), x)]
        checks.append((f"{path.stem}[{i}]", f"{', '.join(off)} differ" if off else None))
    return checks


def is_near(found: float | None, wanted: float | None) -> bool:
    return found == wanted if found is None or wanted is None else abs(found - wanted) <= 1e-6


def differs(found: Drafts, wanted: dict[str, Any]) -> bool:
    counts = {"drafts": len(found.starts), "drafted": found.drafted, "accepted": found.accepted}
    counts |= {"accepted_per_position": found.by_position, "starts": found.starts}
    shares = [found.rate, found.length, *(found.per_position or [])]
    theirs = [wanted["rate"], wanted["length"], *(wanted["per_position"] or [])]
    return any(wanted[key] != count for key, count in counts.items()) or not all(map(is_near, shares, theirs))


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_acceptance_agrees_with_its_vectors(path: Path) -> None:
    checks = run_blocks(path) if path.suffix == ".json" else run_vectors(path)
    assert checks and [check for check in checks if check[1]] == []


# --- distributions ---


def two(n: int = 40, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits of full attention and of a draft, (4, n)."""
    generator = torch.Generator().manual_seed(3)
    full = 3 * torch.randn(4, n, generator=generator)
    return full, full + noise * torch.randn(4, n, generator=generator)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.6, 0.95, 20)], ids=["plain", "filtered"])
def test_rejection_sampling_accepts_that_share_and_emits_what_full_attention_would(sampling: Sampling) -> None:
    p, q = (chances(logits[0], sampling).double() for logits in two())
    n, generator = 100_000, torch.Generator().manual_seed(0)
    drafted = torch.multinomial(q, n, replacement=True, generator=generator)
    accepted = torch.rand(n, generator=generator, dtype=torch.float64) <= p[drafted] / q[drafted]
    anew = torch.multinomial((p - q).clamp(min=0), n, replacement=True, generator=generator)
    emitted = torch.where(accepted, drafted, anew).bincount(minlength=len(p)) / n
    alpha = alphas(p, q).item()
    assert accepted.double().mean().item() == pytest.approx(alpha, abs=4 * math.sqrt(alpha * (1 - alpha) / n))
    assert ((emitted - p).abs() <= 4 * (p * (1 - p) / n).sqrt() + 1e-9).all()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.6, 0.95, 20)])
def test_the_same_distribution_is_taken_whole_and_a_disjoint_one_not_at_all(sampling: Sampling) -> None:
    full, _ = two()
    assert alphas(chances(full, sampling), chances(full, sampling)).tolist() == [1] * 4
    ends = torch.full((2, 5), -torch.inf)
    ends[0, 1], ends[1, 3] = 0.0, 7.0
    assert alphas(*chances(ends, sampling)).item() == 0


def test_a_token_that_one_side_cannot_say_adds_nothing() -> None:
    full, draft = two()
    draft[:, :10] = -torch.inf
    p, q = chances(full, Sampling(1.0)), chances(draft, Sampling(1.0))
    assert torch.allclose(alphas(p, q), torch.minimum(p, q)[:, 10:].sum(-1), atol=1e-6)


@pytest.mark.parametrize("shift", [-3.0, 1e4])
def test_a_constant_added_to_all_logits_changes_nothing(shift: float) -> None:
    full, draft = (logits.round(decimals=1).double() for logits in two())
    sampling = Sampling(0.6, 0.95, 20)
    p = chances(full, sampling)
    assert torch.allclose(
        alphas(p, chances(draft, sampling)), alphas(p, chances(draft.add(shift), sampling)), atol=5e-3
    )
    assert alphas(p, chances(full * 1e4, sampling)).isfinite().all()


def test_filters_keep_ties_of_the_kth_and_always_one_token() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 0.0])
    assert (chances(logits, Sampling(1.0, 1.0, 2)) > 0).tolist() == [True, True, True, False]
    assert chances(logits, Sampling(1.0, 0.01)).tolist() == [1, 0, 0, 0]
    tied = torch.tensor([0.0, 5.0, 5.0, 1.0])
    assert chances(tied, Sampling()).tolist() == chances(tied, Sampling(1.0, 0.01)).tolist() == [0, 1, 0, 0]
    half = torch.tensor([0.5, 0.3, 0.2]).log()
    assert (chances(half, Sampling(1.0, 0.75)) > 0).tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_vocabulary_in_any_dtype_is_summed_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    p, q = (torch.randn(150_000, generator=generator).to(dtype) for _ in "pq")
    exact = torch.minimum(p.double().softmax(-1), q.double().softmax(-1)).sum().item()
    assert alphas(chances(p, Sampling(1.0)), chances(q, Sampling(1.0))).item() == pytest.approx(exact, abs=1e-5)


def test_a_draft_longer_than_the_feed_has_no_value() -> None:
    counts = drafts([True] * 3, 4)
    assert (expected_length(torch.ones(3), 4), counts.rate, counts.length, counts.per_position) == (None,) * 4


# --- in the task ---


def test_alpha_of_every_step_is_bound_by_its_divergence_and_a_row_depends_on_no_other() -> None:
    _, trace, watch, _ = watched_decoding()
    for sampling in (Sampling(1.0), Sampling()):
        every = Comparison(trace, watch.rows, STEPS, watch.params, sampling)
        alone = Comparison(trace, watch.rows[:1], STEPS, watch.params, sampling)
        for logits in watch.logits:
            every.predicted(range(5), logits)
            alone.predicted([1, 0], logits[[4, 0]])
        alpha, kl = every.by_step["alpha"], every.by_step["kl"]
        assert torch.equal(alpha[:, :1], alone.by_step["alpha"])
        if sampling.is_greedy:
            assert torch.equal(alpha, every.by_step["agreement"])
        else:
            assert (1 - alpha <= (kl / 2).sqrt() + 1e-6).all() and (alpha < 1).any()


def test_logits_that_are_no_numbers_fail_their_sample_and_name_the_step() -> None:
    _, trace, watch, _ = watched_decoding()
    compared = Comparison(trace, watch.rows, STEPS, watch.params, Sampling(1.0))
    for step, logits in enumerate(watch.logits):
        given = logits.clone()
        given[1] = torch.nan if step == STEPS - 1 else given[1]
        given[2] = -torch.inf if step == 1 else given[2]
        compared.predicted(range(5), given)
    assert [outcome.lost_at for outcome in compared.outcomes()] == [None, STEPS, 2, None]


def test_without_full_attention_in_the_batch_nothing_is_compared() -> None:
    _, trace, watch, _ = watched_decoding()
    with pytest.raises(AssertionError, match="wants_full"):
        Comparison(trace, watch.rows, STEPS, watch.params).predicted(range(4), watch.logits[0][:4])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["model=any", f"model.id={save_tiny(tmp_path_factory.mktemp('acceptance'))}", *TASK]


def test_figures_of_a_run_follow_from_one_another(checkpoint: list[str], tmp_path: Path) -> None:
    cells = [["method=full"], ["method=streamingllm", "ratio=0.3"]]
    (full, _), (ends, rows) = sweep([*checkpoint, "task.draft=[1,4,9]"], cells, tmp_path / "drawn")
    whole, found = full.measures or {}, ends.measures or {}
    assert [whole[name] for name in ("acceptance", "expected_length_1", "expected_length_4")] == [1, 2, 5]
    assert found["expected_length_1"] == pytest.approx(1 + (found["acceptance"] or 0), abs=2e-6)
    assert found["expected_length_9"] is None and "rate_4" not in found
    for row in rows:
        alpha = torch.tensor(row.fields["by_step"]["alpha"])
        assert row.fields["measures"]["acceptance"] == pytest.approx(alpha.mean().item(), abs=2e-6)
        assert row.fields["measures"]["expected_length_4"] == pytest.approx(expected_length(alpha, 4), abs=1e-5)
        assert "forced" not in row.fields
    assert "expected\nlength_4" in sheet([(tmp_path, full)]).heads


def test_greedy_drafts_are_counted_and_marked_where_full_attention_did_not_write_the_text(
    checkpoint: list[str], tmp_path: Path
) -> None:
    cells = [["method=full"], ["method=streamingllm", "ratio=0.3"]]
    for words, is_forced in (([], True), (["task.continuation=greedy"], False)):
        done = sweep([*checkpoint, "task.temperature=0", *words], cells, tmp_path / str(is_forced))
        assert any("forced" in note for note in done[0][0].notes) == is_forced
        for result, rows in done:
            measures = result.measures or {}
            assert measures["acceptance"] == measures["agreement"]
            assert {row.fields["forced"] for row in rows} == {is_forced}
        whole = done[0][0].measures or {}
        assert (whole["rate_4"], whole["greedy_length_4"], whole["greedy_length_6"]) == (1, 5, 7)
        assert done[0][1][0].fields["per_position"] == {"4": [1] * 4, "6": [1] * 6}


def test_heads_have_errors_of_their_own_with_intervals_over_the_samples(checkpoint: list[str], tmp_path: Path) -> None:
    _, rows = run([*checkpoint, "method=streamingllm", "ratio=0.3"], tmp_path / "run")
    head, *lines = (tmp_path / "run" / "heads.csv").read_text().splitlines()
    assert head == "layer,head,output_error,low,high,n" and len(lines) == 3 * 6
    layer, number, error, low, high, n = lines[7].split(",")
    own = [row.fields["by_head"]["output_error"][1][1] for row in rows]
    assert (layer, number, n) == ("1", "1", "2")
    assert float(error) == pytest.approx(sum(own) / 2, abs=1e-6) and 0 <= float(low) <= float(error) <= float(high)


def test_a_table_prints_the_figure_by_its_name(
    checkpoint: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(checkpoint, [["method=full"], ["method=streamingllm", "ratio=0.3"]], tmp_path)
    assert len(read_runs(tmp_path)) == 2
    for name, whole in (("acceptance", "| 1.000 |"), ("expected_length_4", "| 5.000 |")):
        assert main([str(tmp_path), "--value", name]) == 0
        said = capsys.readouterr().out
        assert f"{name} by method" in said and whole in said and "2 samples a cell" in said


def test_filters_of_greedy_drafts_are_refused(checkpoint: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="top_k=20 means nothing with temperature=0"):
        run([*checkpoint, "method=full", "task.temperature=0", "task.top_k=20"], tmp_path / "run")
