"""The table of combinations: each row refuses something, and `ls` lists them all."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.evals.cells import cell_of, class_and_params
from kvbench.evals.screen import listing
from kvbench.evals.settings import from_words
from kvbench.methods.combinations import MODEL, SERVING, SHAPE, TABLE, Case, in_general, refusals, said
from kvbench.methods.dropping.snapkv import SnapKV

LLAMA = ModelShape("llama", 2, 4, 2, 16, 1024, (0, 1))
LATENT = replace(LLAMA, h_kv=1, value_width=8, is_latent=True)
TURNS = "task=needle task.source=embedded task.questions=2"
COMMANDS = [
    *("method=quest positions=contiguous", "method=snapkv prefill.evict=true", "method=keydiff method.blocks=read"),
    *("method=quest allocator=global", "method=pyramidkv allocator=global", "method=knorm allocator=global"),
    *("method=tova allocator=global", "method=tova method.evict=prompt allocator=head_mix"),
    *("method=pyramidinfer prefill=minference", "method=snapkv compose_order=quantise_first"),
    *("method=snapkv compose=snapkv", "method=sparq compose=kivi", "method=pqcache compose=think"),
    "method=pqcache compose=kivi compose_order=quantise_first",
    *("method=magicpig reuse=every", "method=quest memory=1/2 comm=null reuse=every reuse.comm_counts=mean"),
    *("method=snapkv budget_counts=mean", "method=snapkv weights=random", f"method=h2o_decode budget=200 {TURNS}"),
    "method=snapkv task=pg19 task.source=embedded compression_scope=context_only",
    f"method=snapkv {TURNS} task.mode=independent task.budget_base=conversation",
    f"method=kvzip {TURNS} task.mode=golden task.budget_base=conversation",
    f"method=snapkv {TURNS} task.feed=dense",
    f"method=snapkv {TURNS} temperature=0.5",
    f"method=snapkv {TURNS} compression_scope=context_only",
    "method=finch compression_scope=context_only",
]
SHAPES: list[tuple[str, Any]] = [
    ("method=snapkv positions=contiguous", LATENT),
    ("method=knorm prefill.evict=true", replace(LLAMA, readers=((1, 0),))),
    ("method=knorm prefill.evict=true", replace(LLAMA, hybrid_layers=(1,))),
    ("method=snapkv allocator=head_mix", LATENT),
    ("method=snapkv prefill=minference", replace(LLAMA, choosing_layers=(1,))),
    ("method=snapkv temperature=1 n_answers=2000", LLAMA),
    ("method=shadowkv", LATENT),
    ("method=pqcache compose=kivi", LATENT),
    ("method=turboquant ratio=1", replace(LLAMA, value_width=8)),
    ("method=streamingllm method.position=cache", replace(LLAMA, readers=((1, 0),))),
    ("method=quest method.full_layers=2", LLAMA),
]
MODELS = [Checkpoint(LLAMA, ("a",), 0), Checkpoint(LLAMA, ("a",), 16, (1,))]
SERVED = [
    *(
        "method=snapkv compose=kivi",
        "method=kvzap",
        "method=quest",
        "method=simlayerkv method.threshold=0.5 method.n_recent=16",
    ),
    *("method=finch", "method=pyramidinfer", "method=kivi ratio=1", "method=h2o_decode budget=200", "method=kvzip"),
]


def case_of(words: str, shape: Any = None, **more: Any) -> Case:
    settings = from_words(words.split())
    kind, params = class_and_params(settings.task)
    cell = replace(cell_of(settings), task=kind(params, settings.data_dir, settings.seed), shape=shape)
    return cell.case(**more)


def test_each_row_refuses_something() -> None:
    class Stubborn(SnapKV):
        rolls_back = False

    golden = case_of(f"method=snapkv {TURNS} task.mode=golden")
    cases = [(case_of(words), None) for words in COMMANDS]
    cases += [(Case(Stubborn, golden.params, golden.settings, **golden.given), None)]
    silent = SimpleNamespace(dataset="mine", is_timed=False, is_forced=False)
    cases += [(Case(SnapKV, golden.params, golden.settings, **golden.given | {"task": silent}), None)]
    cases += [(case_of(words, shape), SHAPE) for words, shape in SHAPES]
    cases += [(case_of("method=snapkv positions=contiguous", LLAMA, model=model), MODEL) for model in MODELS]
    cases += [(case_of(words, rung="dropping"), SERVING) for words in SERVED]
    fired = dict[str, str]()
    for case, stage in cases:
        fired |= {row.says: sentence for row, sentence in refusals(TABLE, case, stage or "command")}
    assert {row.says for row in TABLE} - fired.keys() == set()
    for sentence in fired.values():
        assert "\n" not in sentence and "None" not in sentence and "{" not in sentence


def test_a_method_that_nothing_else_is_asked_of_is_refused_by_no_row() -> None:
    case = case_of("method=snapkv", LLAMA, model=Checkpoint(LLAMA, ("a",), 16), rung="visible")
    assert [*refusals(TABLE, case)] == []


def test_a_sentence_in_general_has_names_in_place_of_values() -> None:
    says = "allocator={allocator.name} is not for {title} on {shape.name!r}: {why}"
    assert in_general(says) == "allocator=ALLOCATOR is not for METHOD on SHAPE: …"
    with pytest.raises(AttributeError):
        said("{allocator.nam}", case_of("method=snapkv allocator=global"))


def test_the_list_has_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert listing.main(["combinations"]) == 0
    said_of_all = "".join(capsys.readouterr().out.split())
    rest = [row.says for row in TABLE if "".join(in_general(row.says).split())[:40] not in said_of_all]
    assert rest == []
