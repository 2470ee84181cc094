"""LongBench: upstream's prompts, truncation, the question in front, stops, and scores against the official ones."""

import csv
import json
import marshal
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.prefill import prefill
from kvbench.engine.shapes import ModelShape
from kvbench.methods.full import Full
from kvbench.tasks import download, sources
from kvbench.tasks.ending import Ending
from kvbench.tasks.longbench import prompts, scores
from kvbench.tasks.longbench import task as longbench
from kvbench.tasks.longbench.datasets import DATASETS, E13, LISTS
from kvbench.tasks.longbench.task import LongBench
from kvbench.tasks.prompt import encode
from kvbench.tests.golden_metrics import metrics_folder
from kvbench.tests.tiny import prompt as random_ids
from kvbench.tests.tiny import tiny
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, LLAMA_TEMPLATE, tiny_tokenizer
from kvbench.tests.vectors import built, request, row_for

REPO = Path(__file__).resolve().parents[2]
TEMPLATES = {
    name: f"Begin {name}.\n\n{{context}}\n\nNow answer.\n\nQuestion: {{input}}\nAnswer:"
    for name in DATASETS
} | {
    "multi_news": "News:\n{context}\n\nSum it up. \n\nSummary:",
    "vcsum": "Meeting:\n{context}\n\nSummary:",
    "samsum": "Examples.\n\n{context}\n\n{input}",
    "passage_count": "Count.\n\n{context}\n\nOnly the number.\n\nThe answer is: ",
    "passage_retrieval_en": "Find.\n\n{context}\n\nAn abstract.\n\n{input}\n\nThe form is x.\n\nThe answer is: ",
    "lcc": "Complete. \n{context}Next line of code:\n",
    "repobench-p": "Complete. \n{context}{input}Next line of code:\n",
}  # fmt: skip


def row(i: int, **changes) -> dict:
    return {
        "input": f"What is {{x}} in {i}?", "context": f"Text {i} has {{braces}} and {{input}}.", "answers": ["a", "b"],
        "length": 4000 * i, "dataset": "d", "language": "en", "all_classes": None, "_id": f"id{i}",
    } | changes  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(LLAMA_TEMPLATE, adds_bos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in ("data", "config"):
        (tmp_path / "longbench" / part).mkdir(parents=True)
    for name in ("qasper", "hotpotqa", "samsum", "lcc", "multi_news", "qasper_e"):
        write(tmp_path, name, row(0), row(1), row(2))
    write(tmp_path, "trec", *(row(i, all_classes=["number", "number of things"]) for i in range(3)))
    config = tmp_path / "longbench" / "config"
    (config / "dataset2prompt.json").write_text(json.dumps(TEMPLATES))
    limits = {name: facts.max_new_tokens for name, facts in DATASETS.items()}
    (config / "dataset2maxlen.json").write_text(json.dumps(limits | {"qasper": 99}))
    return tmp_path


def write(folder: Path, name: str, *rows: dict) -> None:
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows)
    (folder / "longbench" / "data" / f"{name}.jsonl").write_text(text, encoding="utf-8")


def shape(window: int = 8192) -> ModelShape:
    return ModelShape("tiny", 2, 4, 2, 8, window, (0, 1))


def task(data_dir: Path | None, **changes) -> LongBench:
    values = yaml.safe_load((REPO / "conf" / "task" / "longbench.yaml").read_text())
    assert values.pop("_target_") == "kvbench.tasks.longbench.task.LongBench"
    params = build_params(LongBench, values | changes, "task")
    return LongBench(params, None if data_dir is None else str(data_dir), seed=0)


def samples(data_dir: Path, tokenizer, *names: str, window: int = 8192, **changes):
    made = task(data_dir, datasets=list(names), **changes)
    made.check(shape(window))
    return made, made.samples(tokenizer)


# --- datasets ----------------------------------------------------------------------------------


