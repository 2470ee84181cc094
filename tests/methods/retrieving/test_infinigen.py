from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import BudgetRequest, key_bytes
from kvbench.engine.causal import Chunk
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.observe import ChannelSums
from kvbench.engine.passes.session import Call
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.search import select_rows
from kvbench.engine.selection import Found
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.kernels.topk import top_stable
from kvbench.methods.full import Full
from kvbench.methods.retrieving.infinigen import (
    InfiniGen,
    common_count,
    make_proxy,
)
from kvbench.methods.retrieving.oracle import Oracle
from kvbench.tests.tiny import CONFIGS, prompt, tiny
from kvbench.tests.vectors import Check, built, differs, first, request, row_for, row_of, step, trace_of

PARAMS = InfiniGen.Params("matched", Fraction(1, 5), True, "query_key", None, "query_head", "stay", 0, 0)
AHEAD = replace(PARAMS, lookahead=1, full_layers=2)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "infinigen").glob("*.npz"))


# --- Reference vectors ------------------------------------------------------------------------


def run_vectors(path: Path) -> list[Check]:
    """The authors' accuracy path (masks), serving path (one step) and skewing."""
    with np.load(path) as file:
        x = {name: file[name] for name in file.files}
    meta = {name: value.item() for name, value in x.items() if value.ndim == 0}
    run = {"evalmask": check_mask, "serve": check_serving, "skew": check_skewing}
    return [(path.stem, run[path.stem.partition("_")[0]](meta, x))]


