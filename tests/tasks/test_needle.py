"""Needle in a haystack: insertion, independence of cells, refusals, scores and the heat map."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks import sources
from kvbench.tasks.needle import haystack, heatmap
from kvbench.tasks.needle import task as needle
from kvbench.tasks.needle.task import Needle
from kvbench.tasks.prompt import encode
from kvbench.tests import golden_metrics
from kvbench.tests.tiny_tokenizer import tiny_tokenizer

REPO = Path(__file__).resolve().parents[2]
SHAPE = ModelShape("tiny", 2, 4, 2, 8, 8192, (0, 1))
STRINGS = {  # the keys of needle/strings.json with words of our own
    "kamradt": {
        "needle": "\nThe nicest walk in Rome follows the river.\n",
        "question": "Which walk is the nicest?",
        "system": "Answer from the text.",
        "question_suffix": " Be short.",
    },
    "data_engineering": {
        "needle": "\nThe nicest walk in Rome follows the river.\n",
        "question": "The nicest walk in Rome: ",
        "prompt": "A book: <b> {context} </b>.\n Say {question}\nAnswer:",
        "expected_answer": "follows the river.",
    },
    "magic_number": {
        "needle": "\nThe number of {city}: {rnd_number}\n",
        "question": "What is the number of {city}?",
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(None, adds_bos=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with our own strings and two essays, written in the wrong order."""
    essays = tmp_path / "needle" / "PaulGrahamEssays"
    essays.mkdir(parents=True)
    (essays / "b.txt").write_text("Second essay. It has braces {context} {question}. " * 20)
    (essays / "a.txt").write_text("First essay. It is short. " * 20)
    (tmp_path / "needle" / "strings.json").write_text(json.dumps(STRINGS))
    return tmp_path


def task(data_dir: Path | None = None, seed: int = 0, **changes) -> Needle:
    """The shipped configuration with changes, on the embedded haystack unless one says otherwise."""
    values = yaml.safe_load((REPO / "conf" / "task" / "needle.yaml").read_text())
    assert values.pop("_target_") == "kvbench.tasks.needle.task.Needle"
    changes = {"source": "embedded", "lengths": [600], "depths": [50], **changes}
    params = build_params(Needle, {**values, **changes}, "task")
    return Needle(params, None if data_dir is None else str(data_dir), seed)


def only(samples):
    assert len(samples) == 1
    return samples[0]


# --- where a needle goes -----------------------------------------------------------------------


def test_both_ids_of_a_full_stop_are_found(tokenizer) -> None:
    texts = {tokenizer.decode([i]) for i in haystack.full_stop_ids(tokenizer)}
    assert texts == {".", " ."}


@pytest.mark.parametrize("stop", [7, 8])
def test_a_needle_moves_left_to_either_full_stop(stop: int) -> None:
    ids = [1, 2, stop, 3, 4, 5, 6, 1, 2, 3]
    assert haystack.insertion_index(ids, 50, frozenset({7, 8})) == 3
    assert haystack.insertion_index(ids, 50, None) == 5


def test_a_needle_without_a_full_stop_before_it_moves_to_the_start() -> None:
    assert haystack.insertion_index([1, 2, 3, 4], 75, frozenset({9})) == 0


def test_depth_0_is_the_very_start_and_depth_100_the_very_end() -> None:
    ids, stops = [1, 9, 2, 9, 3], frozenset({9})
    assert haystack.hide(ids, [[5, 5]], 0, stops) == ([5, 5, *ids], [0])
    assert haystack.hide(ids, [[5, 5]], 100, stops) == ([*ids, 5, 5], [5])


def test_several_needles_follow_in_even_steps_and_report_where_they_really_are() -> None:
    ids = [*([1] * 9), 9] * 10  # a full stop every ten ids
    needles = [[21, 21], [22, 22, 22], [23]]
    hidden, starts = haystack.hide(ids, needles, 10, frozenset({9}))
    for needle_ids, start in zip(needles, starts, strict=True):
        assert hidden[start : start + len(needle_ids)] == needle_ids
    assert starts == [10, 32, 65]  # 10, 40 and 70 percent, each moved left to a full stop
    assert len(hidden) == 106