def test_the_lists_are_those_of_the_papers() -> None:
    assert {name: len(LISTS[name]) for name in ("all21", "en16", "paper14", "zh5", "e13")} == {
        "all21": 21, "en16": 16, "paper14": 14, "zh5": 5, "e13": 13,
    }  # fmt: skip
    assert set(LISTS["all21"]) == set(LISTS["en16"]) | set(LISTS["zh5"])
    assert set(LISTS["en16"]) - set(LISTS["paper14"]) == {"lcc", "repobench-p"}
    assert set(prompts.OWN_PROMPTS) >= set(DATASETS)


def test_upstreams_two_tables_agree_with_ours() -> None:
    found = sources.find(longbench.MAXLEN, None), sources.find(longbench.PROMPTS, None)
    if None in found:
        pytest.skip("longbench/config is no part of the project and not here")
    limits, templates = (json.loads(path.read_text("utf-8")) for path in found if path)
    assert limits == {name: facts.max_new_tokens for name, facts in DATASETS.items()}
    assert set(templates) == set(DATASETS)
    for name, template in templates.items():
        ours = prompts.OWN_PROMPTS[name]
        assert ("{input}" in template) == ("{input}" in ours), name
        assert template.count("{") == 1 + ("{input}" in template), name


def test_datasets_take_turns_and_rows_are_counted_for_each(tokenizer, folder) -> None:
    made, all_of_them = samples(folder, tokenizer, "qasper", "lcc", rows=2)
    ids = [sample.id for sample in all_of_them]
    assert ids == ["qasper-id0", "lcc-id0", "qasper-id1", "lcc-id1"]
    assert (made.dataset, made.data_source) == ("qasper+lcc", "local")
    assert made.notes == ["prompts: official", "code_sim: difflib"]


# --- the prompt --------------------------------------------------------------------------------


def test_fields_are_put_in_once_and_braces_in_them_stay(tokenizer, folder) -> None:
    _, (first, *_) = samples(folder, tokenizer, "qasper")
    assert first.context == "Begin qasper.\n\nText 0 has {braces} and {input}."
    assert first.question == "\n\nNow answer.\n\nQuestion: What is {x} in 0?\nAnswer:"
    assert first.answer_prefix == ""
    assert first.references == ("a", "b")
    assert first.max_new_tokens == 99  # upstream's table counts, not ours
    assert first.fields["question_position"] == "after"
    assert first.fields["was_cut"] is False


@pytest.mark.parametrize(("name", "wrapped"), [("qasper", True), ("samsum", False), ("trec", False), ("lcc", False)])
def test_only_instructions_are_wrapped_and_there_is_one_bos(tokenizer, folder, name, wrapped) -> None:  # fmt: skip
    _, (first, *_) = samples(folder, tokenizer, name)
    for scope in ("full_prompt", "context_only"):
        made = encode(tokenizer, first, chat="auto", system_prompt="", scope=scope)
        ids = [*made.context_ids, *made.question_ids]
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id
        text = tokenizer.decode(ids)
        assert ("<|start|>assistant" in text) == wrapped
        assert first.context + first.question in text


def test_context_only_compresses_the_context_alone(tokenizer, folder) -> None:
    _, (first, *_) = samples(folder, tokenizer, "qasper")
    made = encode(tokenizer, first, chat="auto", system_prompt="", scope="context_only")
    context, question = (tokenizer.decode(ids) for ids in (made.context_ids, made.question_ids))
    assert context.endswith(first.context)
    assert question.startswith(first.question)
    assert question.endswith("<|start|>assistant\n\n")


def test_the_samsum_answer_has_a_token_and_ends_with_the_newline(folder) -> None:
    tokenizer = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)
    _, (samsum, *_) = samples(folder, tokenizer, "samsum")
    _, (qasper, *_) = samples(folder, tokenizer, "qasper")
    config = SimpleNamespace(eos_token_id=None)
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
    stops = [Ending(tokenizer, config).stop_ids(one, True) for one in (samsum, qasper)]
    assert stops[0] - stops[1] == {newline}
    assert (samsum.min_new_tokens, qasper.min_new_tokens) == (1, 0)
    assert not samsum.stop_at_newline  # the stored prediction is what was said