def check_mask(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    """Counts and choices row by row; a full pool loses a token per head and row, as the authors' code has it."""
    scores = torch.from_numpy(x["spec_scores"])
    h, s, _ = scores.shape
    k_most, pool = int(s * meta["budget"]), int(s * meta["capacity"])
    keep = torch.zeros(h, s, s, dtype=torch.bool)
    gone = torch.zeros(h, s, dtype=torch.bool)
    for i in range(s):
        seen = scores[:, i, : i + 1]
        if i < k_most:
            keep[:, i, : i + 1] = True
            continue
        k = min(common_count(seen, meta["alpha"]), k_most)  # evicted tokens are counted, too
        there = seen.masked_fill(gone[:, : i + 1], -1e4)
        keep[:, i].scatter_(1, top_stable(there, k), True)
        if i >= pool:
            gone.scatter_(1, leaving(keep[:, : i + 1], meta["policy"], i - pool), True)
    return first(
        differs("mask", keep, x["keep_mask"]),
        differs("density", keep.sum() / h / (s * (s + 1) / 2), x["density"], 1e-6),
    )


def leaving(fetched: Tensor, policy: str, n_gone: int) -> Tensor:
    """The token (h, 1) that each head's full pool gives up behind the last row of `fetched` (h, rows, s).

    The authors' code does not look whether it left before.
    """
    h, rows, _ = fetched.shape
    older = fetched[:, :, : (rows - 1) // 2].long()
    if policy == "fifo":
        return torch.full((h, 1), n_gone)
    if policy == "counter":
        return older.sum(1).argmin(-1, keepdim=True)
    last = (older * torch.arange(rows).view(1, -1, 1)).amax(1)
    return last.argmin(-1, keepdim=True)


def check_serving(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    """One step through a row of the harness; samples of a batch are heads of it, since their count is common."""
    d_h, h = meta["head_dim"], meta["n_head"]
    k, v = (
        torch.from_numpy(x[name]).transpose(0, 1).unsqueeze(0) for name in ("key_cache", "value_cache")
    )  # (1, n * h, s, d_h)
    n, s = k.shape[1] // h, k.shape[2]
    w_q = torch.from_numpy(x["w_q"])
    first_prompt = torch.from_numpy(x["prefill_query"])[:1].unflatten(-1, (h, d_h)).transpose(1, 2)
    trace = trace_of(k, v, n * h)
    trace.softmax[0] = Softmax(1.0)  # it is in the weights
    params = replace(
        PARAMS, comm_mode="native", partial_ratio=Fraction(str(meta["ratio"])), skew=False,
        channels="query", alpha=meta["alpha"],
    )  # fmt: skip
    # Channels are those of the first sample.
    trace.observe(0, ChannelSums(False), first_prompt.repeat(1, n, 1, 1), k, Softmax(1.0))
    n_channels = InfiniGen.plan_for(params, resolved("1/2", s), trace.shape).n_channels
    plan = InfiniGen.Plan(n_channels, meta["max_num_kv"])
    row = row_of(InfiniGen, params, trace, request(tokens=1), plan)
    q = (torch.from_numpy(x["hidden"])[:, 0] @ w_q.mT).view(1, n * h, 1, d_h)
    step(row, q, k[:, :, :1], v[:, :, :1])
    chosen = row.index[0].chosen  # (n * h, n_channels)
    weights = w_q.view(h, d_h, -1)[torch.arange(h).unsqueeze(1), chosen[:h]].flatten(0, 1)
    logits = row.score(0, row.question(0, q), row.seen(0)).flatten(0, 2)  # (n * h, s)
    fetched = row.store[0].fetches[0][0]  # (n * h, k)
    by_score = fetched.gather(1, logits.gather(1, fetched).argsort(-1, descending=True))
    expected = x["prefetch_idx"][:, 0].T  # (n * h, k)
    if by_score.shape != expected.shape:
        return f"tokens per head: {by_score.shape[1]}, expected {expected.shape[1]}"
    heads = torch.arange(n * h).unsqueeze(1)
    return first(
        differs("partial_index", chosen.view(n, h, -1), np.broadcast_to(x["partial_index"], (n, h, n_channels))),
        differs("partial_key_cache", row.index[0].keys.transpose(0, 1), x["partial_key_cache"], 1e-6),
        differs("partial_w_q", weights, x["partial_w_q"], 0.0),
        differs("prefetch_idx", by_score, expected),
        differs("selected_k", k[0][heads, by_score].transpose(0, 1), x["selected_k"]),
        differs("selected_v", v[0][heads, by_score].transpose(0, 1), x["selected_v"]),
    )


def check_skewing(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    q, k = torch.from_numpy(x["q"]), torch.from_numpy(x["k"])
    found = ChannelSums(True).observe(q[None, None], k[None, None], Softmax(1.0))[0]
    basis = found[:-2]
    return first(
        differs("abs_A", basis.abs(), x["abs_A"], 1e-4),
        differs("orthogonality", basis @ basis.mT, np.eye(len(basis)), 1e-5),
        differs("abs_qA_colsum", found[-2].numpy() / x["abs_qA_colsum"], np.ones(len(basis)), 1e-4),
        differs("abs_kA_colsum", found[-1].numpy() / x["abs_kA_colsum"], np.ones(len(basis)), 1e-4),
        differs("scores", (q @ basis) @ (k @ basis).mT, x["scores"], 1e-3),
    )


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_infinigen_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def test_the_vectors_are_part_of_the_repository() -> None:
    kinds = {path.stem.partition("_")[0] for path in GOLDEN}
    assert kinds == {"evalmask", "serve", "skew"}


def test_a_full_pool_gives_up_what_was_fetched_least_or_longest_ago() -> None:
    fetched = torch.zeros(1, 9, 9, dtype=torch.bool)
    fetched[0, [0, 1, 7], 0] = True  # often and lately
    fetched[0, [1, 2, 3], 1] = True
    fetched[0, [5, 6], 2] = True  # least often
    fetched[0, [1, 2, 3, 4], 3] = True
    assert leaving(fetched, "counter", 0).tolist() == [[2]]
    assert leaving(fetched, "lru", 0).tolist() == [[1]]
    assert leaving(fetched, "fifo", 5).tolist() == [[5]]


# --- Foretelling, in the engine ---------------------------------------------------------------


class Checking:
    """A session that asks for each layer's query again, and keeps what the model and the answers were."""

    def __init__(self, model: Model, calls: dict[int, Call], rows: list[int]) -> None:
        self.model, self.calls, self.rows = model, calls, rows
        self.true: dict[int, Tensor] = {}
        self.foretold: dict[int, Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None
    ) -> Tensor:
        call = self.calls[layer]
        self.true[layer] = q[self.rows]
        self.foretold[layer] = self.model.speculate(layer, call.x[self.rows], call.beside)
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)  # attention to the token itself


def hooks_of(model: Model) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.hf.modules())


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0]], ids=str)
def test_a_layers_own_input_foretells_its_own_query(kind: str, rows: list[int]) -> None:
    """For every layer of every architecture; rows of a batch may ask in any number and order."""
    model, calls = tiny(kind), {}
    session = Checking(model, calls, rows)
    ids = torch.tensor([[5], [17], [60]])
    with model.hooked(), model.watched(calls):
        model.forward(ids, 37, model.new_cache(), session)
    assert hooks_of(model) == 0
    assert sorted(session.true) == list(range(model.shape.n_layers))
    for layer, q in session.true.items():
        torch.testing.assert_close(session.foretold[layer], q, atol=1e-6, rtol=1e-6)
        if len(rows) == len(ids):
            assert torch.equal(session.foretold[layer], q), layer


