from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.rows.collisions import chance
from kvbench.methods.full import Full
from kvbench.methods.retrieving.magicpig import (
    CALIBRATION,
    MagicPIG,
    affordable_tables,
    codes_of,
    dense_layers,
    draw_planes,
)
from kvbench.tests.vectors import Check, built, differs, first, load, request, row_for, row_of, step, trace_of

PARAMS = MagicPIG.Params(10, "auto", 4, 64, 0, 0)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "magicpig").glob("*.npz"))


# --- Reference vectors ------------------------------------------------------------------------


def run_vectors(path: Path) -> list[Check]:
    """Authors' accuracy code: means, codes, samples, chances, outputs, with their hyperplanes."""
    return [(path.stem, check_steps(*load(path)))]


def hashing_with(planes: np.ndarray) -> type[MagicPIG]:
    """The method with hyperplanes that are given."""
    return type("MagicPIG", (MagicPIG,), {"planes": lambda self, tables: torch.from_numpy(planes)})


def check_steps(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    q, k, v = (torch.from_numpy(x[name]).unsqueeze(0) for name in ("q", "k", "v"))
    s, bits, tables, n_sink, window = (meta[name] for name in ("S", "K", "L", "n_sink", "window"))
    params = replace(PARAMS, bits=bits, tables=tables)
    plan = MagicPIG.Plan(n_sink, window, 1, 1 << 40)
    h, stop = q.shape[1], s - window
    row = row_of(hashing_with(x["hash_matrix"]), params, trace_of(k, v, h, s), request(tokens=s - 1, comm="1"), plan)
    index, planes = row.indexes[0], torch.from_numpy(x["hash_matrix"])
    means = index.hashed.means
    centred = k[0, :, n_sink:stop] - means.unsqueeze(1)
    problem = first(
        differs("mean of keys", means, x["avg_key"], 1e-6),
        differs("codes of keys", codes_of(centred, planes, bits).mT, x["key_codes"]),
    )
    for t in range(meta["steps"]):
        now = q[:, :, t : t + 1]
        out = step(row, now, k[:, :, s + t : s + t + 1], v[:, :, s + t : s + t + 1], t + 1)
        grouped = now[0, :, 0].view(k.shape[1], -1, k.shape[-1])
        keys = (k[0, :, n_sink:stop].double() - means.double().unsqueeze(1)).repeat_interleave(grouped.shape[1], 0)
        cosine = torch.cosine_similarity(keys, now[0].double(), dim=-1)
        problem = first(
            problem,
            differs(f"codes of queries {t}", codes_of(grouped, planes, bits).mT.reshape(h, -1), x["query_codes"][:, t]),
            differs(f"selected {t}", row.store.attended(0)[:, n_sink:stop], x["selected"][:, t]),
            differs(f"chance {t}", chance(cosine, bits, tables), x["prob_f64"][:, t], 1e-6),
            differs(f"output {t}", out[0, :, 0], x["out"][:, t], 2e-4),
        )
    full = built(row_for(Full, Full.Params(), request("1"), trace_of(k, v, h, s), 8))
    dense = step(full, q[:, :, :1], k[:, :, s : s + 1], v[:, :, s : s + 1])
    return problem or differs("dense output", dense[0, :, 0], x["dense_out_step1"], 1e-5)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_magicpig_agrees_with_reference_vectors(path: Path) -> None:
    assert run_vectors(path) == [(path.stem, None)]


# --- What a right one shows -------------------------------------------------------------------


def random_tokens(h: int, h_kv: int, n: int, d_h: int = 16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, d_h, generator=draw) for heads in (h, h_kv, h_kv))
    return q, k, v


def made(q: Tensor, k: Tensor, v: Tensor, s: int, tokens: int, comm: str = "1", **changed: Any) -> Any:
    """A row on the first `s` tokens."""
    trace = trace_of(k, v, q.shape[1], s)
    trace.observe(0, CALIBRATION, q[:, :, :s], trace.keys(0), trace.softmax[0])
    return row_of(MagicPIG, replace(PARAMS, **changed), trace, request(tokens=tokens, comm=comm))