def test_needles_at_one_place_stay_whole() -> None:
    needles = [[21, 22], [31, 32], [41, 42]]
    for depth in (0, 50, 90, 95, 100):
        for stops in (None, frozenset({9})):
            hidden, starts = haystack.hide([1, 9, 2, 9], needles, depth, stops)
            assert [hidden[start : start + 2] for start in starts] == needles


@pytest.mark.parametrize("depth", [0, 30, 100])
def test_the_recorded_index_is_where_the_needle_starts(tokenizer, depth: int) -> None:
    made = task(depths=[depth])
    sample = only(made.samples(tokenizer))
    head = made.ask(600, depth, 0).head
    start, (n,) = sample.fields["needle_index"], sample.fields["needle_tokens"]
    ids = tokenizer.encode(sample.context.removeprefix(head))
    assert sample.references[0] in tokenizer.decode(ids[start : start + n])
    assert sample.context.removeprefix(head).startswith("\nThe phone") == (depth == 0)
    assert sample.context.endswith(f"{sample.references[0]}.\n") == (depth == 100)
    assert all(needle.strip() in sample.context for needle in sample.evidence) and len(sample.evidence) == 1


def test_a_needle_stands_behind_a_full_stop_unless_told_otherwise(tokenizer) -> None:
    snapped = only(task(depths=[47]).samples(tokenizer))
    raw = only(task(depths=[47], snap="none").samples(tokenizer))
    assert ".\nThe phone number" in snapped.context
    assert ".\nThe phone number" not in raw.context


def test_context_and_needle_leave_the_buffer_free(tokenizer) -> None:
    head = task().ask(600, 50, 0).head
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 400),
        ({"buffer": 100}, 500),
        ({"snap": "none"}, 450),
    ]
    for changes, n in cases:
        sample = only(task(**changes).samples(tokenizer))
        assert len(tokenizer.encode(sample.context.removeprefix(head))) == n


# --- grids -------------------------------------------------------------------------------------


def test_a_cell_does_not_depend_on_the_others_in_the_grid(tokenizer) -> None:
    alone = only(task(lengths=[700], depths=[25]).samples(tokenizer))
    grid = task(lengths=[600, 700, 900], depths=[0, 25, 50]).samples(tokenizer)
    among = next(s for s in grid if s.id == alone.id)
    assert (among.context, among.references) == (alone.context, alone.references)


def test_values_differ_between_cells_and_seeds_and_repeat_with_the_seed(tokenizer) -> None:
    def values(seed: int) -> list[str]:
        grid = task(seed=seed, depths=[0, 50], seeds=3)
        return [sample.references[0] for sample in grid.samples(tokenizer)]

    assert len(set(values(0) + values(1))) == 12
    assert values(0) == values(0)


def test_the_papers_grids_have_sixteen_lengths_and_ten_depths() -> None:
    for name, longest in (("8k", 8_000), ("32k", 32_000), ("128k", 128_000)):
        grid = task(grid=name, lengths=None, depths=None).params.cells()
        assert (len(grid.lengths), grid.lengths[-1], len(grid.depths), grid.seeds) == (
            16,
            longest,
            10,
            3,
        )


def test_the_windows_grid_goes_as_far_as_the_model_reads(tokenizer) -> None:
    made = task(grid="window", lengths=None, depths=None)
    made.check(SHAPE)
    assert made.grid.lengths == tuple(range(512, 8193, 512))
    longest = made.samples(tokenizer)[-1]
    prompt = encode(tokenizer, longest, chat="none", system_prompt="", scope="full_prompt")
    assert 8000 < len(prompt) + longest.max_new_tokens <= 8192
    # Lengths without room for the needle are left out; a window without room for any is refused.
    made.check(replace(SHAPE, window=2048))
    assert made.grid.lengths == tuple(range(384, 2049, 128))
    with pytest.raises(ConfigError, match=r"task\.grid=window asks for 300 tokens"):
        made.check(replace(SHAPE, window=256))