class Noting(InfiniGen):
    """InfiniGen that keeps its layers' foretold and true queries of every step."""

    def setup(self) -> None:
        super().setup()
        self.foretold: list[Tensor] = []
        self.true: list[Tensor] = []

    @classmethod
    def search(cls, rows: Any, layer: int, q: Tensor) -> Sequence[Found]:
        for i, row in enumerate(rows):
            row.true.append(q[i : i + 1])
            if row.wants_lookahead:
                row.foretold.append(row.q_ahead)
        return super().search(rows, layer, q)


def ask(ratio: str = "0.2", comm: str = "1/4") -> BudgetRequest:
    return BudgetRequest(Fraction(ratio), None, Fraction(comm))


def resolved(ratio: str, s: int, comm: str = "1/64") -> Any:
    return InfiniGen.budget_for(PARAMS, ask(ratio, comm), s)


def read(model: Model, ids: list[int]) -> Trace:
    with model.hooked():
        return prefill(model, ids, [ChannelSums(True), ChannelSums(False)])


def say(model: Model, rows: list[Any], n: int = 6, **more: Any) -> list[list[int]]:
    with model.hooked():
        decoded = decode(model, rows[0].trace, rows, max_new_tokens=n, **more)
    return [answer.ids for answer in decoded.answers]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_query_comes_from_the_normed_input_of_the_layer_below(kind: str) -> None:
    """Checked by hand: layers 0 and 1 are exact, so what reaches layer 1 is what the plain model has there."""
    model, ids = tiny(kind), prompt(60)
    for i, layer in enumerate(model.hf.get_decoder().layers):
        draw = torch.Generator().manual_seed(i)
        layer.input_layernorm.weight.data.uniform_(0.5, 2, generator=draw)  # else norms are alike
    row = built(row_for(Noting, AHEAD, ask(), read(model, ids), 8))
    say(model, [row], n=1, feed=[33])
    with torch.no_grad():
        hidden = model.hf(torch.tensor([[*ids, 33]]), output_hidden_states=True).hidden_states
    layers = model.hf.get_decoder().layers

    def query(x: Tensor) -> Tensor:
        q = layers[2].self_attn.q_proj(x[:, -1:]).view(1, 1, 6, 8).transpose(1, 2)
        assert model.turn is not None
        return model.turn[2](q, 60)

    with torch.no_grad():
        below = query(layers[1].input_layernorm(hidden[1]))
        torch.testing.assert_close(row.foretold[0], below, atol=1e-4, rtol=1e-4)
        for other in (hidden[1], layers[2].input_layernorm(hidden[1])):
            assert (query(other) - below).abs().max() > 0.01
        own = query(layers[2].input_layernorm(hidden[2]))
        torch.testing.assert_close(row.true[0], own, atol=1e-4, rtol=1e-4)


def test_each_row_is_foretold_from_its_own_input_also_when_others_leave() -> None:
    model = tiny()
    trace = read(model, prompt(80))

    def make(ratio: str, comm: str = "1/4", **changes: Any) -> Noting:
        return built(row_for(Noting, replace(AHEAD, **changes), ask(ratio, comm), trace, 12))

    def others() -> list[Any]:
        return [
            make("0.05", "1/8"),
            make("0.3", lookahead=0),
            built(row_for(Full, Full.Params(), ask("1"), trace, 12)),
        ]

    alone = make("0.1")
    said = say(model, [alone], n=10)[0]
    answers = say(model, [*others(), make("0.1")], n=10)
    assert answers[-1] == said
    stops = {token for answer in answers[:-1] for token in answer[1:6] if token not in said}  # someone leaves
    assert stops, "choose another seed: no neighbour says anything of its own"
    beside = make("0.1")
    answers = say(model, [*others(), beside], n=10, stop_ids=stops)
    assert answers[-1] == said and min(map(len, answers)) < 10
    assert len(beside.foretold) == len(alone.foretold) == 9
    torch.testing.assert_close(torch.cat(beside.foretold), torch.cat(alone.foretold), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(beside.true), torch.cat(alone.true), atol=1e-4, rtol=1e-4)