def run(row: Any, q: Tensor, k: Tensor, v: Tensor, start: int, stop: int) -> list[Tensor]:
    """Output of every step."""
    outs = []
    for t in range(start, stop):
        tq, tk, tv = (x[:, :, t : t + 1] for x in (q, k, v))
        outs.append(step(row, tq, tk, tv, t - start + 1))
    return outs


def exact_step(q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
    g = q.shape[1] // k.shape[1]
    keys, values = (x[:, :, :n].repeat_interleave(g, 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q[:, :, n - 1 : n], keys, values)


def test_where_everything_is_found_it_is_full_attention() -> None:
    q, k, v = random_tokens(6, 2, 100)
    row = made(q, k, v, 96, 40, bits=1, tables=64)
    for t, out in enumerate(run(row, q, k, v, 96, 100)):
        assert row.store.ledger.entries[t].attended >= 0.99 * 6 * (97 + t)
        torch.testing.assert_close(out, exact_step(q, k, v, 97 + t), atol=1e-3, rtol=0)


def test_a_shift_of_all_keys_changes_nothing() -> None:
    q, k, v = random_tokens(6, 2, 100)
    shift = 3 * torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(7))
    rows = [made(q, keys, v, 99, 40, bits=3, tables=8) for keys in (k, k + shift)]
    outs = [run(row, q, keys, v, 99, 100)[0] for row, keys in zip(rows, (k, k + shift), strict=True)]
    assert torch.equal(*(row.store.attended(0) for row in rows))
    torch.testing.assert_close(*outs, atol=1e-3, rtol=0)


def test_sums_over_samples_have_the_expectation_of_sums_over_all_keys() -> None:
    """Numerator and denominator over many seeds, each within three standard errors of the exact sum."""
    q, k, v = random_tokens(4, 2, 61)
    numerators, denominators, n_seeds = [], [], 200
    middle = slice(4, 50)
    for seed in range(n_seeds):
        row = made(q, k, v, 60, 40, bits=4, tables=12, n_sink=4, window=10, seed=seed)
        row.store[0].append(k[:, :, 60:], v[:, :, 60:])
        idx, _, bias, *_ = row.select(0, q[:, :, 60:])
        weights = torch.zeros(4, 62)
        weights.scatter_(1, idx[0].where(idx[0] >= 0, 61), bias[0].exp())
        logits = (k.repeat_interleave(2, 1)[0] @ q[0, :, 60:].mT)[..., 0] / 4
        found = (weights[:, :61] * logits.exp())[:, middle]  # (h, m)
        denominators.append(found.sum(-1))
        numerators.append(found.unsqueeze(1) @ v.repeat_interleave(2, 1)[0, :, middle])
    exact = logits.exp()[:, middle]
    for samples, right in (
        (torch.stack(denominators), exact.sum(-1)),
        (torch.stack(numerators), exact.unsqueeze(1) @ v.repeat_interleave(2, 1)[0, :, middle]),
    ):
        error = samples.std(0) / n_seeds**0.5
        apart = (samples.mean(0) - right).abs() / error
        # Of so many numbers one in 370 is outside; 1e-4 beside the chance takes a little of every weight.
        assert (apart > 3).double().mean() <= 0.03
        assert apart.max() < 5


def test_query_heads_of_a_group_have_samples_of_their_own_and_a_seed_says_which() -> None:
    q, k, v = random_tokens(6, 2, 100)
    rows = [made(q, k, v, 99, 40, bits=3, tables=8, seed=seed) for seed in (0, 0, 1)]
    outs = [run(row, q, k, v, 99, 100)[0] for row in rows]
    first, again, other = (row.store.attended(0) for row in rows)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first, again)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(first, other)


def test_more_tables_begin_with_those_of_fewer() -> None:
    few, many = (draw_planes(2, 16, 5, tables, 3) for tables in (4, 9))
    assert torch.equal(many[..., :20], few)
    assert not torch.equal(draw_planes(2, 16, 5, 4, 4), few)


# --- Books and budget -------------------------------------------------------------------------


