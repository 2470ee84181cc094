"""Whole runs of samples with several turns, through the same door as run.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.engine.batch import Answer
from kvbench.engine.errors import ConfigError
from kvbench.evals.batch import answers
from kvbench.evals.runner import run_cells
from kvbench.evals.screen.table import remarks, sheet
from kvbench.evals.settings import from_words
from kvbench.plots.read import Run, load
from kvbench.plots.scored import Scored
from kvbench.plots.turns import by_turn, in_words, less_full, lost, with_turns, write
from kvbench.results import SampleRow, interval, read_samples
from kvbench.results.read import read_run
from kvbench.tasks.base import Sample
from kvbench.tasks.longbench import embedded
from kvbench.tasks.longbench.shared import by_context
from kvbench.tasks.scbench import synthetic
from kvbench.tasks.texts import sentences
from kvbench.tasks.turns.conversation import Asking, Conversation, Turn
from kvbench.tasks.turns.encode import TalkPrompt, encode_talk
from kvbench.tests.tiny_run import cell, run, save_tiny, sweep
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer

NEEDLE = ["task=needle", "task.source=embedded", "task.lengths=[620]", "task.depths=[0]", "task.max_new_tokens=5"]
QUESTIONS = [*NEEDLE, "task.questions=3"]
VARIANTS = [["method=full"], ["method=snapkv", "ratio=0.3"], ["method=pqcache", "ratio=1"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.id={save_tiny(tmp_path_factory.mktemp('models') / 'tiny')}"


def texts(rows: list[SampleRow]) -> list[str]:
    return [row.prediction for row in rows]


@pytest.mark.parametrize("mode", ["independent", "golden", "dialogue"])
def test_every_turn_has_a_line(model: str, tmp_path: Path, mode: str) -> None:
    done = sweep(["model=any", model, *QUESTIONS, f"task.mode={mode}"], VARIANTS, tmp_path)
    for result, rows in done:
        assert [row.id for row in rows] == ["620-0-0/1", "620-0-0/2", "620-0-0/3"]
        assert [row.fields["turn"] for row in rows] == [1, 2, 3]
        assert {row.sample_id for row in rows} == {"620-0-0"}
        assert {row.fields["feed"] for row in rows} == {"compressed"}
        assert result.protocol == mode
        assert set(result.measures or {}) == {"turn_1", "turn_2", "turn_3"}
    (_, full), _, (_, whole) = done
    assert texts(whole) == texts(full)  # ratio 1


def test_a_question_does_not_depend_on_those_before_it(model: str, tmp_path: Path) -> None:
    """Independent: alone, one at a time, or beside others."""
    together = sweep(["model=any", model, *QUESTIONS], VARIANTS, tmp_path / "together")
    one_by_one = sweep(["model=any", model, *QUESTIONS, "sweep.max_variants=1"], VARIANTS, tmp_path / "one")
    assert [texts(rows) for _, rows in together] == [texts(rows) for _, rows in one_by_one]


def test_a_feed_token_by_token_is_the_same_run(model: str, tmp_path: Path) -> None:
    one, rows = run(["model=any", model, *QUESTIONS, "method=pqcache", "ratio=0.4", "comm=1/8"], tmp_path / "one")
    other, tokenwise = run(
        ["model=any", model, *QUESTIONS, "method=pqcache", "ratio=0.4", "comm=1/8", "task.feed=tokenwise"],
        tmp_path / "two",
    )
    assert texts(rows) == texts(tokenwise)
    assert [row.fields["attended_by_feed"] for row in rows] == [row.fields["attended_by_feed"] for row in tokenwise]
    assert (one.protocol, other.protocol) == ("independent", "independent, tokenwise feed")


def test_query_aware_asks_each_question_by_itself(model: str, tmp_path: Path) -> None:
    result, rows = run(["model=any", model, *QUESTIONS, "task.mode=query_aware", "method=full"], tmp_path)
    assert [row.id for row in rows] == ["620-0-0/1", "620-0-0/2", "620-0-0/3"]
    assert result.protocol == "query_aware"


def test_a_run_that_was_stopped_within_a_sample_goes_on(model: str, tmp_path: Path) -> None:
    words = ["model=any", model, *QUESTIONS, "method=snapkv", "ratio=0.3"]
    _, whole = run(words, tmp_path)
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
    (tmp_path / "result.json").unlink()
    _, again = run(words, tmp_path)
    assert texts(again) == texts(whole)


def test_an_interval_draws_samples_and_not_turns(model: str, tmp_path: Path) -> None:
    """Four turns of one sample say nothing of other samples."""
    result, _ = run(["model=any", model, *QUESTIONS, "method=full"], tmp_path)
    assert result.score_ci95 is None


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["task.mode=nobody"], "task.mode"),
        (["task.feed=dense", "method=snapkv", "ratio=0.3"], "task.feed=dense"),
        (["compression_scope=context_only"], "compression_scope=context_only"),
        (["task.questions=12", "task.lengths=[1800]", "task.max_new_tokens=40"], "longest that fits|more than the"),
        (["task.questions=0"], "task.questions=0"),
        (["task.questions=1", "task.mode=golden"], "needs several questions"),
        (["task.budget_base=conversation", "method=snapkv"], "grows with turns that stay"),
        (
            ["task.budget_base=conversation", "task.mode=golden", "method=kvzip"],
            "KVzip cannot: it scores tokens by how the context is repeated",
        ),
        (
            ["task.budget_base=conversation", "task.mode=golden", "method=h2o", "method.generated=on_top"],
            "H2O cannot: it does not with these settings",
        ),
    ],
)
def test_wrong_input_is_refused_before_a_prefill(model: str, tmp_path: Path, words: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        run(["model=any", model, *QUESTIONS, *words], tmp_path)


@pytest.mark.parametrize("mode", ["golden", "dialogue"])
def test_a_budget_may_grow_with_the_conversation(model: str, tmp_path: Path, mode: str) -> None:
    words = ["model=any", model, *QUESTIONS, f"task.mode={mode}"]
    variants = [
        ["method=full"],
        ["method=snapkv", "ratio=0.3"],
        ["method=h2o", "ratio=0.3"],
        ["method=snapkv", "ratio=1"],
    ]
    (_, full), (growing, snapkv), (_, h2o), (_, whole) = sweep(
        [*words, "task.budget_base=conversation"], variants, tmp_path / "growing"
    )
    (_, fixed), *_ = sweep(words, variants[1:2], tmp_path / "fixed")
    assert growing.protocol == f"{mode}, growing budget"
    assert [row.fields["bytes_rebuilt"] for row in (*full, *fixed)] == [0] * 6
    assert texts(whole) == texts(full)
    seen = full[0].prompt_tokens
    for i, row in enumerate(snapkv):
        seen += row.fields["feed_tokens"] if i else 0
        assert (row.fields["bytes_rebuilt"] > 0) == (i > 0)
        if i:  # within the budget of the conversation so far, where a fixed one has all turns on top
            held = row.fields["attended_by_answer"]
            assert held <= 0.31 * (seen + 5 * i) + 5 and held < fixed[i].fields["attended_by_answer"]
    assert [row.fields["bytes_rebuilt"] > 0 for row in h2o] == [False, True, True]


def test_a_budget_in_bytes_grows_too_where_it_is_one_in_tokens(model: str, tmp_path: Path) -> None:
    words = ["model=any", model, *QUESTIONS, "task.mode=golden", "task.budget_base=conversation"]
    names = [f"method={name}" for name in ("snapkv", "streamingllm", "h2o")]
    by_bytes = sweep(words, [[name, "memory=0.3"] for name in names], tmp_path / "bytes")
    by_tokens = sweep(words, [[name, "ratio=0.3", "compensate=false"] for name in names], tmp_path / "tokens")
    for (result, rows), (_, others) in zip(by_bytes, by_tokens, strict=True):
        assert texts(rows) == texts(others) and result.memory is not None
        assert all(row.ledger["within_budget"] for row in rows)
        for key in ("bytes_rebuilt", "attended_by_answer"):
            assert [row.fields[key] for row in rows] == [row.fields[key] for row in others]
    with pytest.raises(ConfigError, match="does not with these settings"):
        run([*words, "method=pqcache", "memory=0.5"], tmp_path / "codes")


def test_a_needle_run_without_questions_keeps_its_name(tmp_path: Path) -> None:
    """Keys that came later are no part of what identifies a run that does not use them."""
    identity = cell(["task=needle"], tmp_path).resolved()["task"]["params"]
    assert not {"questions", "mode", "feed", "budget_base"} & set(identity)
    assert cell(["task=needle", "task.questions=3"], tmp_path).resolved()["task"]["params"]["questions"] == 3


def talk(mode: Any, is_rendered: bool = False) -> Sample:
    turns = tuple(Turn(f"question {i}?", (f"answer {i}",), 4) for i in (1, 2, 3))
    return Sample(id="a", context="a text ", question="", conversation=Conversation(turns, Asking(mode), is_rendered))


def test_what_stands_between_turns_is_the_chat_templates() -> None:
    tokenizer = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)
    prompt = encode_talk(tokenizer, talk("golden"), chat="auto", system_prompt="")
    text = tokenizer.decode([id for ids in (prompt.context_ids, *prompt.feeds) for id in ids])
    assert text == (
        "<|im_start|>user\na text question 1?<|im_end|>\n<|im_start|>assistant\nanswer 1<|im_end|>\n"
        "<|im_start|>user\nquestion 2?<|im_end|>\n<|im_start|>assistant\nanswer 2<|im_end|>\n"
        "<|im_start|>user\nquestion 3?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_independent_questions_stand_behind_the_context() -> None:
    tokenizer = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)
    prompt = encode_talk(tokenizer, talk("independent"), chat="auto", system_prompt="")
    assert tokenizer.decode(prompt.context_ids) == "<|im_start|>user\na text "
    assert tokenizer.decode(prompt.feeds[1]) == "question 2?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.n_new == max(map(len, prompt.feeds)) + 4


# A task whose turns begin with texts that are only read, or have the same texts within their question.
READING = """
from dataclasses import dataclass
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.turns.conversation import Asking, Conversation, Turn
from kvbench.tasks.texts import sentences

