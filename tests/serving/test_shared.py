"""Prompts that begin alike, and turns that go on from each other, in pages like vLLM's and without vLLM: tokens are
those of the main engine, and nobody writes where others read.
"""

from math import ceil
from typing import Any

import pytest
import torch

from kvbench.engine.batch import Batch
from kvbench.engine.prefill import prefill
from kvbench.methods.base import Variant
from kvbench.serving.order import DROPPING, VISIBLE, Note
from kvbench.serving.reader import Asked
from kvbench.tests.conformance import model
from kvbench.tests.serving.pretend import BLOCK, FORMS, Pretend, Request
from kvbench.tests.serving.test_reader import DROPPED, N_NEW, SEEN, S, order_of, ratio_of, variants, wanted
from kvbench.tests.tiny import prompt
from kvbench.tests.vectors import built

BEGINNING = 5 * BLOCK + 7  # tokens that two prompts share: five blocks and a part of the sixth
TURNS = 5


def engine(name: str, rung: str, chains: int = 0, form: str = "cpu") -> Pretend:
    order = order_of(variants(name, ratio_of(name)), model(), rung)
    order.__dict__["chains"] = chains
    return Pretend(model(), order, is_shared=True, form=FORMS[form])


def branch(seed: int) -> list[int]:
    """A prompt whose beginning all of them share."""
    return prompt(S)[:BEGINNING] + prompt(S, seed)[BEGINNING:]


def said(name: str, ids: list[int]) -> list[int]:
    one = variants(name, ratio_of(name))(S)
    with model().hooked(), torch.inference_mode():
        trace = prefill(model(), ids, one.observations)
        batch = Batch(model(), trace, [built(one.row(trace, N_NEW))])
        assert trace.logits is not None
        return batch.answer(trace.logits.expand(1, -1), [N_NEW])[0].ids


def looks_at(one: Variant) -> int:
    """The last tokens whose queries it looks at."""
    return max((S if what.looks_at is None else what.looks_at for what in one.observations), default=0)