def test_the_number_of_tables_is_the_largest_that_the_budget_expects_to_hold() -> None:
    draw = torch.Generator().manual_seed(0)
    one = torch.rand(4, 8, 500, generator=draw) ** 6

    def found(tables: int) -> float:
        p = one.double()
        return float((1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1)).sum(-1).mean())

    for k in (1, 20, 90, 300):
        tables, expected = affordable_tables(one, k, 1 << 40)
        assert expected == pytest.approx(found(tables), rel=1e-4)
        assert tables == 2 or found(tables) <= k
        assert found(tables + 1) > k
    of_table = 4 * (8 + 4 * float(one.sum(-1).mean()))
    assert affordable_tables(one, 400, int(5.5 * of_table))[0] == 5


@pytest.mark.parametrize("tokens", [40, 120, 400])
def test_samples_and_reading_hold_the_budget_in_the_mean(tokens: int) -> None:
    q, k, v = random_tokens(6, 2, 1040)
    row = made(q, k, v, 1000, tokens, comm="1/2", bits=6)
    run(row, q, k, v, 1000, 1040)
    shape, report = row.trace.shape, row.report()
    assert row.store.ledger.within(row.budget, shape, in_mean=True)
    assert report["sample_mean"] == pytest.approx(report["sample_expected"], rel=0.1)
    assert report["sample_expected"] <= row.plan.k


def test_the_tables_are_on_the_host_and_larger_than_the_cache() -> None:
    q, k, v = random_tokens(4, 2, 101, d_h=128)
    row = made(q, k, v, 100, 40, bits=10, tables=150)
    run(row, q, k, v, 100, 101)
    entry, m = row.store.ledger.entries[0], 100 - 4 - 10
    tables = 2 * (m * (4 * 150 + 4) + 150 * 1024 * 8)
    assert row.report()["index_host_bytes"] == tables > row.report()["cache_host_bytes"] == 2 * 100 * 512
    assert entry.resident_host_bytes == tables + 2 * m * 512
    assert entry.resident_kv_bytes == 2 * (4 + 10 + 1) * 512


def test_what_is_read_to_find_tokens_is_the_querys_buckets() -> None:
    q, k, v = random_tokens(4, 2, 101)
    row = made(q, k, v, 100, 40, bits=3, tables=7)
    run(row, q, k, v, 100, 101)
    index, grouped = row.indexes[0], q[0, :, 100].view(2, 2, 16)
    middle = k[0, :, 4:90] - index.hashed.means.unsqueeze(1)
    codes, own = codes_of(middle, index.planes, 3), codes_of(grouped, index.planes, 3)
    n_entries = int((codes.unsqueeze(-1) == own.unsqueeze(2)).sum())
    assert row.store.ledger.entries[0].moved_meta_bytes == 4 * n_entries + 8 * 4 * 7


def test_layers_at_intervals_stay_whole() -> None:
    params = replace(PARAMS, dense_every=16)
    assert dense_layers(params, range(40)) == [0, 16, 32]
    assert dense_layers(PARAMS, range(40)) == []
    shape = ModelShape("one-layer", 1, 4, 2, 16, 1 << 20, (0,))
    with pytest.raises(ConfigError, match=r"method.dense_every=16 leaves no layer of one-layer to compress; use 0"):
        MagicPIG.check(params, request("0.2", comm="1/8"), shape)


def test_wrong_parameters_and_budgets_are_refused_in_a_sentence() -> None:
    shape = ModelShape("any", 1, 4, 2, 64, 1 << 20, (0,))
    with pytest.raises(ConfigError, match="comm=0 pays for no table"):
        MagicPIG.check(PARAMS, request("0.2", comm="0"), shape)
    with pytest.raises(
        ConfigError, match=r"comm=1/8192 does not pay for 2 tables .* use comm=(\S+) or more"
    ) as refused:
        MagicPIG.variant_for(PARAMS, request("0.2", comm="1/8192"), shape, 2000)
    least = str(refused.value).split("use comm=")[1].split(" ")[0]
    assert MagicPIG.variant_for(PARAMS, request("0.2", comm=least.rstrip(",")), shape, 2000)
    assert MagicPIG.variant_for(replace(PARAMS, tables=150), request("0.2", comm="0"), shape, 2000)