class Reading(Task):
    name, version, dataset, data_source = "reading", 1, "drawn", "embedded"

    @dataclass(frozen=True)
    class Params:
        mode: str = "golden"
        joined: bool = False
        budget_base: str = "context"

    def __init__(self, params, data_dir, seed):
        self.params, self.asking = params, Asking(params.mode, "compressed", params.budget_base)

    def check(self, shape):
        pass

    def samples(self, tokenizer):
        return [self.one(i) for i in range(2)]

    def one(self, i):
        texts = [f"{sentence}\\n" for sentence in sentences()[10 * i : 10 * i + 7]]
        turns = [self.turn(texts[:4], "Who?"), self.turn(texts[4:6], "Where?"), self.turn([], "When?")]
        conversation = Conversation(tuple(turns), self.asking)
        return Sample(f"{i}", texts[6], "", max_new_tokens=4, conversation=conversation)

    def turn(self, reads, question):
        reads, joined = (reads[:1], "".join(reads[1:])) if self.params.joined else (reads, "")
        return Turn(joined + question, ("nobody",), 4, reads=tuple(reads))

    def score(self, sample, prediction):
        return 0.0
"""
COUNTS = ("feed_tokens", "attended_by_feed", "attended_by_answer", "measures")


def reading(folder: Path, *variants: list[str], model: str, **given: Any) -> list[tuple[Any, list[SampleRow]]]:
    folder.mkdir(exist_ok=True)
    (folder / "reading.py").write_text(READING)
    words = ["model=any", model, "dtype=float32", "device=cpu", f"task={folder / 'reading.py'}"]
    words += [f"task.{key}={value}" for key, value in given.items()]
    cells = [replace(from_words([*words, *variant]), out=folder / "runs", is_sweep=True) for variant in variants]
    return [(result, read_samples(path)) for path, result in run_cells(cells)]


@pytest.mark.parametrize("mode", ["golden", "dialogue"])
def test_texts_that_are_only_read_count_for_the_answer_behind_them(model: str, tmp_path: Path, mode: str) -> None:
    """One by one or as one feed: the same answers, and the same counts, where a budget is the context's."""
    names = [["method=full"], *([f"method={name}", "ratio=0.4"] for name in ("snapkv", "streamingllm", "h2o"))]
    names.append(["method=quest", "ratio=0.4", "comm=1/4"])
    apart = reading(tmp_path / "apart", *names, model=model, mode=mode)
    joined = reading(tmp_path / "joined", *names, model=model, mode=mode, joined=True)
    for (_, rows), (_, others) in zip(apart, joined, strict=True):
        assert [row.id for row in rows] == ["0/1", "0/2", "0/3", "1/1", "1/2", "1/3"]
        assert texts(rows) == texts(others)
        for row, other in zip(rows, others, strict=True):
            assert row.prompt_sha256 == other.prompt_sha256
            assert [row.fields[key] for key in COUNTS] == [other.fields[key] for key in COUNTS]
            times = {"bytes_resident_device_actual"}
            assert {k: v for k, v in row.ledger.items() if k not in times} == {
                k: v for k, v in other.ledger.items() if k not in times
            }


