"""One prompt by hand gives what the engine gives: the same answers, what was attended to, exact weights, the books."""

from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch

from kvbench.engine.budget import EVERYTHING
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.prefill import prefill
from kvbench.evals import notebook
from kvbench.evals.cells import Lookups, ask_one, cell_without_task
from kvbench.evals.notebook import Reading, load_model, question, read, variant
from kvbench.evals.settings import from_words
from kvbench.tests.tiny import COMMON, prompt, tiny
from kvbench.tests.tiny_tokenizer import tiny_tokenizer

S, N_NEW = 120, 6


@cache
def model() -> Model:
    return replace(tiny(), tokenizer=tiny_tokenizer(None, adds_bos=False))


def reading(*names: str, ratio: float = 0.2) -> Reading:
    return read(model(), prompt(S), [variant(name, ratio=ratio, comm="1/8") for name in names])


def test_variants_are_those_of_the_command_line() -> None:
    made = variant("snapkv", ratio="1/5", comm="1/32", window=16, compensate=False)
    assert (made.params.window, made.params.kernel) == (16, 7)
    assert (made.request.ratio, made.request.comm) == (Fraction(1, 5), Fraction(1, 32))
    assert made.label == "SnapKV" and variant("snapkv", ratio=0.2).label == "SnapKV (C)"
    assert variant("full", budget=64).request == EVERYTHING, "which has no budget, as in a run"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: variant("snapkw", ratio=0.2), "did you mean 'snapkv'"),
        (lambda: variant("snapkv", windw=3), "no method key 'windw'"),
        (lambda: variant("snapkv", ratio=1.5), "ratio"),
        (lambda: reading("quest", ratio=0.01), "no room for a page"),
        (lambda: reading("pyramidinfer", "snapkv", ratio=0.5), "a prefill of its own"),
        (lambda: read(model(), prompt(S), []), "no variant"),
        (lambda: reading("full").answer(2, layers=[3]), "layer 3 cannot be looked at"),
        (lambda: load_model("smollm2-135m", dtpe="float32"), "dtype"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(ask, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ask()
    assert message in str(error.value)


def test_answers_are_those_of_the_engine_and_come_again() -> None:
    names = ["full", "oracle", "snapkv", "h2o"]
    ours = reading(*names)
    first, second = (ours.answer(N_NEW) for _ in range(2))
    variants = [variant(name, ratio=0.2, comm="1/8").on(model(), S) for name in names]
    with model().hooked():
        trace = prefill(model(), prompt(S), [what for one in variants for what in one.observations])
        rows = [one.row(trace, N_NEW) for one in variants]
        for row in rows:
            for layer in trace.shape.attention_layers:
                row.build(layer)
            row.complete()
        truth = decode(model(), trace, rows, max_new_tokens=N_NEW)
    assert [one.ids for one in first] == [one.ids for one in second] == [one.ids for one in truth.answers]
    for one, row in zip(first, rows, strict=True):
        assert one.ledger == row.store.ledger.summary(row.budget, trace.shape)
        assert one.looks == {} and one.text == model().tokenizer.decode(one.ids, skip_special_tokens=True)


def test_looks_have_what_was_attended_to_and_exact_weights() -> None:
    layers = [0, 2]
    full, oracle, snapkv = reading("full", "oracle", "snapkv").answer(N_NEW, layers=layers)
    for answer in (full, oracle, snapkv):
        assert list(answer.looks) == layers
        for looks in answer.looks.values():
            assert [look.step for look in looks] == list(range(1, N_NEW))
            for look in looks:
                shape = (model().shape.h, S + look.step)
                assert look.attended.shape == look.weights.shape == shape
                assert torch.allclose(look.weights.sum(-1), torch.ones(shape[0]), atol=1e-5)
    (seen,) = {float(look.attended.sum(-1, dtype=torch.float).mean()) for look in snapkv.looks[0][:1]}
    assert seen == snapkv.ledger["tokens_budget"] + 1
    assert all(bool(look.attended.all()) and look.mass == pytest.approx(1) for look in full.looks[2])
    assert oracle.looks[0][0].attended.sum(-1).unique().tolist() == [S // 5 + 1]
    # The first query of layer 0 is the same for both, and nobody has more of its weight than the true top tokens.
    assert torch.equal(oracle.looks[0][0].weights, full.looks[0][0].weights)
    assert oracle.looks[0][0].mass < 1


def test_tokens_that_never_reached_a_layer_have_no_weight() -> None:
    (answer,) = read(model(), prompt(S), [variant("pyramidinfer", ratio=0.7, comm="1/8")]).answer(3, layers=[0, 2])
    first, last = answer.looks[0][0], answer.looks[2][0]
    assert bool((first.weights[:, 1:] > 0).all())
    gone = last.weights == 0
    assert 0 < int(gone[0].sum()) < S and not bool((last.attended & gone).any())
    assert last.weights.sum(-1).tolist() == pytest.approx([1] * model().shape.h, abs=1e-5)


def test_a_question_is_a_tasks_sample_and_a_text_is_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMON, "vocab_size", len(model().tokenizer))
    one = replace(tiny(), tokenizer=model().tokenizer, shape=replace(model().shape, window=4096))
    asked = question(one, "needle", number=1, source="embedded", lengths=[600], depths=[0, 50])
    assert asked.sample.id == "600-50-0" and 400 < len(asked.ids) < 1200
    newline = one.tokenizer.encode("\n", add_special_tokens=False)[0]
    assert newline in asked.stop_ids
    by_text = read(one, "The phone number of the Paris office is 12345.", [variant("full")])
    ids = model().tokenizer.encode("The phone number of the Paris office is 12345.")
    assert by_text.trace.s_prompt == len(ids)


def test_words_are_what_the_command_line_takes() -> None:
    assert notebook.words({"a": None, "b": True, "c": [1, 2], "d": "1/4", "e": (False, "x")}) == [
        *("a=null", "b=true", "c=[1,2]", "d=1/4", "e=[false,x]")
    ]


KEYS = [
    ("snapkv", {"allocator": "pyramid"}, "SnapKV+pyramid (C)"),
    ("snapkv", {"compose": "think", "ratio": 0.5}, "SnapKV (C) + ThinK 0.4"),
    ("snapkv", {"positions": "contiguous", "dropped": "merged"}, "SnapKV (C) (contiguous, merged values)"),
    ("snapkv", {"memory": "1/4"}, "SnapKV"),
    ("kvzip", {"chunk": 100}, "KVzip (C), whole prompt"),
    ("quest", {"memory": 0.9, "comm": "1/8"}, "Quest (matched)"),
]


@pytest.mark.parametrize(("name", "keys", "label"), KEYS)
def test_a_variant_takes_the_command_lines_keys_and_is_called_as_its_run(
    name: str, keys: dict[str, Any], label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMON, "vocab_size", len(model().tokenizer))  # KVzip reads words of its own
    one = replace(tiny(), tokenizer=model().tokenizer)
    made = variant(name, **keys)
    given = {f"method.{key}" if key == "chunk" else key: value for key, value in keys.items()}
    cell = cell_without_task(from_words([f"method={name}", *notebook.words(given)]))
    assert made.label == cell.label == label
    assert made.on(one, S) == replace(cell, shape=one.shape).variant(S)
    answer, _ = read(one, prompt(S), [made, variant("full")]).answer(N_NEW)
    assert answer.label == label and len(answer.ids) == N_NEW and answer.ledger["within_budget"]


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("quest", {"allocator": "pyramid"}, "divides what a method keeps, and Quest keeps every token"),
        ("snapkv", {"allocator": "pyramids"}, "pyramid"),
        ("snapkv", {"compose": "kivi", "allocator": "pyramid"}, "gives layers or heads other numbers of tokens"),
        ("snapkv", {"compose": "quest"}, "makes no codes of what another method keeps"),
        ("quest", {"positions": "contiguous"}, "drops no tokens"),
        ("snapkv", {"memory": 2}, "memory=2 is out of range"),
        ("snapkv", {"compose_order": "quantise_first"}, "means nothing without compose"),
    ],
)
def test_what_the_command_line_refuses_is_refused_by_the_same_sentence(
    name: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as ours:
        variant(name, ratio=0.5, **keys)
    with pytest.raises(ConfigError) as theirs:
        ask_one(from_words([f"method={name}", "ratio=0.5", *notebook.words(keys)]), Lookups())
    assert message in str(ours.value) and str(ours.value) == str(theirs.value)


def test_keys_with_a_point_are_entries_of_a_dict() -> None:
    made = variant("knorm", allocator="global", **{"allocator.force": True})
    allocator = made.cell.settings.allocator
    assert made.label == "Knorm+global (C)" and allocator is not None and allocator.force
    assert variant("snapkv", **{"dropped": "merged", "merging.threshold": 0.5}).label.endswith("from 0.5)")