def test_nothing_is_watched_unless_a_row_that_speaks_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny()
    trace, seen = read(model, prompt(60)), []
    forward = Model.forward

    def spying(self: Model, *args: Any) -> Tensor:
        seen.append(hooks_of(self))
        return forward(self, *args)

    monkeypatch.setattr(Model, "forward", spying)
    for row, hooks in (
        (row_for(Full, Full.Params(), ask("1"), trace, 8), 0),
        (row_for(InfiniGen, replace(AHEAD, lookahead=0), ask(), trace, 8), 0),
        (row_for(InfiniGen, AHEAD, ask("1"), trace, 8), 0),  # has everything anyway
        (row_for(InfiniGen, AHEAD, ask(), trace, 8), model.shape.n_layers),
    ):
        seen.clear()
        say(model, [built(row)], n=4)
        assert seen == [hooks] * 3
        assert hooks_of(model) == 0


def test_hooks_are_gone_after_an_error() -> None:
    model = tiny()
    with pytest.raises(RuntimeError, match="inside"), model.watched({}):
        assert hooks_of(model) == 3
        raise RuntimeError("inside")
    assert hooks_of(model) == 0


def test_a_model_that_cannot_be_foretold_is_refused_with_a_way_out() -> None:
    model = tiny()
    trace = read(model, prompt(60))
    del model.hf.get_decoder().layers[1].self_attn.layer_idx
    del model.attentions  # were looked up with the rotations
    with pytest.raises(ConfigError, match=r"the layer's number.*method\.lookahead=0"):
        say(model, [built(row_for(InfiniGen, AHEAD, ask(), trace, 8))])

    model = tiny()
    calls: dict[int, Call] = {}
    attention = model.hf.get_decoder().layers[2].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ConfigError, match="attention function of ours"):
        model.speculate(2, torch.zeros(1, 1, 48), {})

    with model.watched(calls), pytest.raises(ConfigError, match="hidden_states"):
        attention(other=torch.zeros(1, 1, 48))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "glm", "opt"])
def test_it_decodes_on_other_architectures(kind: str) -> None:
    model = tiny(kind)
    params = replace(AHEAD, full_layers=1)
    row = built(row_for(InfiniGen, params, ask(), read(model, prompt(80)), 8))
    assert len(say(model, [row])[0]) == 6
    compressed = [layer for layer in model.shape.attention_layers if layer >= 1]
    assert compressed
    assert row.report()["k_mean"] == 16
    assert row.n_selections == 5 * len(compressed)
    assert row.store.ledger.within(row.budget, model.shape, row.skipped)


def test_where_layers_change_little_the_layer_below_foretells_the_true_selection() -> None:
    """With layers that add almost nothing, what is foretold is what would have been asked; with large ones it isn't."""
    overlaps = []
    for size in (1e-4, 1.0):
        model = tiny()
        layers = model.hf.get_decoder().layers
        for layer in layers:
            layer.self_attn.o_proj.weight.data.mul_(size)
            layer.mlp.down_proj.weight.data.mul_(size)
        trace = read(model, prompt(120))
        sets = []
        for params in (AHEAD, replace(AHEAD, lookahead=0)):
            row = built(row_for(InfiniGen, params, ask("0.2", "1"), trace, 4))
            say(model, [row], n=1, feed=[7])
            sets.append(row.store.attended(2))
        overlaps.append(((sets[0] & sets[1]).sum() / sets[0].sum()).item())
    assert overlaps[0] == 1.0 > overlaps[1]


# --- One layer, made of arrays ----------------------------------------------------------------


