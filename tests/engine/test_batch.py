"""Feeds of several tokens against the same tokens step by step, and rows that go back."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch

from kvbench.engine.batch import Batch
from kvbench.engine.budget import BudgetRequest
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.turns.state import fork_of
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.methods.dropping.snapkv import SnapKV
from kvbench.methods.full import Full
from kvbench.tests import architectures, conformance
from kvbench.tests.architectures import config_of, loaded, model_of
from kvbench.tests.conformance import METHODS, Refused, Subject, read, variant
from kvbench.tests.tiny import CONFIGS, prompt, tiny
from kvbench.tests.vectors import built, request

FAST = ("full", "snapkv", "adakv", "streamingllm", "h2o", "tova", "pqcache", "quest", "infinigen", "clusterkv", "sparq")
FEED, OTHER = prompt(20, 7), prompt(13, 9)
N_NEW = 60


def row_of(one: Subject, ratio: str = "0.2") -> tuple[Trace, Any]:
    try:
        made = variant(one, ratio)
    except Refused as refusal:
        pytest.skip(f"{one.name} refuses the small model: {refusal}")
    trace = read([made])
    with torch.inference_mode():
        return trace, made.row(trace, N_NEW)


def said(
    trace: Trace, rows: Sequence[Any], feed: Sequence[int], n: int = 8, how: str = "compressed", n_before: int = 0
) -> list[list[int]]:
    """What rows answer to a feed, of which they read the first tokens apart, one by one."""
    model = conformance.model()
    with model.hooked():
        batch = Batch(model, trace, rows)
        for token in feed[:n_before]:
            batch.read([[token]] * len(rows))
        feed = feed[n_before:]
        return [answer.ids for answer in batch.answer(batch.read([feed] * len(rows), how), [n] * len(rows))]


def reads_as_steps(name: str) -> None:
    """A feed in one pass leaves what the same tokens leave step by step: answers and books."""
    model, one = conformance.model(), conformance.ours(name)
    trace, first = row_of(one)
    with torch.inference_mode():
        rows = [built(first), *(built(first.variant.row(trace, N_NEW)) for _ in range(2))]
    with model.hooked():
        stepwise = decode(model, trace, rows[:1], max_new_tokens=8, feed=FEED).answers[0].ids
    assert said(trace, rows[1:2], FEED, n_before=2) == [stepwise]
    assert said(trace, rows[2:], FEED, how="tokenwise") == [stepwise]
    books = [sorted(row.store.ledger.entries) for row in rows]
    assert books[0] == books[1] == books[2]


def goes_back(name: str) -> None:
    """A question asked after others, each taken back, is answered as if it were the only one."""
    trace, row = row_of(conformance.ours(name))
    with torch.inference_mode():
        built(row)
    mark = fork_of(row)
    alone = said(trace, [fork_of(row)], FEED)
    for other in (OTHER, prompt(5, 3)):
        said(trace, [row], other)
        row = fork_of(mark)
    assert said(trace, [row], FEED) == alone
    row = fork_of(mark)
    assert said(trace, [row, fork_of(row)], FEED) == alone * 2


def with_everything(one: Subject) -> Variant:
    """The method with every token: with all bytes where it makes codes, for all turns where its budget has answers."""
    asked = request("1", comm=one.comm)
    if one.kind.traits.changes:
        asked = BudgetRequest(None, None, asked.comm, memory=Fraction(1))
    if one.kind.traits.of_answers:
        asked = BudgetRequest(None, conformance.S + N_NEW, Fraction(0), counts=one.counts)
    return one.kind.variant_for(one.params, asked, conformance.model().shape, conformance.S, allocator=one.allocator)


def is_full_at_ratio_1(name: str) -> None:
    """With the whole budget, three turns that stay are those of full attention."""
    if conformance.ours(name).kind.traits_of(conformance.ours(name).params).adapts:
        return  # no budget, and so none that is whole
    model = conformance.model()
    answers = []
    for one in (conformance.ours("full"), conformance.ours(name)):
        whole = with_everything(one)
        trace = read([whole])
        with torch.inference_mode():
            row = built(whole.row(trace, N_NEW))
        with model.hooked():
            batch, mine = Batch(model, trace, [row]), []
            for turn in range(3):
                mine += [answer.ids for answer in batch.answer(batch.read([prompt(6, turn)]), [4])]
            answers.append(mine)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", FAST)
def test_a_feed_in_one_pass_is_a_feed_step_by_step(name: str) -> None:
    reads_as_steps(name)


@pytest.mark.parametrize("name", FAST)
def test_a_question_after_others_is_answered_as_if_alone(name: str) -> None:
    goes_back(name)


@pytest.mark.parametrize("name", FAST)
def test_the_whole_budget_is_full_attention_at_every_turn(name: str) -> None:
    is_full_at_ratio_1(name)


@pytest.mark.slow
@pytest.mark.parametrize("check", [reads_as_steps, goes_back, is_full_at_ratio_1])
@pytest.mark.parametrize("name", sorted(set(METHODS) - set(FAST)))
def test_every_method_reads_feeds_and_goes_back(name: str, check: Any) -> None:
    check(name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_feed_is_read_as_a_prefill_reads_it(kind: str) -> None:
    """Full attention, whatever the architecture: context and feeds are one prompt."""
    model, ids = tiny(kind), prompt(70)
    with model.hooked(), torch.inference_mode():
        trace, whole = prefill(model, ids[:45]), prefill(model, ids)
        row = built(Full.variant_for(Full.Params(), request(ratio="1"), trace.shape, 45).row(trace, 40))
        batch = Batch(model, trace, [row])
        batch.read([ids[45:60]])
        logits = batch.read([ids[60:]])
    assert whole.logits is not None
    torch.testing.assert_close(logits[0], whole.logits, atol=2e-4, rtol=2e-4)


@pytest.mark.filterwarnings("ignore")  # transformers' words about sizes of toys
def test_a_state_beside_attention_goes_with_its_row() -> None:
    """Where every layer is compressed and has a state too, rows that end earlier take theirs along."""
    config = config_of("falcon_h1")
    model, ids = loaded(config, model_of(config, 1), "falcon_h1"), architectures.prompt(60)
    assert model.shape.attention_layers == model.shape.hybrid_layers
    with model.hooked(), torch.inference_mode():
        trace = prefill(model, ids[:45])

        def answers(lengths: Sequence[int]) -> list[list[int]]:
            full = Full.variant_for(Full.Params(), request(ratio="1"), trace.shape, 45)
            batch = Batch(model, trace, [built(full.row(trace, 40)) for _ in lengths])
            return [answer.ids for answer in batch.answer(batch.read([ids[45:]] * len(lengths)), lengths)]

        assert answers([2, 9, 5]) == [answers([n])[0] for n in (2, 9, 5)]


def test_a_row_that_looks_ahead_reads_a_dense_feed() -> None:
    """Which attends to everything: the first token behind it is that of full attention."""
    found = []
    for name in ("full", "infinigen"):
        trace, row = row_of(conformance.ours(name))
        with torch.inference_mode():
            built(row)
        found.append(said(trace, [row], FEED, n=1, how="dense"))
    assert found[0] == found[1]


@pytest.mark.parametrize("feed", ["compressed", "tokenwise"])
def test_rows_with_feeds_of_their_own_answer_as_if_alone(feed: str) -> None:
    feeds = [FEED, OTHER, prompt(1, 4), FEED]
    names = ["oracle", "pqcache", "snapkv", "oracle"]
    trace = read([variant(conformance.ours(name), "0.2") for name in names])
    with torch.inference_mode():
        rows = [built(variant(conformance.ours(name), "0.2").row(trace, N_NEW)) for name in names]
    alone = [said(trace, [fork_of(row)], own)[0] for row, own in zip(rows, feeds, strict=True)]
    model = conformance.model()
    with model.hooked():
        batch = Batch(model, trace, rows)
        together = batch.answer(batch.read(feeds, feed), [8, 8, 5, 8])
    assert [answer.ids for answer in together] == [alone[0], alone[1], alone[2][:5], alone[3]]


def test_turns_that_stay_go_on_from_each_rows_own_end() -> None:
    """Rows whose answers end at different lengths read the next feed as each would alone."""
    variants = [variant(conformance.ours(name), "0.2") for name in ("snapkv", "streamingllm")]
    trace, model = read(variants), conformance.model()

    def rows() -> list[SelectiveAttention]:
        with torch.inference_mode():
            return [
                built(variant(conformance.ours(name), "0.2").row(trace, N_NEW)) for name in ("snapkv", "streamingllm")
            ]

    def talk_of(some: list[SelectiveAttention], lengths: list[int]) -> list[list[int]]:
        with model.hooked():
            batch = Batch(model, trace, some)
            first = batch.answer(batch.read([OTHER] * len(some)), lengths)
            second = batch.answer(batch.read([(answer.ids[-1], *FEED) for answer in first]), [6] * len(some))
            return [answer.ids for answer in second]

    assert talk_of(rows(), [3, 7]) == [talk_of(rows()[:1], [3])[0], talk_of(rows()[1:], [7])[0]]


def test_a_copy_shares_what_the_trace_holds_and_nothing_else() -> None:
    trace, row = row_of(conformance.ours("snapkv"))
    with torch.inference_mode():
        built(row)
    other = fork_of(row)
    assert other.trace is trace and other.variant is row.variant
    assert other.store is not row.store and other.store.trace is trace
    for mine, theirs in zip(row.store.layers.values(), other.store.layers.values(), strict=True):
        assert mine.k.data_ptr() != theirs.k.data_ptr() and torch.equal(mine.k[:, :, :20], theirs.k[:, :, :20])
    full_trace, full = row_of(conformance.ours("full"))
    with torch.inference_mode():
        built(full)
    view = fork_of(full).store[0].view
    assert view is not None and view.k.data_ptr() == full_trace.keys(0).data_ptr()


def test_a_generator_goes_back_too() -> None:
    _, row = row_of(conformance.ours("snapkv"))
    with torch.inference_mode():
        built(row)
    row.draw = torch.Generator().manual_seed(3)
    mark = fork_of(row)
    drawn = torch.rand(4, generator=row.draw)
    row = fork_of(mark)
    assert torch.equal(torch.rand(4, generator=row.draw), drawn)


def test_a_method_that_cannot_go_back_says_so() -> None:
    class Stubborn(SnapKV):
        rolls_back = False

    trace = read([variant(conformance.ours("snapkv"), "0.2")])
    params = conformance.ours("snapkv").params
    with torch.inference_mode():
        row = built(Stubborn.variant_for(params, request(ratio="0.2"), trace.shape, trace.s_prompt).row(trace, 4))
    with pytest.raises(ConfigError, match="rolls_back=False"):
        fork_of(row)


@pytest.mark.parametrize("name", ["pqcache", "oracle", "quest", "sparq"])
def test_a_dense_feed_is_read_as_full_attention_reads_it(name: str) -> None:
    model, found = conformance.model(), []
    for one in (conformance.ours("full"), conformance.ours(name)):
        trace, row = row_of(one)
        with torch.inference_mode():
            built(row)
        with model.hooked():
            found.append(Batch(model, trace, [row]).read([FEED], "dense"))
        h, n_layers = trace.shape.h, trace.shape.n_layers
        entries = [entry for entry in row.store.ledger.entries if entry.step == len(FEED)]
        assert [entry.attended for entry in entries] == [h * (trace.s_prompt + len(FEED))] * n_layers
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["pqcache", "oracle", "quest", "clusterkv", "rocketkv", "retroinfer"])
def test_a_dense_feed_moves_all_that_it_attends_to_from_the_host(name: str) -> None:
    model, (trace, row) = conformance.model(), row_of(conformance.ours(name))
    with torch.inference_mode():
        built(row)
    with model.hooked():
        Batch(model, trace, [row]).read([FEED], "dense")
    shape, per_token = trace.shape, row.store[0].meter.token_bytes
    for entry in row.store.ledger.entries:
        at = row.store[entry.layer]
        n_host = (entry.resident_host_bytes - at.meter.host_meta_bytes) // (per_token * shape.h_kv)
        assert n_host > 100 or at.host is None or at.host.is_near
        assert entry.moved_kv_bytes == n_host * shape.h_kv * per_token
        assert entry.moved_kv_heads_bytes == n_host * shape.h * per_token
        assert (entry.cache_hits, entry.cache_lookups) == (0, 0)
    assert row.store.ledger.summary(row.budget, shape)["within_budget"] is False


def test_a_dense_feed_reads_nothing_that_a_first_stage_dropped() -> None:
    """Tokens are numbered as they lie on the host: those behind the last one are memory that nobody wrote to."""
    model, found = conformance.model(), []
    for rubbish in (0, 30):
        trace, row = row_of(conformance.ours("rocketkv"))
        with torch.inference_mode():
            built(row)
            for layer in row.store.layers.values():
                for late in layer.host.late:
                    late.fill_(rubbish)
        with model.hooked():
            found.append(Batch(model, trace, [row]).read([FEED], "dense"))
    assert torch.equal(*found)