def test_each_text_that_is_only_read_is_compressed_before_the_next(model: str, tmp_path: Path) -> None:
    words = {"model": model, "budget_base": "conversation"}
    variants = [["method=snapkv", "ratio=0.3"], ["method=snapkv", "ratio=1"], ["method=full"]]
    (_, apart), (_, whole), (_, full) = reading(tmp_path / "apart", *variants, **words)
    (_, joined), *_ = reading(tmp_path / "joined", *variants, **words, joined=True)
    assert texts(whole) == texts(full)
    for row, other in zip(apart, joined, strict=True):
        n = {1: 3, 2: 2, 3: 1}[row.fields["turn"]]  # feeds: of the first turn one is in the context
        assert row.fields["feed_tokens"] == other.fields["feed_tokens"]
        assert (row.fields["bytes_rebuilt"] > other.fields["bytes_rebuilt"]) == (n > 1)
        assert row.fields["attended_by_answer"] == other.fields["attended_by_answer"]  # within one budget
        if n > 1:
            assert row.fields["attended_by_feed"] < other.fields["attended_by_feed"]


def test_texts_that_are_only_read_stand_in_the_context_of_one_question(model: str, tmp_path: Path) -> None:
    ((_, rows),) = reading(tmp_path, ["method=full"], model=model)
    shown = rows[0].fields["prompt_end"]["context"]
    assert shown.endswith(sentences()[5] + "\n") and shown.startswith("… ") and len(shown) < 700
    with pytest.raises(ConfigError, match="nothing more is read"):
        reading(tmp_path / "other", ["method=full"], model=model, mode="independent")