def test_a_stop_token_is_not_said_before_the_least_number_of_tokens() -> None:
    model, ids = tiny(), random_ids(40)

    def say(**options) -> list[int]:
        with model.hooked():
            trace = prefill(model, ids)
            row = built(row_for(Full, Full.Params(), request(ratio="1"), trace, 8))
            return decode(model, trace, [row], max_new_tokens=8, **options).answers[0].ids

    free = say()
    assert say(stop_ids=[free[0]]) == free[:1]
    forced = say(stop_ids=[free[0]], min_new_tokens=1)
    assert forced[0] != free[0]
    assert len(forced) > 1
    with torch.inference_mode():
        expected = model.hf.generate(
            torch.tensor([ids]), max_new_tokens=8, min_new_tokens=1, do_sample=False,
            eos_token_id=free[0],
        )  # fmt: skip
    assert forced == expected[0, len(ids) :].tolist()


def test_a_missing_template_is_replaced_by_our_own_wording_and_named(tokenizer, folder) -> None:
    (folder / "longbench" / "config" / "dataset2prompt.json").unlink()
    made, (first, *_) = samples(folder, tokenizer, "qasper")
    assert "prompts: own" in made.notes
    assert first.fields["prompts"] == "own"
    assert first.context.startswith("A text:\n\nText 0")
    with pytest.raises(ConfigError, match="THUDM/LongBench"):
        task(folder, datasets=["qasper"], prompts="official").check(shape())


# --- truncation --------------------------------------------------------------------------------


def long_row(n_words: int, input: str) -> dict:
    words = [f"w{i}" for i in range(n_words)]
    return row(0, context=" ".join(words), input=input)


@pytest.mark.parametrize("limit", [300, 301])
def test_a_long_prompt_keeps_half_of_its_tokens_from_each_end(tokenizer, folder, limit) -> None:
    write(folder, "qasper", long_row(500, "who?"))
    _, (first,) = samples(folder, tokenizer, "qasper", max_prompt_tokens=limit)
    whole = prompts.fill(TEMPLATES["qasper"], long_row(500, "who?"))
    ids, half = tokenizer.encode(whole), limit // 2
    ends = [tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:])]
    assert first.context + first.question == "".join(ends)
    assert first.question == "\n\nNow answer.\n\nQuestion: who?\nAnswer:"
    assert first.fields["original_prompt_tokens"] == len(ids)
    assert first.fields["was_cut"] is True


def test_a_question_longer_than_half_the_prompt_is_cut_too(tokenizer, folder) -> None:
    long = " ".join(f"q{i}" for i in range(400))
    write(folder, "repobench-p", row(0, context="def f(): pass\n", input=long))
    _, (first,) = samples(folder, tokenizer, "repobench-p", max_prompt_tokens=300)
    assert first.context == "Complete. \ndef f(): pass\n"  # whole: it fits into the first half
    assert first.question.startswith("q0 q1")
    assert first.question.endswith("q399Next line of code:\n")
    write(folder, "repobench-p", row(0, context="word " * 400, input=long))
    _, (first,) = samples(folder, tokenizer, "repobench-p", max_prompt_tokens=300)
    both = first.context + first.question
    assert both.startswith("Complete. \nword word")
    assert set(first.context.split()) <= {"Complete.", "word", "w", "wo", "wor"}
    assert "word" not in first.question


def test_a_prompt_that_fits_is_not_touched(tokenizer, folder) -> None:
    _, (first, *_) = samples(folder, tokenizer, "qasper", max_prompt_tokens=7000)
    assert first.context + first.question == prompts.fill(TEMPLATES["qasper"], row(0))


# --- the question in front ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "context", "question"),
    [
        ("qasper", "Now answer.\n\nQuestion: Q?\n\nBegin qasper.\n\nC", "\n\nAnswer:"),
        ("multi_news", "Sum it up.\n\nNews:\nC", "\n\nSummary:"),
        ("passage_count", "Only the number.\n\nCount.\n\nC", "\n\nThe answer is: "),
        (
            "passage_retrieval_en",
            "An abstract.\n\nQ?\n\nThe form is x.\n\nFind.\n\nC",
            "\n\nThe answer is: ",
        ),
        ("vcsum", "Meeting:\nC", "\n\nSummary:"),  # only a cue: unchanged
    ],
)
def test_the_question_goes_before_the_context(name, context, question) -> None:
    asked = row(0, context="C", input="Q?")
    assert prompts.parts_of(name, TEMPLATES[name], asked, "before") == (context, question)
    assert prompts.parts_of(name, TEMPLATES[name], asked, "after")[0].endswith("C")
    doubled = prompts.parts_of(name, TEMPLATES[name], asked, "both")
    assert doubled[1] == prompts.parts_of(name, TEMPLATES[name], asked, "after")[1]
    assert doubled[0] == context