def random_tokens(h: int, h_kv: int, n: int, d_h: int = 16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, d_h, generator=draw) for heads in (h, h_kv, h_kv))
    return q, k, v


def at_all(position: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The token at a position."""
    here = slice(position, position + 1)
    return q[:, :, here], k[:, :, here], v[:, :, here]


def observed_trace(q: Tensor, k: Tensor, v: Tensor, s: int) -> Trace:
    trace = trace_of(k, v, q.shape[1], s)
    for skew in (True, False):
        trace.observe(0, ChannelSums(skew), q[:, :, :s], k[:, :, :s], trace.softmax[0])
    return trace


@pytest.mark.parametrize(("h", "h_kv"), [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize(("generated", "ours"), [("on_top", "stay"), ("inside", "compete")])
def test_with_all_channels_and_the_true_query_it_is_the_oracle_per_query_head(
    h: int, h_kv: int, generated: Any, ours: str
) -> None:
    q, k, v = random_tokens(h, h_kv, 70)
    trace = observed_trace(q, k, v, 60)
    params = replace(PARAMS, comm_mode="native", partial_ratio=Fraction(1), generated=ours)
    mine = row_of(InfiniGen, params, trace, request(tokens=14))
    exact = Oracle.Params("query_head", 0, Fraction(0), generated, "fair", "renormalise")
    oracle = row_of(Oracle, exact, trace, request(tokens=14), Oracle.Plan(0, 1, 14))
    for t in range(10):
        outs = [step(row, *at_all(60 + t, q, k, v), t + 1) for row in (mine, oracle)]
        assert torch.equal(mine.store.attended(0), oracle.store.attended(0)), t
        torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("agg", ["query_head", "group_max", "group_mean"])
@pytest.mark.parametrize("alpha", [None, 0.5, 50.0])
@pytest.mark.parametrize("generated", ["stay", "compete"])
def test_selection_by_brute_force(agg: str, alpha: float | None, generated: str) -> None:
    """Head by head and token by token, from the definition."""
    h, h_kv, s, n_channels = 6, 2, 50, 5
    q, k, v = random_tokens(h, h_kv, s + 4, seed=3)
    trace = observed_trace(q, k, v, s)
    params = replace(PARAMS, agg=agg, alpha=alpha, generated=generated, comm_mode="native")
    row = row_of(InfiniGen, params, trace, request(tokens=12), InfiniGen.Plan(n_channels, 12))
    for t in range(4):
        step(row, *at_all(s + t, q, k, v), t + 1)
    n_seen = s if generated == "stay" else s + 3
    z = np.zeros((h, n_seen))
    for head in range(h):
        kv_head = head // 3
        queries = np.concatenate([q[0, i, :s].numpy() for i in range(kv_head * 3, kv_head * 3 + 3)])
        a = np.linalg.svd(queries.astype(np.float64))[2].T
        keys = k[0, kv_head].numpy()
        weight = np.abs(queries @ a).sum(0) + np.abs(keys[:s] @ a).sum(0)
        a = a[:, np.argsort(-weight)[:n_channels]]
        z[head] = (q[0, head, s + 3].numpy() @ a) @ (keys[:n_seen] @ a).T / 4  # sqrt(16)
    if agg != "query_head":
        z = z.reshape(2, 3, -1)
        z = z.max(1) if agg == "group_max" else z.mean(1)
    count = int(np.mean([(line > line.max() - alpha).sum() for line in z])) if alpha else 12
    chosen = np.argsort(-z, -1)[:, : min(count, 12)]
    fetched = row.store[0].fetches[0][0].sort(-1).values
    assert fetched.tolist() == np.sort(chosen, -1).tolist()
    attended = row.store.attended(0)
    assert attended[:, -1].all()
    if generated == "stay":
        assert attended[:, s:].all()


def test_the_count_is_common_and_the_tokens_are_each_heads_own() -> None:
    logits = torch.tensor([[0.0, 9.0, 8.5, 8.0, 1.0], [7.0, 0.0, 1.0, 2.0, 3.0]])
    assert common_count(logits, 1.5) == 2  # three and one
    assert common_count(logits, 1.0) == 1  # two and one, rounded down; what is alpha away does not count
    assert common_count(logits, 1e-12) == 1
    assert common_count(logits, 99.0) == 5
    q, k, v = random_tokens(6, 2, 41)
    row = row_of(
        InfiniGen,
        replace(PARAMS, alpha=0.3),
        observed_trace(q, k, v, 40),
        request(tokens=20, comm="1"),
    )
    step(row, *at_all(40, q, k, v))
    fetched = row.store[0].fetches[0]
    assert fetched.shape[1] == 6 and 1 <= fetched.shape[2] < 20
    assert len({tuple(sorted(tokens)) for tokens in fetched[0].tolist()}) > 1


def test_the_report_says_which_of_alpha_and_budget_bound() -> None:
    q, k, v = random_tokens(6, 2, 44)
    shares = {}
    for alpha in (None, 0.2, 99.0):
        trace = observed_trace(q, k, v, 40)
        row = row_of(InfiniGen, replace(PARAMS, alpha=alpha), trace, request(tokens=10, comm="1"))
        counts = []
        for t in range(4):
            step(row, *at_all(40 + t, q, k, v), t + 1)
            counts.append(row.store[0].fetches[0].shape[-1])
        report = row.report()
        assert report["k_mean"] == sum(counts) / 4
        assert report["budget_bound_share"] == counts.count(10) / 4
        assert report["overall_ratio"] == report["achieved_ratio"] == report["k_mean"] / 40
        shares[alpha] = report["budget_bound_share"]
        assert row.store.ledger.within(row.budget, trace.shape)
    assert shares == {None: 1.0, 0.2: 0.0, 99.0: 1.0}


def test_a_rotation_makes_few_channels_tell_more() -> None:
    """Of queries with three directions three rotated channels rank tokens as all channels do; plain ones don't."""
    draw = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(32, 32, generator=draw)).Q[:3]
    q = torch.randn(1, 4, 300, 3, generator=draw) @ directions * 4
    q += 0.05 * torch.randn(1, 4, 300, 32, generator=draw)
    k = torch.randn(1, 2, 300, 32, generator=draw)
    exact = (q[:, :, -1:].view(1, 2, 2, 32) @ k.mT).flatten(1, 2)  # (1, h, s)
    best = top_stable(exact, 30)[0]
    recall = {}
    for skew in (True, False):
        proxy = make_proxy(ChannelSums(skew).observe(q, k, Softmax(1.0)), k, 3, "query_key")
        partial = q[:, :, -1:].view(2, 2, 32) @ proxy.basis
        found = top_stable((partial @ proxy.keys.mT).flatten(0, 1), 30)
        hits = [len(set(a) & set(b)) for a, b in zip(found.tolist(), best.tolist(), strict=True)]
        recall[skew] = sum(hits) / 120
    assert recall[True] > 0.9 > 0.6 > recall[False]


