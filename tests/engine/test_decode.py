"""The engine against transformers' own generation, on every architecture at hand."""

from fractions import Fraction
from typing import Any

import pytest
import torch

from kvbench.engine.decode import Decoded, decode
from kvbench.engine.model import Model
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.dropping.streamingllm import StreamingLLM
from kvbench.methods.full import Full
from kvbench.methods.retrieving.oracle import Oracle
from kvbench.tests.tiny import CONFIGS, prompt, tiny
from kvbench.tests.vectors import built, request, row_for

ORACLE = Oracle.Params("group_sum", 4, Fraction(1, 2), "on_top", "fair", "renormalise")
STREAMING = StreamingLLM.Params(4, "inside", "original")
NEW = 12


def generated(model: Model, ids: list[int], n: int = NEW) -> list[int]:
    with torch.inference_mode():
        out = model.hf.generate(
            torch.tensor([ids]), max_new_tokens=n, min_new_tokens=n, do_sample=False, use_cache=True
        )
    return out[0, len(ids) :].tolist()


def rows_for(
    trace: Trace, *kinds: tuple[type[SelectiveAttention], Any, str], n_new: int = NEW
) -> list[SelectiveAttention]:
    rows = [row_for(kind, params, request(ratio=ratio), trace, n_new) for kind, params, ratio in kinds]
    return [built(row) for row in rows]


def say(model: Model, ids: list[int], *kinds: tuple[type[SelectiveAttention], Any, str], **options: Any) -> Decoded:
    with model.hooked():
        trace = prefill(model, ids)
        n_new = NEW + len(options.get("feed", ()))
        return decode(model, trace, rows_for(trace, *kinds, n_new=n_new), max_new_tokens=NEW, **options)


@pytest.mark.parametrize("kind", CONFIGS)
def test_full_attention_says_what_generate_says(kind: str) -> None:
    model, ids = tiny(kind), prompt(60)
    expected = generated(model, ids)
    assert say(model, ids, (Full, Full.Params(), "1")).answers[0].ids == expected


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_whole_budget_is_full_attention_for_every_method(kind: str) -> None:
    model, ids = tiny(kind), prompt(60)
    answers = say(model, ids, (Full, Full.Params(), "1"), (Oracle, ORACLE, "1"), (StreamingLLM, STREAMING, "1")).answers
    assert answers[1].ids == answers[2].ids == answers[0].ids


def test_only_layers_with_full_attention_are_compressed() -> None:
    assert tiny("gemma3").shape.attention_layers == (1,)
    assert tiny("mistral-sliding").shape.attention_layers == ()
    assert tiny("mistral").shape.attention_layers == (0, 1, 2)


def test_sliding_layers_keep_their_own_rows_when_others_leave() -> None:
    model, ids = tiny("gemma3"), prompt(60)
    kinds = [(Full, Full.Params(), "1"), (Oracle, ORACLE, "0.3"), (StreamingLLM, STREAMING, "0.3")]
    alone = [say(model, ids, kind).answers[0].ids for kind in kinds]
    stop = alone[1][4]  # the oracle stops early, the others when they say the same token
    cut = [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in alone]
    assert [answer.ids for answer in say(model, ids, *kinds, stop_ids=[stop]).answers] == cut


def test_a_row_stops_at_its_stop_token_and_the_others_go_on() -> None:
    model, ids = tiny(), prompt(60)
    full = say(model, ids, (Full, Full.Params(), "1")).answers[0].ids
    decoded = say(model, ids, (Full, Full.Params(), "1"), stop_ids=[full[5]])
    assert decoded.answers[0].ids == full[: full.index(full[5]) + 1]
    assert decoded.answers[0].stopped
    assert len(decoded.step_seconds) == full.index(full[5])


def test_a_stop_token_right_after_the_prompt_needs_no_step() -> None:
    model, ids = tiny(), prompt(60)
    full = say(model, ids, (Full, Full.Params(), "1")).answers[0].ids
    decoded = say(model, ids, (Full, Full.Params(), "1"), stop_ids=[full[0]])
    assert decoded.answers[0].ids == full[:1]
    assert decoded.step_seconds == []


def test_a_question_read_through_a_whole_cache_changes_nothing() -> None:
    """context_only with full attention is full attention over both parts."""
    model, ids = tiny(), prompt(60)
    expected = generated(model, ids)
    answers = say(model, ids[:45], (Full, Full.Params(), "1"), (Oracle, ORACLE, "1"), feed=ids[45:]).answers
    assert [answer.ids for answer in answers] == [expected, expected]


def test_a_question_is_read_through_the_compressed_cache() -> None:
    model, ids = tiny(), prompt(60)
    with model.hooked():
        trace = prefill(model, ids[:45])
        rows = rows_for(trace, (StreamingLLM, STREAMING, "0.2"), n_new=15 + NEW)
        decode(model, trace, rows, max_new_tokens=NEW, feed=ids[45:])
    entries = [entry for entry in rows[0].store.ledger.entries if entry.layer == 0]
    assert [entry.step for entry in entries] == list(range(1, 15 + NEW))
    assert {entry.attended // 6 for entry in entries} == {9 + 1}  # ratio 0.2 of 45 tokens, and the current one


def test_answers_do_not_depend_on_who_else_is_in_the_batch() -> None:
    model, ids = tiny(), prompt(80)
    per_head = Oracle.Params("query_head", 2, Fraction(1, 4), "inside", "fair", "renormalise")
    kinds: list[tuple[type[SelectiveAttention], Any, str]] = [
        (Oracle, ORACLE, "0.1"),
        (Full, Full.Params(), "1"),
        (StreamingLLM, STREAMING, "0.2"),
        (Oracle, ORACLE, "0.5"),
        (StreamingLLM, STREAMING, "0.1"),
        (Oracle, per_head, "0.2"),
        (Oracle, ORACLE, "1"),
        (StreamingLLM, StreamingLLM.Params(2, "on_top", "cache"), "0.3"),
    ]
    alone = [say(model, ids, kind).answers[0].ids for kind in kinds]
    assert [answer.ids for answer in say(model, ids, *kinds).answers] == alone
    assert [answer.ids for answer in say(model, ids, *kinds[::-1]).answers] == alone[::-1]
    assert len({tuple(answer) for answer in alone}) > 1  # compression does change what is said


def test_turning_a_query_is_the_models_own_rotation() -> None:
    """Moved by -5 positions, a query gives the logits that it gives with keys 5 positions later."""
    for kind in ("llama", "llama-yarn", "glm", "qwen3"):
        model = tiny(kind)
        assert model.turn is not None
        turn = model.turn[1]
        q, k = torch.randn(2, 1, 2, 1, 8, generator=torch.Generator().manual_seed(0))
        moved = turn(q, -5) @ k.mT
        torch.testing.assert_close(moved, q @ turn(k, 5).mT, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(turn(q, 0), q, atol=1e-6, rtol=0)


def test_models_without_rotary_positions_cannot_turn() -> None:
    assert tiny("opt").turn is None


def test_the_models_own_attention_is_back_outside_of_the_hook() -> None:
    model = tiny()
    with model.hooked():
        assert model.hf.config._attn_implementation == "kvbench"
    assert model.hf.config._attn_implementation == "sdpa"