def test_upstreams_multifieldqa_reads_as_the_protocol_says() -> None:
    path = sources.find(longbench.PROMPTS, None)
    if path is None:
        pytest.skip("longbench/config is no part of the project and not here")
    template = json.loads(path.read_text("utf-8"))["multifieldqa_en"]
    asked = row(0, context="C", input="Q?")
    context, question = prompts.parts_of("multifieldqa_en", template, asked, "before")
    blocks = context.split("\n\n")
    assert len(blocks) == 4
    assert blocks[1] == "Question: Q?"
    assert blocks[3] == "C"
    assert question == "\n\nAnswer:"


def test_datasets_that_continue_a_text_are_left_out_of_it_and_named(tokenizer, folder) -> None:
    made, found = samples(folder, tokenizer, "qasper", "samsum", "lcc", question_position="before")
    assert {sample.fields["dataset"] for sample in found} == {"qasper"}
    assert any("left out" in note and "samsum, lcc" in note for note in made.notes)
    assert "question_position: before" in made.notes
    assert made.dataset.endswith("/question-before")
    with pytest.raises(ConfigError, match="no meaning for samsum"):
        task(folder, datasets=["samsum"], question_position="both").check(shape())


# --- scores ------------------------------------------------------------------------------------

OFFICIAL_NAMES = {
    "qa_f1_score": "qa_f1", "qa_f1_zh_score": "qa_f1_zh", "rouge_score": "rouge", "rouge_zh_score": "rouge_zh",
    "classification_score": "classification", "retrieval_score": "retrieval", "retrieval_zh_score": "retrieval_zh",
    "count_score": "count", "code_sim_score": "code_sim",
}  # fmt: skip


def run_metric_vectors(path: Path) -> list[tuple[str, str | None]]:
    """Each official call of a metric; code similarity with both backends."""
    results = []
    for i, case in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        metric = OFFICIAL_NAMES[case["metric"]]
        for backend, key in (("difflib", "score"), ("levenshtein", "score_levenshtein")):
            if key not in case or case.get("status") == "RecursionError":
                continue  # ours is the true value there
            ours = scores.row_score(
                metric, case["prediction"], [case["ground_truth"]],
                all_classes=case.get("all_classes"), backend=backend,
            )  # fmt: skip
            problem = None if abs(ours - case[key]) <= 1e-9 else f"{ours} instead of {case[key]}"
            results.append((f"[{i}].{case['metric']}.{key}", problem))
    return results


def run_dataset_vectors(path: Path) -> list[tuple[str, str | None]]:
    """Row scores, the dataset's, and LongBench-E's, through what a run uses."""
    results = []
    for case in json.loads(path.read_text(encoding="utf-8")):
        facts = longbench.facts_of(case["dataset"])
        for backend, key in (("difflib", "score"), ("levenshtein", "score_levenshtein")):
            if key not in case:
                continue
            ours = [
                scores.row_score(
                    facts.metric, prediction, answers,
                    all_classes=case["all_classes"], one_line=facts.one_line, backend=backend,
                )
                for prediction, answers in zip(case["predictions"], case["answers"], strict=True)
            ]  # fmt: skip
            found: dict[str, tuple[object, object]] = {key: (scores.percent(ours), case[key])}
            if key == "score":
                far = [abs(a - b) > 1e-9 for a, b in zip(ours, case["per_sample"], strict=True)]
                found["rows that differ"] = (sum(far), 0)
                found["score_e"] = (scores.by_length(ours, case["lengths"]), case["score_e"])
            for name, (a, b) in found.items():
                problem = None if a == b else f"{a} instead of {b}"
                results.append((f"{case['dataset']}.{name}", problem))
    return results