def test_depths_may_be_a_number_spread_evenly_or_towards_the_ends() -> None:
    assert task(depths=5).params.cells().depths == (0, 25, 50, 75, 100)
    sigmoid = task(depths=5, depth_spacing="sigmoid").params.cells().depths
    assert sigmoid == (0, 7.586, 50, 92.414, 100)


def test_a_short_corpus_is_repeated(tokenizer, folder: Path) -> None:
    sample = only(task(folder, source="local", lengths=[3000]).samples(tokenizer))
    assert sample.context.count("First essay. ") > 20


# --- sources and styles ------------------------------------------------------------------------


def test_essays_are_read_in_sorted_order_and_used_when_they_are_there(tokenizer, folder) -> None:
    found = task(folder, source="auto")
    assert (found.data_source, found.dataset) == ("local", "own/essays-2")
    context = only(found.samples(tokenizer)).context
    assert context.index("First essay.") < context.index("Second essay.")


def test_without_essays_the_embedded_haystack_is_used_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "data_roots", lambda data_dir: [tmp_path])
    made = Needle(task(tmp_path, source="auto").params, None, seed=0)
    assert made.data_source == "embedded"
    assert re.fullmatch(r"own/pydoc-3\.\d+", made.dataset)
    made.check(SHAPE)


def test_a_named_folder_without_essays_is_refused_rather_than_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gkamradt/LLMTest_NeedleInAHaystack"):
        task(tmp_path, source="auto").check(SHAPE)


def test_asking_for_essays_that_are_missing_names_their_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gkamradt/LLMTest_NeedleInAHaystack"):
        task(tmp_path, source="local").check(SHAPE)


@pytest.mark.parametrize("style", ["data_engineering", "kamradt", "instruct", "magic_number"])
def test_a_style_without_its_strings_is_refused(tmp_path: Path, style: str) -> None:
    with pytest.raises(ConfigError, match=r"needle/strings\.json is missing"):
        task(tmp_path, style=style).check(SHAPE)


def test_other_essays_or_strings_are_another_run(folder: Path) -> None:
    def digest(**changes) -> str | None:
        made = task(folder, **{"source": "local", **changes})
        made.check(SHAPE)
        return made.data_digest

    first, with_strings = digest(), digest(style="magic_number")
    assert None not in (first, with_strings) and digest(source="embedded") is None
    (folder / "needle" / "PaulGrahamEssays" / "a.txt").write_text("Another essay. " * 20)
    assert len({first, with_strings, digest()}) == 3


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("strings.json", b"{", r"strings\.json is no JSON"),
        ("strings.json", b"[]", r"strings\.json holds no JSON object"),
        ("PaulGrahamEssays/a.txt", b"A line.\ncaf\xe9", r"a\.txt, line 2: byte 11"),
        ("PaulGrahamEssays/b.txt", b"", r"b\.txt: the file is empty"),
    ],
)
def test_damaged_words_are_named_before_anything_is_asked(
    folder: Path, file: str, content: bytes, message: str
) -> None:
    (folder / "needle" / file).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        task(folder, source="local", style="magic_number").check(SHAPE)


def test_the_completion_prompt_is_the_template_filled_once(tokenizer, folder: Path) -> None:
    made = task(folder, source="local", style="data_engineering", lengths=[800])
    sample = only(made.samples(tokenizer))
    assert sample.context.startswith("A book: <b> First essay.")
    assert "{context} {question}" in sample.context  # an essay's own braces
    assert sample.question == " </b>.\n Say The nicest walk in Rome: \nAnswer:"
    assert sample.references == ("follows the river.",)
    assert (sample.use_chat, sample.stop_at_newline, sample.max_new_tokens) == (False, True, 30)