@pytest.mark.parametrize(("h", "h_kv"), [(6, 2), (2, 2)])
def test_channel_sums_by_their_definition_whatever_the_blocks(
    h: int, h_kv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, _ = random_tokens(h, h_kv, 90, d_h=8)
    whole = ChannelSums(True).observe(q, k, Softmax(1.0))
    monkeypatch.setattr("kvbench.engine.observe.BASIS_QUERIES", 17)
    blocks = ChannelSums(True).observe(q, k, Softmax(1.0))
    torch.testing.assert_close(blocks.abs(), whole.abs(), atol=1e-4, rtol=1e-5)
    for kv_head in range(h_kv):
        stacked = q.view(h_kv, -1, 8)[kv_head]
        singular = torch.linalg.svd(stacked).Vh.mT.flip(1)
        found = whole[kv_head]
        torch.testing.assert_close(found[:8].abs(), singular.abs(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found[8], (stacked @ singular).abs().sum(0), atol=1e-2, rtol=1e-4)
        torch.testing.assert_close(found[9], (k[0, kv_head] @ singular).abs().sum(0), atol=1e-2, rtol=1e-4)
    plain = ChannelSums(False).observe(q, k, Softmax(1.0))
    assert torch.equal(plain[:, :8], torch.eye(8).expand(h_kv, 8, 8))
    torch.testing.assert_close(plain[:, 9], k[0].abs().sum(1))


def test_channels_of_the_query_alone_differ_where_keys_are_loud_elsewhere() -> None:
    q, k, _ = random_tokens(2, 1, 50, d_h=8)
    q[..., 3] *= 5
    k[..., 6] *= 50
    sums = ChannelSums(False).observe(q, k, Softmax(1.0))
    assert make_proxy(sums, k, 1, "query").chosen.tolist() == [[3]]
    assert make_proxy(sums, k, 1, "query_key").chosen.tolist() == [[6]]


def test_variants_share_partial_keys_and_new_ones_are_their_own() -> None:
    q, k, v = random_tokens(4, 2, 44)
    trace = observed_trace(q, k, v, 40)
    base = row_of(InfiniGen, PARAMS, trace, request(tokens=8, comm="1/4"))
    for params, comm, shared in (
        (replace(PARAMS, alpha=2.0, generated="compete"), "1/4", True),
        (PARAMS, "1/2", False),
        (replace(PARAMS, channels="query"), "1/4", False),
        (replace(PARAMS, skew=False), "1/4", False),
    ):
        other = row_of(InfiniGen, params, trace, request(tokens=12, comm=comm))
        assert (other.index[0] is base.index[0]) == shared
    competing = [
        row_of(InfiniGen, replace(PARAMS, generated="compete"), trace, request(tokens=8, comm="1/4")) for _ in range(2)
    ]
    before = base.index[0].keys.clone()
    for t in range(4):
        for i, row in enumerate(competing):
            step(row, *at_all(40 + t, *(x * (i + 1) for x in (q, k, v))), t + 1)
    basis = base.index[0].basis
    for i, row in enumerate(competing):
        torch.testing.assert_close(row.late[0][:, :4], k[0, :, 40:] * (i + 1) @ basis)
    assert torch.equal(base.index[0].keys, before)


@pytest.mark.parametrize("comm", ["1/128", "1/64", "1/16"])
@pytest.mark.parametrize("ratio", ["0.05", "0.1", "0.2", "0.5"])
@pytest.mark.parametrize("generated", ["stay", "compete"])
def test_the_books_hold_under_every_budget(ratio: str, comm: str, generated: str) -> None:
    d_h, s = 128, 200
    q, k, v = random_tokens(4, 2, s + 3, d_h)
    trace = observed_trace(q, k, v, s)
    params = replace(PARAMS, generated=generated)
    InfiniGen.check(params, request(ratio=ratio, comm=comm), trace.shape)
    row = row_of(InfiniGen, params, trace, request(ratio=ratio, comm=comm))
    for t in range(3):
        step(row, *at_all(s + t, q, k, v), t + 1)
    n_channels = {"1/128": 1, "1/64": 2, "1/16": 8}[comm]
    assert row.plan == InfiniGen.Plan(n_channels, int(Fraction(ratio) * s))
    assert row.report()["proxy_ratio"] == float(Fraction(comm))
    assert row.store.ledger.within(row.budget, trace.shape)
    for t, entry in enumerate(row.store.ledger.entries):
        always = t + 1 if generated == "stay" else 1
        assert entry.attended == 4 * (row.plan.k_most + always)
        assert entry.moved_meta_bytes == 0
        n_keys = s if generated == "stay" else s + t + 1
        of_keys = key_bytes(trace.shape, n_keys) * Fraction(comm)
        assert entry.resident_meta_bytes == of_keys + 2 * 2 * d_h**2
        asked = row.plan.k_most * 4 * d_h  # bytes of K and V of one head's tokens
        assert entry.moved_kv_heads_bytes == 4 * asked
        assert 2 * asked <= entry.moved_kv_bytes <= 4 * asked


def test_query_weights_are_resident_where_they_foretell() -> None:
    model = tiny()
    rows = [
        built(row_for(InfiniGen, params, ask(), read(model, prompt(60)), 4))
        for params in (AHEAD, replace(AHEAD, lookahead=0))
    ]
    entries = []
    for row in rows:
        say(model, [row], n=2)
        entries.append(next(e for e in row.store.ledger.entries if e.layer == 2))
    h, d_model, n_channels = 6, 48, 2
    assert entries[0].resident_meta_bytes - entries[1].resident_meta_bytes == 2 * h * n_channels * d_model
    assert entries[1].resident_meta_bytes == 2 * 2 * (60 * n_channels + 8 * 8)


def test_rows_choose_together_what_they_choose_alone() -> None:
    q, k, v = random_tokens(6, 2, 62)
    trace = observed_trace(q, k, v, 60)
    changes = (
        {}, {"alpha": 0.7}, {"agg": "group_max"}, {"generated": "compete"}, {"skew": False},
        {"comm_mode": "native"},
    )  # fmt: skip
    asked = torch.cat([at_all(60, q, k, v)[0] + i for i in range(len(changes))])

    def rows() -> list[InfiniGen]:
        made = [
            row_of(InfiniGen, replace(PARAMS, **change), trace, request(tokens=9, comm="1/4")) for change in changes
        ]
        for row in made:
            row.store[0].append(*at_all(60, q, k, v)[1:])
        return made

    together = select_rows(InfiniGen, rows(), 0, asked)
    for i, row in enumerate(rows()):
        alone = select_rows(InfiniGen, [row], 0, asked[i : i + 1])[0]
        assert alone is not None and together[i] is not None
        assert torch.equal(together[i].idx.sort(-1).values, alone.idx.sort(-1).values)  # type: ignore[union-attr]


def test_bfloat16_keys_are_taken_as_the_cache_holds_them() -> None:
    q, k, v = (x.bfloat16() for x in random_tokens(6, 2, 62))
    trace = trace_of(k, v, 6, 60)
    trace.observe(0, ChannelSums(True), q[:, :, :60], k[:, :, :60], Softmax(0.25))
    row = row_of(InfiniGen, PARAMS, trace, request(tokens=9, comm="1/8"))
    out = step(row, q[:, :, 60:61], k[:, :, 60:61], v[:, :, 60:61])
    assert out.dtype == torch.bfloat16
    keys = row.index[0].keys
    assert torch.equal(keys, keys.bfloat16().float())


# --- What a user may say ----------------------------------------------------------------------


def test_a_first_layer_has_none_to_look_ahead_from() -> None:
    with pytest.raises(ConfigError, match=r"method\.full_layers=0"):
        replace(PARAMS, lookahead=1)


def test_what_a_model_has_no_room_for_is_refused() -> None:
    shape = ModelShape("small", 3, 4, 2, 8, 1000, (0, 1, 2))
    few = replace(PARAMS, comm_mode="native", partial_ratio=Fraction(1, 10))
    with pytest.raises(ConfigError, match=r"partial_ratio=0\.1 .*=1/8 or more"):
        InfiniGen.check(few, ask(), shape)
    InfiniGen.check(replace(few, partial_ratio=Fraction(1, 8)), ask(), shape)
    InfiniGen.check(replace(PARAMS, full_layers=2), ask(), shape)


@pytest.mark.parametrize(
    ("d_h", "comm", "n_channels"),
    [(128, "1/128", 1), (128, "1/64", 2), (64, "1/128", 1), (64, "1/16", 4), (128, "0.195", 25), (80, "1", 80)],
)
def test_channels_that_comm_stands_for(d_h: int, comm: str, n_channels: int) -> None:
    shape = ModelShape("any", 3, 4, 2, d_h, 1000, (0, 1, 2))
    budget = resolved("0.2", 1000, comm)
    assert InfiniGen.plan_for(PARAMS, budget, shape) == InfiniGen.Plan(n_channels, 200)
    native = replace(PARAMS, comm_mode="native")
    assert InfiniGen.plan_for(native, budget, shape).n_channels == d_h // 5


def test_the_label_says_what_is_not_the_published_timing() -> None:
    assert InfiniGen.label(replace(AHEAD, comm_mode="native"), ask()) == "InfiniGen"
    assert InfiniGen.label(AHEAD, ask()) == "InfiniGen (matched)"
    shown = InfiniGen.label(replace(AHEAD, lookahead=0, alpha=4.0), ask())
    assert shown == "InfiniGen (matched, alpha=4, lookahead=0)"


def test_layers_left_whole_are_in_the_overall_share() -> None:
    model = tiny()
    row = built(row_for(InfiniGen, AHEAD, ask("0.1"), read(model, prompt(100)), 4))
    say(model, [row], n=2)
    assert row.skipped == [0, 1]
    assert row.report()["overall_ratio"] == pytest.approx((2 + 0.1) / 3)