@pytest.mark.parametrize(
    ("name", "run", "least"),
    [
        ("longbench_metrics.json", run_metric_vectors, 300),
        ("longbench_datasets.json", run_dataset_vectors, 60),
    ],
)
def test_scorers_agree_with_the_official_ones(name: str, run, least: int) -> None:
    path = metrics_folder() / name
    if not path.exists():
        pytest.skip(f"{path} is no part of the project and not here")
    results = run(path)
    assert len(results) >= least
    assert [result for result in results if result[1]] == []


@pytest.mark.parametrize(
    ("metric", "prediction", "reference", "expected"),
    [
        ("qa_f1", "The U.S.A., a well-known place", "usa wellknown place", 1.0),
        ("qa_f1", "", "", 0.0),
        ("qa_f1", "an answer answer", "answer", 2 / 3),
        ("rouge", "", "x", 0.0),
        ("rouge", "...", "x", 0.0),
        ("retrieval", "Paragraph 12, not 3", "Paragraph 12", 0.5),
        ("retrieval", "Paragraph 012", "Paragraph 12", 0.0),
        ("retrieval_zh", "段落7", "段落7", 1.0),
        ("count", "7 7 8", "7", 2 / 3),
        ("count", "none", "7", 0.0),
        ("code_sim", "\n\n# no\n    x = 1\n", "    x = 1", 1.0),
        ("code_sim", "`a`", "", 1.0),
        ("code_sim", "# a", "x", 0.0),
        ("code_sim", "x = 1", "    x = 1", 0.71),
    ],
)
def test_scores_of_single_answers(metric, prediction, reference, expected) -> None:
    assert scores.row_score(metric, prediction, [reference]) == pytest.approx(expected, abs=1e-12)


def test_a_label_behind_a_removed_one_is_not_looked_at() -> None:
    labels = ["food", "foo", "fo", "number"]
    # "foo" and "fo" are both part of the right label; removing "foo" hides "fo"
    assert scores.classification("food foo fo", "food", labels) == 1 / 2
    assert scores.classification("number food", "food", ["food", "number"]) == 1 / 2
    assert scores.classification("number", "food", labels) == 0


def test_only_the_first_line_counts_where_upstream_says_so() -> None:
    assert scores.first_line("\n\n a\nb") == " a"
    assert scores.first_line(" \nb") == " "
    assert scores.row_score("qa_f1", "\nyes\nno", ["yes"], one_line=True) == 1
    assert scores.row_score("qa_f1", "\nyes\nno", ["yes"]) < 1


def test_words_without_a_full_stop_do_not_break_the_recursion_limit() -> None:
    """The official script gives 0 here; ours is the package's own value without the limit."""
    rng = random.Random(0)
    a, b = (" ".join(rng.choices("abcdefghij", k=700)) for _ in range(2))
    limit = sys.getrecursionlimit()
    assert scores.rouge(a, b) == pytest.approx(1.0, abs=1e-6)
    assert sys.getrecursionlimit() == limit
    assert scores.official_gives_up("rouge", a, [b])
    assert not scores.official_gives_up("rouge", "a short one.", [b.replace("a", "a.")])
    assert not scores.official_gives_up("qa_f1", a, [b])


def test_chinese_without_jieba_is_an_error_and_no_fallback(monkeypatch) -> None:
    scores.segmenter.cache_clear()
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ConfigError, match="pip install jieba"):
        scores.rouge_zh("a", "b")


def test_no_index_of_words_is_read_from_a_folder_or_left_there(monkeypatch, tmp_path: Path) -> None:
    """jieba's own cache is a marshalled file at a place that can be foretold."""
    forged = marshal.dumps(({"我": 0, "我们": 0, "我们在": 10**6}, 10**6))
    for folder in (tmp_path / "temporary", tmp_path / "cache" / "kvbench" / "jieba"):
        folder.mkdir(parents=True)
        (folder / "jieba.cache").write_bytes(forged)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scores.segmenter.cache_clear()
    assert scores.words_zh("我们在北京大学学习") == ["我们", "在", "北京大学", "学习"]
    assert [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()] == [forged, forged]


