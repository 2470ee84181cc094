"""Random Attention: vectors with given numbers, how long tokens stay, and on what the numbers hang."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.evals.settings import from_words
from kvbench.methods.base import reported
from kvbench.methods.decoding.random_decode import RandomDecode, kept
from kvbench.methods.decoding.streamingllm_decode import StreamingLLMDecode
from kvbench.methods.ranking.random import BASE, FIRST, SECOND, STEP
from kvbench.tests.methods.decoding.traces import OfEntries, held, on, read_trace, replay, same, start, take
from kvbench.tests.vectors import Check, built, differs, first, load, request, row_for, trace_of

PARAMS = RandomDecode.Params(8, "position", True, 6, "prompt", "refuse", "fresh", "head", 0)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "random_decode").glob("*.npz"))
CASES = json.loads((Path(__file__).parents[2] / "golden" / "random_decode" / "survival.json").read_text())["cases"]
N_TRIALS, FEW, N_HEADS, AT_ONCE = 2_000, 500, 8, 500


def run_vectors(path: Path) -> list[Check]:
    """A cut, or a prompt and several cuts, with the numbers of the file."""
    meta, x = load(path)
    return [(path.stem, {"select": check_cut, "trace": check_trace}[meta["case"]](meta, x))]


def check_cut(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    slots = kept(torch.from_numpy(x["u"]).unsqueeze(0), meta["protected"], meta["B"], meta["w"])
    return differs("kept", slots[0].expand(meta["Hk"], -1), x["kept_idx"])


def check_trace(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    s, n, h_kv, before = meta["S"], meta["T"], meta["Hk"], list[str | None]()

    class Given(RandomDecode):
        def numbers(self, layer: int, positions: Tensor) -> Tensor:
            i = self.n_cuts[layer]
            before.append(same(f"before cut {i}", positions[0].numpy(), x["before_pos"][i], True))
            u = x["u"][i if self.params.draws == "fresh" else 0]
            return torch.from_numpy(u).expand(h_kv, -1).gather(-1, positions[0]).unsqueeze(0)

    protect = meta.get("protect", "prompt" if meta["protected"] else "none")
    rule = "position" if meta["trigger"] == "code" else meta["trigger"]
    params = Given.Params(
        meta["N"], rule, meta["at_prefill"], meta["w"], protect, "cut", meta["draws"], meta.get("per", "head"), 0
    )
    plan = OfEntries(meta["B"], meta["N"], at_prefill=meta["at_prefill"]) if meta["trigger"] == "code" else None
    q, k, v = torch.zeros(3, 1, h_kv, n, 4).unbind()
    row = start(Given, params, q, k, v, s, meta["B"], plan)
    problem = replay(row, x | {"q": q[0].numpy(), "k": k[0].numpy()})
    return first(problem, *before, differs("protected", row.n_protected, meta["protected"]))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_random_attention_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def run_survival(path: Path) -> list[Check]:
    """How many of the method's own draws leave a token, two of a head, or one in any head, after so many cuts."""
    cases = json.loads(path.read_text())["cases"]
    return [check for case in cases for check in (of_fresh(case, N_TRIALS), of_once(case, N_TRIALS))]


def sample(case: dict[str, Any], draws: Any) -> RandomDecode:
    protect, s = ("prompt", case["protected"]) if case["protected"] else ("none", 1)
    params = RandomDecode.Params(case["N"], "slack", False, case["w"], protect, "cut", draws, "head", 7)
    k = torch.zeros(1, 1, s, 1)
    return on(trace_of(k, k, 1), RandomDecode, params, case["B"])