@pytest.mark.parametrize(
    ("ids", "stopped", "end", "feed", "read"),
    [
        ([5, 9], True, None, (9, 1), (9, 1)),  # the feed begins with the end that the answer has
        ([5, 7], True, None, (9, 1), (7, 9, 1)),  # with another one
        ([5, 6], False, None, (9, 1), (6, 9, 1)),  # the answer was cut
        ([5, 6], False, 8, (3, 1), (6, 8, 3, 1)),  # and nothing else ends it
        ([5, 6], False, 9, (9, 1), (6, 9, 1)),
        ([5, 8], True, 8, (3, 1), (8, 3, 1)),
        ([], False, 8, (3, 1), (3, 1)),
    ],
)
def test_an_own_answer_ends_once_before_the_next_feed(
    ids: list[int], stopped: bool, end: int | None, feed: tuple[int, ...], read: tuple[int, ...]
) -> None:
    conversation = object.__new__(answers.Conversation)
    conversation.prompt = TalkPrompt((), (), end_id=end)
    answer = Answer(ids=ids, stopped=stopped)
    assert conversation.behind(answer, feed) == read


CONTEXTS = {  # one context each, asked several times
    "shared_context": ["task=shared_context", "task.max_new_tokens=3"],
    "needle": [*QUESTIONS, "task.mode=golden"],
    "needle, question by question": [*QUESTIONS, "task.mode=query_aware"],
    "longbench": [
        *("task=longbench", "task.source=embedded", "task.datasets=[docs_qa]", "task.rows=1"),
        *("task.questions=4", "task.max_new_tokens=3"),
    ],
    "scbench": [
        *("task=scbench", "task.source=embedded", "task.lengths=[500]", "task.rows=1"),
        *("task.datasets=[scbench_mf]", "task.max_new_tokens=3"),
    ],
    "agent_traces": [
        *("task=agent_traces", "task.source=embedded", "task.lengths=[5000]", "task.rows=1", "task.turns=2"),
        *("task.output_tokens=40", "task.max_new_tokens=3"),
    ],
    "agent_forced": [
        *("task=agent_forced", "task.source=embedded", "task.lengths=[4000]", "task.rows=1", "task.turns=2"),
        *("task.output_tokens=40",),
    ],
    "tool_calls": [
        *("task=tool_calls", "task.lengths=[7000]", "task.rows=1", "task.turns=3", "task.mode=dialogue"),
        *("task.max_new_tokens=3",),
    ],
    "draws": [*NEEDLE, "temperature=1", "n_answers=3"],
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model with a window for texts of thousands of tokens."""
    folder = save_tiny(tmp_path_factory.mktemp("wide") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 15}))
    return f"model.id={folder}"


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_with_several_questions_is_one_sample_everywhere(wide: str, tmp_path: Path, name: str) -> None:
    """Table and result.json said n = 3 of one context, beside an interval over contexts, and `make run` said 1."""
    has_prompts = name in ("needle, question by question", "agent_forced")  # for each question, of which limit=1 is one
    words = ["model=any", wide, *CONTEXTS[name], "method=full", *([] if has_prompts else ["limit=1"])]
    result, rows = run(words, tmp_path / "run")
    assert len(rows) > 1 and len({row.sample_id for row in rows}) == 1
    assert (result.n_samples, result.n_oom, result.n_failed) == (1, 0, 0)
    assert result.score_ci95 is None and "n = 1" in (sheet([(tmp_path, result)]).about or "")
    assert any("too few to compare" in line for line in remarks([result]))
    (ran,) = load(tmp_path)
    assert Scored.of(ran.rows).n == ran.result.n_samples == 1
    assert read_run(tmp_path / "run") == (result, rows)


@pytest.mark.parametrize("mode", ["independent", "golden", "dialogue"])
def test_scbench_is_generated_and_asked(model: str, tmp_path: Path, mode: str) -> None:
    words = [
        "model=any",
        model,
        "task=scbench",
        "task.source=embedded",
        "task.lengths=[500]",
        "task.rows=1",
        f"task.mode={mode}",
    ]
    result, rows = run([*words, "task.datasets=[scbench_mf]", "task.max_new_tokens=3", "method=full"], tmp_path)
    assert [row.fields["turn"] for row in rows] == [1, 2, 3, 4, 5]
    assert result.data_source == "embedded"
    assert (tmp_path / "turns.csv").read_text().count("scbench_mf") >= 5


def test_rows_of_scbench_without_turns_are_refused(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "scbench" / "data"
    folder.mkdir(parents=True)
    (folder / "scbench_kv.jsonl").write_text(json.dumps({"id": 0, "context": "a", "multi_turns": []}) + "\n")
    words = [
        "model=any",
        model,
        "task=scbench",
        "task.datasets=[scbench_kv]",
        f"data_dir={tmp_path / 'data'}",
        "method=full",
    ]
    with pytest.raises(ConfigError, match="no turns"):
        run(words, tmp_path / "out")


def test_a_figure_and_a_table_have_a_place_for_each_mode(model: str, tmp_path: Path) -> None:
    for mode in ("independent", "query_aware"):
        run(["model=any", model, *QUESTIONS, f"task.mode={mode}", "method=full"], tmp_path / "runs" / mode)
    runs = with_turns(load(tmp_path / "runs"))
    assert [each.result.protocol for each in runs] == ["query_aware", "independent"]
    page, table, figure, _ = write(runs, tmp_path / "out")
    assert page.read_text().count("| Full |") == 2
    assert len(table.read_text().splitlines()) == 1 + 2 * 3
    assert figure.stat().st_size > 1000


def test_later_turns_are_compared_with_those_of_full_attention(model: str, tmp_path: Path) -> None:
    """On the same samples, apart from the first turn, with an interval over samples."""

    def made(full: Run, scores: list[list[float]]) -> Run:
        rows = [
            replace(full.rows[0], id=f"{i}/{turn}", score=score, fields={"sample": str(i), "turn": turn})
            for i, of_turns in enumerate(scores)
            for turn, score in enumerate(of_turns, 1)
        ]
        return replace(full, rows=tuple(rows))

    run(["model=any", model, *QUESTIONS, "task.mode=independent", "method=full"], tmp_path / "full")
    (ran,) = load(tmp_path / "full")
    theirs: list[list[float]]
    mine: list[list[float]]
    theirs, mine = [[1, 1, 0], [1, 1, 1], [0, 0, 1]], [[1, 0, 0], [1, 0, 0], [0, 0, 0]]
    few = less_full(made(ran, mine), made(ran, theirs), is_first=True)
    assert few == (0.0, None), "three samples have no interval"
    full, ours = made(ran, theirs * 7), made(ran, mine * 7)
    same = interval([0.0] * 21, (-1, 1))
    assert same is not None and less_full(ours, full, is_first=True) == (0.0, [same.low, same.high])
    found = interval([-0.5, -1.0, -0.5] * 7, (-1, 1))
    less = less_full(ours, full, is_first=False)
    assert found is not None and less is not None
    assert less[0] == pytest.approx(-2 / 3) and less[1] == pytest.approx([found.low, found.high])
    drift = {turn: pair.mean for turn, pair in lost(by_turn(ours), by_turn(full)).items()}
    assert drift == pytest.approx({1: 0.0, 2: -2 / 3, 3: -2 / 3})
    assert less_full(full, full, is_first=True) is None and less_full(ours, None, is_first=True) is None
    assert in_words((-2 / 3, [-1.0, 0.05])) == "-66.7 (-100.0 to +5.0)" and in_words(None) == "-"


def test_questions_of_the_embedded_set_share_a_context() -> None:
    row = embedded.first_rows("docs_qa")[0]
    (group, *_) = by_context("docs_qa", [row], 4)
    assert [one["context"] for one in group] == [row["context"]] * 4
    assert len({one["input"] for one in group}) == 4
    assert all(f"{one['input']} {one['answers'][0]}" in " ".join(row["context"].split()) for one in group)


def test_published_rows_with_one_context_stand_together() -> None:
    rows = [{"context": context, "input": str(i)} for i, context in enumerate("abaab")]
    assert [[one["input"] for one in group] for group in by_context("qasper", rows, 2)] == [["0", "2"], ["1", "4"]]


@pytest.mark.parametrize("seed", range(40))
def test_no_summary_stands_in_its_own_text(seed: int) -> None:
    row = synthetic.row("scbench_summary_with_needles", 60, seed, 0)
    (answer,) = [turn["answer"] for turn in row["multi_turns"] if turn["task"] == "scbench_summary"]
    assert answer not in row["context"].split("\n\n")[0]


@pytest.mark.parametrize("task", synthetic.GENERATORS)
def test_generated_rows_hold_their_answers(task: str) -> None:
    row = synthetic.row(task, 60, 1, 0)
    assert row == synthetic.row(task, 60, 1, 0) != synthetic.row(task, 60, 2, 0)
    assert len(row["multi_turns"]) == 5
    for turn in row["multi_turns"]:
        found = turn["answer"] if isinstance(turn["answer"], list) else [str(turn["answer"])]
        is_inside = turn.get("task") != "scbench_summary"
        assert all(one in row["context"] for one in found) == is_inside