def test_a_finished_run_says_datasets_buckets_and_both_averages(tokenizer, folder) -> None:
    made, _ = samples(folder, tokenizer, "qasper_e")
    fields = {"all_classes": None, "prediction": "x", "references": ["x"]}
    rows = [
        {"dataset": "qasper_e", "length": 100, "score": 1.0},
        {"dataset": "qasper_e", "length": 3999, "score": 0.0},
        {"dataset": "qasper_e", "length": 8000, "score": 1 / 3},
        {"dataset": "hotpotqa", "length": 9, "score": 0.5},
        {"dataset": "hotpotqa", "length": 9, "score": None},  # ran out of memory
        {"dataset": "musique", "length": 9, "score": 0.0},
    ]
    made.artifacts(folder, [one | fields for one in rows], "full")
    lines = (folder / "datasets.csv").read_text().splitlines()
    table = {line["dataset"]: line for line in csv.DictReader(lines)}
    assert table["qasper_e"]["score_percent"] == "44.44"
    assert [table["qasper_e"][name] for name in scores.LENGTHS] == ["50.0", "", "33.33"]
    assert (table["hotpotqa"]["rows"], table["hotpotqa"]["0-4k"]) == ("1", "")
    said = json.loads((folder / "longbench.json").read_text())
    assert said["mean_of_datasets"] == round((44.44 + 50 + 0) / 3, 2)
    assert said["categories"] == {"single-doc QA": 44.44, "multi-doc QA": 25.0}
    assert said["mean_of_categories"] == 34.72


def test_near_a_tie_the_buckets_round_as_numpy_does_and_the_whole_as_python_does() -> None:
    found = [0.1, 0.8, 0.07, 0.0, 0.74, 0.16, 0.29, 0.71]  # their mean is 35.875 %
    assert scores.by_length(found, [0] * 8)["0-4k"] == 35.88
    assert scores.percent(found) == 35.87


def test_the_run_scores_what_the_row_says(tokenizer, folder) -> None:
    made, (first, *_) = samples(folder, tokenizer, "trec")
    number = replace(first, references=("number",))
    assert made.score(number, "\nnumber\nnumber of things") == 1
    made, (first, *_) = samples(folder, tokenizer, "lcc", strip=True)
    assert made.score(replace(first, references=("x = 1",)), "   x = 1\n") == 1
    made, (first, *_) = samples(folder, tokenizer, "lcc")
    assert made.score(replace(first, references=("x = 1",)), "   x = 1\n") < 1


def test_more_questions_than_a_context_has_are_refused_or_said(folder) -> None:
    with pytest.raises(ConfigError, match=r"task\.questions=10000 is more than any context of docs_qa .* give \d+ or"):
        task(None, source="embedded", datasets=["docs_qa"], questions=10_000).check(shape())
    some = task(None, source="embedded", datasets=["docs_qa"], questions=34)
    some.check(shape())
    assert any(note.startswith("questions: ") and "contexts have fewer than 34" in note for note in some.notes)
    few = task(None, source="embedded", datasets=["docs_qa"], questions=4)
    few.check(shape())
    assert not any(note.startswith("questions: ") for note in few.notes)


# --- sources -----------------------------------------------------------------------------------


def test_the_embedded_set_is_asked_by_its_source(tmp_path, monkeypatch, tokenizer) -> None:
    monkeypatch.setattr(sources, "find", lambda relative, data_dir: None)
    made = task(None, source="embedded")
    made.check(shape())
    assert (made.data_source, made.dataset) == ("embedded", "embedded")
    assert any(note.startswith("embedded set ") for note in made.notes)
    assert len(made.samples(tokenizer)) == 7 * longbench.EMBEDDED_ROWS
    with pytest.raises(ConfigError, match=r"qasper\.jsonl is missing .*kvbench fetch longbench"):
        task(tmp_path, datasets=["qasper"]).check(shape())


def test_a_folder_that_was_named_must_hold_the_data(folder) -> None:
    with pytest.raises(ConfigError, match=r"narrativeqa\.jsonl is missing"):
        task(folder).check(shape())