def of_fresh(case: dict[str, Any], n_trials: int) -> Check:
    row, ages = sample(case, "fresh"), len(case["fresh"])
    parts = [alive(row, case, part, ages) for part in range(n_trials * N_HEADS // AT_ONCE)]
    problems = []
    for age, each in enumerate(torch.cat(parts, 1)):
        groups = each[:, 0].view(n_trials, N_HEADS)
        problems += [
            apart(f"a token of age {age}", each.float().mean(0), case["fresh"][age], len(each)),
            apart(f"a pair of age {age}", each.all(-1).float().mean(), case["pair"][age], len(each)),
            apart(f"any head, age {age}", groups.any(-1).float().mean(), case["any_of_8_heads"][age], n_trials),
            apart(f"two heads, age {age}", groups[:, :2].all(-1).float().mean(), case["fresh"][age] ** 2, n_trials),
        ]
    return f"fresh B={case['B']} N={case['N']}", first(*problems)


def alive(row: RandomDecode, case: dict[str, Any], part: int, ages: int) -> Tensor:
    """Whether each head, of a layer of its own, still has two tokens after so many cuts: (ages, heads, 2)."""
    b, n = case["B"], case["N"]
    positions = torch.arange(b).repeat(AT_ONCE, 1)
    two = (b + n - case["w"] - 1, case["protected"])  # the last and the first for which the first cut draws
    found = [torch.ones(AT_ONCE, 2, dtype=torch.bool)]
    for cut in range(ages - 1):
        newest = torch.arange(b + cut * n, b + (cut + 1) * n).expand(AT_ONCE, -1)
        positions = torch.cat([positions, newest], -1).unsqueeze(0)
        slots = row.order(part, positions.unsqueeze(-1), positions)
        row.reorder(part, slots)
        positions = positions.gather(-1, slots)[0]
        found.append(torch.stack([(positions == at).any(-1) for at in two], -1))
    return torch.stack(found)


def of_once(case: dict[str, Any], n_trials: int) -> Check:
    """In one cut of a whole answer, which leaves what all of its cuts do (a test below)."""
    row, problems = sample(case, "once"), list[str | None]()
    front, w = case["protected"], case["w"]
    for g, share in case["once_after_generated"]:
        n, found = front + g, list[Tensor]()
        if n <= case["B"]:
            problems.append(differs(f"share of {g}", share, 1.0))
            continue
        for part in range(n_trials // AT_ONCE):
            positions = torch.arange(n).repeat(1, AT_ONCE, 1)
            (slots,) = row.order(part, positions.unsqueeze(-1), positions)
            three = (front, front + (g - w) // 2, n - w - 1)  # of any age
            found.append(torch.stack([(slots == at).any(-1) for at in three], -1))
        problems.append(apart(f"after {g} tokens", torch.cat(found).float().mean(0), share, n_trials))
    return f"once B={case['B']} N={case['N']}", first(*problems)


def apart(name: str, found: Tensor, p: float, n: int) -> str | None:
    return differs(name, found, np.full(found.shape, p), max(4 * (p * (1 - p) / n) ** 0.5, 1e-7))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"B{case['B']}_N{case['N']}")
def test_tokens_stay_as_long_as_the_page_says(case: dict[str, Any]) -> None:
    """Over a part of the draws; `run_survival` has them all."""
    assert of_fresh(case, FEW if case["B"] < 500 else FEW // 2)[1] is None
    assert of_once(case, FEW)[1] is None


def drawn(n: int, h_kv: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, heads, n, 16, generator=draw) for heads in (4, h_kv, h_kv))  # type: ignore[return-value]


def caches(row: RandomDecode, s: int = 15, n: int = 120) -> Iterator[np.ndarray]:
    """Positions held behind each step."""
    q, k, v = drawn(n)
    for p in range(s, n):
        take(row, p, q, k, v)
        yield held(row)


def at_the_end(params: RandomDecode.Params, draw: int = 0, tokens: int = 32, s: int = 15) -> list[list[int]]:
    trace = read_trace(*drawn(120), s, 0)
    row: Any = row_for(RandomDecode, params, request(tokens=tokens), trace, 120 - s)
    row.draw = draw
    *_, last = caches(built(row), s)
    return last.tolist()


@pytest.mark.parametrize(("protect", "n_first"), [("prompt", 15), ("sinks", 4), ("none", 0)])
def test_the_front_and_the_last_tokens_stay_at_every_step_and_slots_lie_in_order(protect: str, n_first: int) -> None:
    row = start(RandomDecode, replace(PARAMS, protect=protect), *drawn(120), 15, 32)
    for p, positions in enumerate(caches(row), 15):
        for head in positions.tolist():
            assert {*range(n_first), *range(max(0, p - 5), p + 1)} <= {*head}
            assert head == sorted(set(head)) and (len(head) >= 32 or p < 31)
        assert row.store[0].attended()[:, row.protected(0)].all()
        assert row.store.ledger.entries[-1].resident_meta_bytes == 0
    assert len({*positions.ravel().tolist()} & {*range(20, 100)}) > 4, "of the middle, too"


def test_it_holds_as_many_tokens_as_streamingllm_at_every_step() -> None:
    for s in (15, 40):
        theirs = start(StreamingLLMDecode, StreamingLLMDecode.Params(8, "position", True, 4), *drawn(120), s, 32)
        ours = start(RandomDecode, replace(PARAMS, protect="none"), *drawn(120), s, 32)
        assert [len(x[0]) for x in caches(ours, s)] == [len(x[0]) for x in caches(theirs, s)]
        assert ours.store.ledger.entries[-1].attended == theirs.store.ledger.entries[-1].attended


def test_one_number_for_life_leaves_what_one_cut_of_the_whole_answer_would() -> None:
    row = start(RandomDecode, replace(PARAMS, draws="once"), *drawn(120), 15, 32)
    for p, positions in enumerate(caches(row), 15):
        if p % 8 == 0 and p >= 32:
            every = torch.arange(p + 1).repeat(1, 2, 1)
            assert (positions == kept(row.numbers(0, every), 15, 32, 6)[0].numpy()).all()


def test_numbers_hang_on_seed_prompt_draw_layer_head_cut_and_position_and_on_nothing_else() -> None:
    def mix(x: int) -> int:
        for shift, factor in ((30, FIRST), (27, SECOND)):
            x = (x ^ x >> shift) * factor % 2**64
        return x ^ x >> 31

    ids, at = [5, 0, 49151, 7], [0, 3, 4, 900, 1 << 20]
    q, k, v = drawn(4)
    trace = read_trace(q, k, v, 4, 0)
    trace.ids = ids
    row = on(trace, RandomDecode, replace(PARAMS, seed=9), 32)
    row.draw, row.n_cuts[0] = 3, 5
    running = sum((token + 1) * BASE**i for i, token in enumerate(ids, 1)) % 2**64
    prompt = (len(ids) * STEP % 2**64) ^ mix(running)
    of_cut = mix((prompt + 3 * FIRST + 6 * SECOND) % 2**64)
    for head in (0, 1):
        key = mix((9 * STEP + head * SECOND + BASE) % 2**64) ^ of_cut
        found = [(mix(((p + 1) * STEP % 2**64) ^ key) >> 40) * 2.0**-24 for p in at]
        assert row.numbers(0, torch.tensor([[at, at]]))[0, head].tolist() == found
    usual = row.numbers(0, torch.tensor([[at, at]]))
    assert usual.dtype == torch.float32
    for name, value in {"draw": 2, "params": replace(PARAMS, seed=8)}.items():
        other = on(trace, RandomDecode, replace(PARAMS, seed=9), 32)
        other.draw, other.n_cuts[0] = 3, 5
        setattr(other, name, value)
        assert (other.numbers(0, torch.tensor([[at, at]])) != usual).all()
    row.n_cuts.update([0, 1, 1, 1, 1, 1])
    assert (row.numbers(0, torch.tensor([[at, at]])) != usual).all(), "another cut"
    row.n_cuts[0] -= 1
    assert (row.numbers(1, torch.tensor([[at, at]])) != usual).all(), "another layer"


@pytest.mark.parametrize("s", [15, 40])
def test_draws_of_a_prompt_hold_other_tokens_and_the_same_again(s: int) -> None:
    """Also where the prompt is cut before the first step."""
    params = replace(PARAMS, protect="none")
    found = [at_the_end(params, draw, s=s) for draw in (0, 1, 0)]
    assert found[0] == found[2] != found[1] and found[0][0] != found[0][1]


def test_rows_of_one_trace_cut_a_prompt_by_their_own_draw() -> None:
    trace = read_trace(*drawn(60), 50, 0)
    params = replace(PARAMS, protect="none")
    rows: list[Any] = [row_for(RandomDecode, params, request(tokens=32), trace, 10) for _ in range(3)]
    for row, row.draw in zip(rows, (0, 1, 0), strict=True):
        built(row)
    first, second, third = (held(row).tolist() for row in rows)
    assert first == third != second
    assert [row.n_cuts[0] for row in rows] == [1, 1, 1], "a cut that another row made counts, too"


def test_heads_share_a_set_where_it_is_the_layers() -> None:
    one, other = at_the_end(replace(PARAMS, per="layer"))
    assert one == other
    assert one != at_the_end(PARAMS)[0]


def test_a_protected_prompt_that_does_not_fit_is_refused_or_cut_with_a_mark() -> None:
    q, k, v = drawn(120)
    with pytest.raises(ConfigError, match=r"budget=32 does not hold a protected prompt of 26 .*use budget=33 or more"):
        start(RandomDecode, PARAMS, q, k, v, 26, 32)
    whole = start(RandomDecode, replace(PARAMS, long_prompt="cut"), q, k, v, 25, 32)
    *_, last = caches(whole, 25)
    assert {*range(25)} <= {*last[0].tolist()} and reported(whole) == {}
    row = start(RandomDecode, params_of("random_decode_paper", "method.window=6", "method.interval=8"), q, k, v, 50, 32)
    assert reported(row) == {} and len(held(row)[0]) == 50, "nothing is cut before the first step"
    *_, last = caches(row, 50)
    assert {*range(25)} <= {*last[0].tolist()} and len({*last[0].tolist()} & {*range(25, 114)}) == 1 + (119 - 50) % 8
    assert reported(row) == {"n_protected": 25}


def params_of(*words: str) -> RandomDecode.Params:
    return build_params(RandomDecode, from_words([f"method={words[0]}", *words[1:]]).method.params, "method")


def test_presets_have_the_settings_of_the_page() -> None:
    usual = params_of("random_decode")
    assert usual == RandomDecode.Params(128, "position", True, 64, "prompt", "refuse", "fresh", "head", 0)
    paper = params_of("random_decode_paper")
    assert paper == replace(usual, interval=64, schedule="slack", at_prefill=False, long_prompt="cut")
    assert params_of("random_decode_unprotected") == replace(usual, protect="none", window=8)
    titles = [RandomDecode.label(each, request(tokens=96)) for each in (usual, params_of("random_decode_unprotected"))]
    assert titles == ["Random while decoding (prompt protected)", "Random while decoding"]
    other = replace(usual, protect="sinks", draws="once", per="layer")
    says = "Random while decoding (sinks protected, one draw, one set per layer)"
    assert RandomDecode.label(other, request(tokens=96)) == says


@pytest.mark.parametrize(
    ("protect", "tokens", "says"),
    [
        ("prompt", 6, "the last method.window=6 tokens stay.* use budget=7"),
        ("sinks", 10, "the first 4 and the last method.window=6 .* use budget=11"),
    ],
)
def test_what_no_budget_can_be(protect: str, tokens: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RandomDecode.check(replace(PARAMS, protect=protect), request(tokens=tokens), trace_of(*drawn(4)[1:], 4).shape)