def test_instruct_is_the_same_text_as_a_users_turn(tokenizer, folder: Path) -> None:
    raw = only(task(folder, style="data_engineering").samples(tokenizer))
    turn = only(task(folder, style="instruct").samples(tokenizer))
    assert (turn.context, turn.question) == (raw.context, raw.question)
    assert (turn.use_chat, turn.stop_at_newline, turn.max_new_tokens) == (True, False, 128)


def test_kamradts_context_and_question_are_one_turn_after_its_system_turn(tokenizer, folder) -> None:
    sample = only(task(folder, style="kamradt").samples(tokenizer))
    assert sample.system_prompt == "Answer from the text."
    assert sample.question == "\n\nWhich walk is the nicest? Be short."
    assert (sample.use_chat, sample.max_new_tokens) == (True, 300)


def test_a_magic_number_is_hidden_and_asked_for_by_its_city(tokenizer, folder: Path) -> None:
    sample = only(task(folder, style="magic_number").samples(tokenizer))
    found = re.search(r"The number of (\w+): (\d{7})\n", sample.context)
    assert found
    city, value = found.groups()
    assert sample.references == (value,)
    assert sample.question == f"\n\nWhat is the number of {city}?"


@pytest.mark.parametrize("style", ["own", "own_name", "magic_number"])
def test_several_needles_are_all_hidden_asked_for_and_counted(tokenizer, folder: Path, style: str) -> None:
    made = task(folder, style=style, needles=3, depths=[10])
    sample = only(made.samples(tokenizer))
    assert len(set(sample.references)) == len(sample.fields["needle_index"]) == 3
    for value in sample.references:
        found = re.search(rf"(\w+)(?: office is|:) {value}", sample.context)
        assert found
        assert found.group(1) in sample.question
    assert sample.max_new_tokens == 3 * made.params.kind.max_new_tokens
    assert made.score(sample, " and ".join(sample.references)) == 1
    assert made.score(sample, sample.references[1]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("style", ["own", "own_name"])
def test_the_answer_is_only_in_the_context(tokenizer, style: str) -> None:
    sample = only(task(style=style).samples(tokenizer))
    assert sample.context.count(sample.references[0]) == 1
    assert sample.references[0] not in sample.question + sample.answer_prefix


def test_a_name_is_drawn_per_cell_and_asked_for_as_one(tokenizer) -> None:
    samples = task(style="own_name", lengths=[1000], depths=[0, 50, 100]).samples(tokenizer)
    names = [sample.references[0] for sample in samples]
    assert len(set(names)) == 3
    for sample, name in zip(samples, names, strict=True):
        found = re.search(rf"The director of the (\w+) office is {name}\.\n", sample.context)
        assert found
        assert sample.question == f"\n\nQuestion: Who is the director of the {found[1]} office?\n"
        assert sample.answer_prefix == f"Answer: The director of the {found[1]} office is"


def test_prompts_fit_into_the_length_that_was_asked_for(tokenizer, folder: Path) -> None:
    for style in needle.STYLES:
        sample = only(task(folder, style=style, lengths=[1000]).samples(tokenizer))
        prompt = encode(tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt")
        assert len(prompt) <= 1000


# --- refusals ----------------------------------------------------------------------------------


def test_a_length_beyond_the_window_names_the_longest_that_fits() -> None:
    task(lengths=[8192]).check(SHAPE)
    with pytest.raises(ConfigError, match=r"task\.lengths=.*the longest that fits is 8192"):
        task(lengths=[8193]).check(SHAPE)
    with pytest.raises(ConfigError, match=r"task\.grid=32k"):
        task(grid="32k", lengths=None).check(SHAPE)


def test_a_long_answer_takes_its_room_from_the_context() -> None:
    with pytest.raises(ConfigError, match="the longest that fits is 7742"):
        task(lengths=[8192], max_new_tokens=500).check(SHAPE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"style": "ownn"}, "did you mean 'own'"),
        ({"grid": "64k"}, r"task\.grid"),
        ({"scorer": "rouge"}, r"task\.scorer"),
        ({"seeds": 0}, r"task\.seeds=0"),
        ({"needles": 99}, r"task\.needles=99"),
        ({"buffer": -1}, r"task\.buffer=-1"),
        ({"lengths": [250, 9000]}, "give lengths of 300 or more"),
        ({"lengths": []}, r"task\.lengths=\[\] is empty; give one or more"),
        ({"depths": [50, 101]}, r"task\.depths"),
        ({"depths": 0}, r"task\.depths"),
        ({"depths": [50, 50]}, r"task\.depths=\[50\.0,50\.0\] has something twice"),
        ({"style": "kamradt", "seeds": 3}, r"task\.seeds=3 needs a needle with a random value"),
        ({"style": "instruct", "needles": 2}, r"task\.needles=2 needs a needle with a random"),
    ],
)
def test_wrong_values_are_refused_by_key(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(**changes)


# --- scores ------------------------------------------------------------------------------------


def test_scorers_agree_with_the_official_ones() -> None:
    path = golden_metrics.metrics_folder() / "needle_ruler.json"
    if not path.exists():
        pytest.skip(f"no check vectors at {path}; set KVBENCH_GOLDEN")
    cases = golden_metrics.run_needle(path)
    assert len(cases) >= 4
    assert [case for case in cases if case[1] is not None] == []


def test_a_scorer_reads_words_as_its_definition_says() -> None:
    answer = "Eat a sandwich on a sunny day."
    assert needle.keyword_recall("a sunny day", answer) == 2 / 6  # "day." keeps its full stop
    assert needle.exact("Best: EAT A SANDWICH ON A SUNNY DAY", answer) == 1
    assert needle.exact("eat a salad on a sunny day", answer) == 0
    assert needle.rouge1_f("", answer) == needle.rouge1_recall("", answer) == 0


def test_each_scorer_gets_the_reference_it_compares_with(tokenizer, folder: Path) -> None:
    for scorer, expected in (("rouge1_f", "needle"), ("keyword_recall", "expected_answer")):
        made = task(folder, style="data_engineering", scorer=scorer)
        sample = only(made.samples(tokenizer))
        assert sample.references == (STRINGS["data_engineering"][expected],)
        assert made.score(sample, f" {sample.references[0]} ") == 1


def test_a_wrong_number_scores_nothing(tokenizer) -> None:
    made = task()
    sample = only(made.samples(tokenizer))
    assert made.score(sample, f" {sample.references[0]}.") == 1
    assert made.score(sample, f" {int(sample.references[0]) - 1}.") == 0
    assert made.score(sample, "") == 0


# --- the heat map ------------------------------------------------------------------------------

ROWS = [
    {"length": 2000, "depth": 0.0, "score": 1.0},
    {"length": 1000, "depth": 50.0, "score": 0.0},
    {"length": 1000, "depth": 50.0, "score": 1.0},
    {"length": 1000, "depth": 0.0, "score": 0.25},
    {"length": 2000, "depth": 50.0, "score": None},  # ran out of memory
]
ROWS = [row | {"prompt_tokens": 7 * row["length"] // 8} for row in ROWS]


def test_the_pivot_table_has_depths_downwards_and_means_of_seeds() -> None:
    table = heatmap.pivot(ROWS)
    assert (table.lengths, table.depths) == ([1000, 2000], [0.0, 50.0])
    assert table.scores[0] == [0.25, 1.0]
    assert table.scores[1][0] == 0.5
    assert table.scores[1][1] != table.scores[1][1]  # never asked


def test_a_finished_run_gets_its_heat_map(tmp_path: Path) -> None:
    task().artifacts(tmp_path, ROWS, "full attention")
    with (tmp_path / "heatmap.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["depth_percent", "1000", "2000"],
            ["0.0", "0.25", "1.0"],
            ["50.0", "0.5", ""],
        ]
    assert (tmp_path / "heatmap.png").read_bytes().startswith(b"\x89PNG")