@pytest.mark.parametrize(("name", "rung"), [(name, VISIBLE) for name in SEEN] + [(name, DROPPING) for name in DROPPED])
def test_prompts_that_begin_alike_share_blocks_and_touch_nothing(name: str, rung: str) -> None:
    """One goes, the next one comes while a third still reads; on the dropping rung all of them have moved."""
    serving = engine(name, rung)
    asked = [branch(1), branch(2), branch(1)]
    with model().hooked():
        first = serving.ask("0", asked[0], N_NEW)
        for _ in range(N_NEW // 2):
            serving.step(first)
        second = serving.ask("1", asked[1], N_NEW)
        serving.answer(second)
        serving.answer(first)
        serving.end(first)
        third = serving.ask("2", asked[2], N_NEW)
        serving.answer(third)
    wants = [said(name, ids) for ids in asked]
    assert [one.said for one in (first, second, third)] == wants
    free = looks_at(variants(name, ratio_of(name))(S))
    assert [one.n_found for one in (first, second, third)] == [
        0,
        min(BEGINNING, S - free) // BLOCK * BLOCK,
        min(S - 1, S - free) // BLOCK * BLOCK,
    ]
    for one in (second, third):
        serving.end(one)
    assert len(serving.free) == 200


@pytest.mark.parametrize("form", ["cpu", "flash"])
@pytest.mark.parametrize("rung", [VISIBLE, DROPPING])
@pytest.mark.parametrize("name", ["snapkv", "streamingllm", "tova"])
def test_a_preempted_request_finds_its_own_prompt_again(name: str, rung: str, form: str) -> None:
    """What its answer wrote is not handed on, since a method made it. Blocks of 16 divide the prompt, of 32 do not: its
    last token is read again wherever it lies, since with that one the method takes the prompt over.
    """
    serving, block = engine(name, rung, form=form), FORMS[form].block
    one = serving.ask("a", prompt(S), N_NEW)
    with model().hooked():
        for _ in range(15):
            serving.step(one)
        serving.preempt(one)
        assert serving.answer(one) == wanted(variants(name)(S))[0]
    assert one.n_found == min(S - 1, S - looks_at(variants(name)(S))) // block * block
    assert serving.desk.replays == 1


def turns_of(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Five turns in the main engine: what is read behind each answer, and the answers."""
    one = variants(name, ratio_of(name))(S)
    texts = [prompt(20 + 7 * turn, 50 + turn) for turn in range(1, TURNS)]
    with model().hooked(), torch.inference_mode():
        trace = prefill(model(), prompt(S), one.observations)
        batch = Batch(model(), trace, [built(one.row(trace, 4096))])
        assert trace.logits is not None
        answers = [batch.answer(trace.logits.expand(1, -1), [9])[0].ids]
        for text in texts:
            logits = batch.read([[answers[-1][-1], *text]])
            answers.append(batch.answer(logits, [9])[0].ids)
    return texts, answers


@pytest.mark.parametrize(
    ("name", "rung"),
    [(name, VISIBLE) for name in ("snapkv", "oracle", "quest", "pqcache", "tova")]
    + [(name, DROPPING) for name in DROPPED],
)
def test_a_turn_goes_on_from_what_the_last_one_left(name: str, rung: str) -> None:
    """Tokens are those of task.feed=compressed; the prompt's exact part is the first turn's alone."""
    texts, answers = turns_of(name)
    serving = engine(name, rung, chains=4)
    with model().hooked():
        one = serving.ask("0", prompt(S), 9)
        assert serving.answer(one) == answers[0]
        serving.end(one)
        for turn, (text, want) in enumerate(zip(texts, answers[1:], strict=True), 1):
            one = serving.go_on(f"{turn}", one, text, 9)
            serving.step(one, 11)  # the rest of the answer before, and the first of the text: in two chunks
            assert serving.answer(one) == want, turn
            serving.end(one)
    assert serving.desk.replays == 0
    n = len(one.text) - 1
    held = serving.order.most_slots(S, n)
    assert len(one.blocks) == ceil((n if rung == VISIBLE else held) / BLOCK)


def test_a_turn_that_is_preempted_is_read_from_its_beginning_as_it_was() -> None:
    """The first prompt exactly, all that followed through the method: also what came from a chain."""
    texts, answers = turns_of("tova")
    serving = engine("tova", DROPPING, chains=4)
    with model().hooked():
        one: Any = serving.ask("0", prompt(S), 9)
        serving.answer(one)
        serving.end(one)
        one = serving.go_on("1", one, texts[0], 9)
        for _ in range(3):
            serving.step(one)
        assert isinstance(one, Request)
        serving.preempt(one)
        assert serving.answer(one) == answers[1]
    assert serving.desk.replays == 1


def test_an_old_note_drops_no_chain_that_came_after_it() -> None:
    """What a request was told of chains when it came is not what there is when it is read again."""
    texts, answers = turns_of("snapkv")
    serving = engine("snapkv", DROPPING, chains=4)
    with model().hooked():
        other, one = serving.ask("other", prompt(S, 3), N_NEW), serving.ask("0", prompt(S), 9)
        for _ in range(5):
            serving.step(other)
        serving.answer(one)
        serving.end(one)
        serving.preempt(other)
        serving.answer(other)
        assert serving.answer(serving.go_on("1", one, texts[0], 9)) == answers[1]


def test_a_chain_is_there_for_whoever_takes_it_in_the_same_step() -> None:
    """Another request of the step, which was told afterwards, may stand before it in the worker's batch."""
    serving = engine("streamingllm", VISIBLE, chains=4)
    with model().hooked():
        one = serving.ask("0", prompt(S), 9)
        serving.answer(one)
        serving.end(one)
    n = one.n_read
    asked = [Asked("b", prompt(S, 1), 9, Note(S, None, [])), Asked("a", [*one.text, 5], 9, Note(S, "0", []))]
    tables = torch.tensor([[0] * 20, one.table + [0] * (20 - len(one.table))])
    b, a = serving.desk.turns(asked, [0, 10, 12], [10, n + 2], tables, {"a", "b"})
    assert a.reader.is_placed and a.reader.n_seen == n + 2 and not b.reader.is_placed and not serving.desk.kept