def test_the_hub_is_asked_where_the_source_says_so(folder, monkeypatch, tokenizer) -> None:
    asked = []

    def fetch(name: str, root: Path, *, only: Sequence[str]) -> list[Path]:
        asked.append((name, root, *only))
        return list(folder.rglob("*.jsonl"))

    monkeypatch.setattr(download, "fetch", fetch)
    made = task(folder, source="hub", datasets=["qasper"])
    made.check(shape())
    assert asked == [("longbench", folder)]  # all of its files: the configuration is wanted too
    assert (made.data_source, made.whose) == ("hub", "official")


def test_named_datasets_are_taken_from_a_folder_and_then_from_the_hub(folder, tmp_path, monkeypatch, tokenizer) -> None:
    asked = []
    roots = [tmp_path / "empty"]
    monkeypatch.setattr(sources, "data_roots", lambda data_dir: roots)

    def arrive(name: str, root: Path, *, only: Sequence[str]) -> list[Path]:
        asked.append((name, root, *only))
        roots.append(folder)
        return list(folder.rglob("*.jsonl"))

    monkeypatch.setattr(download, "fetch", arrive)
    for _ in range(2):  # the second time all is there
        made = task(None, datasets=["qasper", "lcc"])
        made.check(shape())
        assert (made.data_source, made.whose) == ("local", "official")
        assert asked == [("longbench", download.cache_root())]


def test_other_rows_or_prompts_are_another_run(folder) -> None:
    def digest(**changes) -> str | None:
        made = task(folder, **{"datasets": ["qasper"], **changes})
        made.check(shape())
        return made.data_digest

    first = digest()
    assert first is not None and first == digest()
    write(folder, "qasper", row(0), row(1, answers=["c"]), row(2))  # no prompt says so
    second, own = digest(), digest(prompts="own")
    (folder / "longbench" / "config" / "dataset2prompt.json").unlink()
    assert len({first, second, own}) == 3 and digest() == own
    made = task(None, source="embedded")
    made.check(shape())
    assert made.data_digest is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "web"}, r"task\.source"),
        ({"datasets": "en15"}, "did you mean 'en16'"),
        ({"datasets": ["qaspr"]}, "did you mean 'qasper"),
        ({"datasets": ["qasper", "qasper"]}, "has something twice"),
        ({"datasets": []}, "is empty"),
        ({"datasets": ["qasper", "docs_qa"]}, "mixes embedded"),
        ({"datasets": ["qasper"], "source": "embedded"}, "source=embedded has docs_qa"),
        ({"datasets": ["docs_qa"], "source": "local"}, "docs_qa is an embedded dataset"),
        ({"prompts": "mine"}, r"task\.prompts"),
        ({"question_position": "front"}, r"task\.question_position"),
        ({"code_sim": "fuzzy"}, r"task\.code_sim"),
        ({"on_bad_row": "drop"}, r"task\.on_bad_row"),
        ({"rows": 0}, r"task\.rows=0"),
        ({"extra_new_tokens": -1}, r"task\.extra_new_tokens=-1"),
        ({"max_prompt_tokens": 8100, "datasets": ["qasper"]}, r"not task\.max_prompt_tokens=8100"),
        ({"max_new_tokens": 8192, "datasets": ["qasper"]}, "qasper answers with up to 8192"),
    ],
)
def test_wrong_values_are_refused_by_key(folder: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(folder, **changes).check(shape())


@pytest.mark.parametrize("text", ["{", '{"qasper": "no place"}', '{"qasper": 3}', "[]"])
def test_a_template_file_that_is_no_good_is_refused(folder: Path, text: str) -> None:
    (folder / "longbench" / "config" / "dataset2prompt.json").write_text(text)
    with pytest.raises(ConfigError, match=r"dataset2prompt\.json"):
        task(folder, datasets=["qasper"]).check(shape())


def test_every_dataset_of_e_is_scored_as_its_namesake() -> None:
    assert all(longbench.facts_of(name) is DATASETS[name.removesuffix("_e")] for name in E13)
