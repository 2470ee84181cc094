"""RULER: the thirteen recipes, prompts, files of both releases, bad rows, and the official scores."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks import sources
from kvbench.tasks.prompt import encode
from kvbench.tasks.ruler import synthetic as ruler_synthetic
from kvbench.tasks.ruler import task as ruler
from kvbench.tasks.ruler.synthetic import DOTS, KINDS, OWN_TEMPLATES, Material, Row
from kvbench.tasks.ruler.task import DATASETS, Ruler
from kvbench.tests.golden_metrics import metrics_folder, run_ruler
from kvbench.tests.tiny_tokenizer import LLAMA_TEMPLATE, tiny_tokenizer

REPO = Path(__file__).resolve().parents[2]
ESSAYS = tuple("Rain falls on the town. Nobody minds it! Who would? ".split())


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(LLAMA_TEMPLATE, adds_bos=True)


def shape(window: int = 8192) -> ModelShape:
    return ModelShape("tiny", 2, 4, 2, 8, window, (0, 1))


def task(data_dir: Path, seed: int = 0, **changes) -> Ruler:
    values = yaml.safe_load((REPO / "conf" / "task" / "ruler.yaml").read_text())
    assert values.pop("_target_") == "kvbench.tasks.ruler.task.Ruler"
    return Ruler(build_params(Ruler, values | changes, "task"), str(data_dir), seed)


def samples(tokenizer, data_dir: Path, seed: int = 0, **changes):
    made = task(data_dir, seed, **changes)
    made.check(shape())
    return made, made.samples(tokenizer)


def row(name: str, units: int, seed: int = 0, length: int = 4096) -> Row:
    material = Material(OWN_TEMPLATES, ESSAYS, length)
    return KINDS[name].make(material, random.Random(f"{name} {seed}"), units)


# --- recipes -----------------------------------------------------------------------------------

NEEDLE = re.compile(r"One of the secret (\w+) of (\S+) is: (\S+)\.")
WORDS, NUMBERS = re.compile(r"[a-z]+-[a-z]+"), re.compile(r"\d{7}")
UUIDS = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@pytest.mark.parametrize(
    ("name", "key", "value", "n_needles", "n_asked"),
    [
        ("niah_single_1", WORDS, NUMBERS, 1, 1),
        ("niah_single_2", WORDS, NUMBERS, 1, 1),
        ("niah_single_3", WORDS, UUIDS, 1, 1),
        ("niah_multikey_1", WORDS, NUMBERS, 4, 1),
        ("niah_multikey_2", WORDS, NUMBERS, 201, 1),
        ("niah_multikey_3", UUIDS, UUIDS, 201, 1),
        ("niah_multivalue", WORDS, NUMBERS, 4, 4),
        ("niah_multiquery", WORDS, NUMBERS, 4, 4),
    ],
)
def test_needles_are_as_the_table_says(name, key, value, n_needles: int, n_asked: int) -> None:
    depths = set()
    for seed in range(8):
        made = row(name, 200, seed)
        needles = [match.groups() for match in NEEDLE.finditer(made.context)]
        assert len(needles) == n_needles and len(made.outputs) == n_asked
        assert all(key.fullmatch(one) and value.fullmatch(other) for _, one, other in needles)
        asked = re.findall(key.pattern.replace("(", "(?:"), made.question.partition(" of ")[2])
        asked = [one for one in asked if one in {needle[1] for needle in needles}]
        assert len(asked) == (4 if name == "niah_multiquery" else 1)
        expected = [other for one in asked for _, found, other in needles if found == one]
        assert sorted(expected) == sorted(made.outputs)
        assert len({other for _, _, other in needles}) == n_needles
        is_one = n_asked == 1
        assert ("What is the secret" in made.question) is is_one
        assert made.answer_prefix.endswith(" is" if is_one else " are")
        depths.add(made.context.index(made.outputs[0]))
    assert len(depths) > 4


def test_noise_and_distractors_are_lines_and_essays_are_cut_between_sentences() -> None:
    lines = row("niah_single_1", 50).context.splitlines()[1:]
    assert len(lines) == 51 and lines.count(OWN_TEMPLATES["noise"]) == 50
    lines = row("niah_multikey_3", 50).context.splitlines()[1:]
    assert len(lines) == 51 and all(NEEDLE.fullmatch(line) for line in lines)
    essay = row("niah_multikey_1", 300).context.partition("\n")[2]
    left = NEEDLE.sub("", essay).split()
    assert left == list(ESSAYS * 30)[:300]  # over and over
    before = re.findall(r"(\S+) One of", essay)
    assert all(word[-1] in ".!?" for word in before)


def test_keys_stay_distinct_beyond_the_pairs_there_are() -> None:
    n = ruler_synthetic.PAIRS
    few = ruler_synthetic.words(random.Random(0), 100)
    many = ruler_synthetic.words(random.Random(0), n)
    assert len(set(few)) == 100 and all(one.count("-") == 1 for one in few)
    assert len(set(many)) == n and all(one.count("-") == 2 for one in many)


def test_a_chain_hands_one_value_through_five_variables_in_order() -> None:
    made = row("vt", 60)
    example, test = made.context.split("\n\nFollow")
    (value,) = re.findall(r"value (\d{5}) in", made.question)
    steps = re.findall(r"VAR (\w+) = (\w+ ?\w*)", test)
    names = [name for name, _ in steps]
    assert steps[0][1] == value and [source for _, source in steps[1:]] == [f"VAR {name}" for name in names[:-1]]
    assert tuple(names) == made.outputs and all(re.fullmatch("[A-Z]{5}", one) for one in names)
    assert test.count(OWN_TEMPLATES["noise"]) == 60
    assert "5 variables" in made.answer_prefix
    # The worked example has its own chain, and ends in its answer.
    shown = re.findall(r"VAR ([A-Z]{3}) =", example)
    assert len(set(shown)) == 5 and example.endswith(": " + " ".join(shown))


@pytest.mark.parametrize(("length", "repeats", "shown"), [(4096, (30, 3), (40, 10, 3)), (4095, (6, 1), (20, 3, 1))])
def test_ten_words_of_a_list_come_up_most_often(length, repeats, shown) -> None:
    made = row("cwe", 60, length=length)
    example, test = made.context.split("\n\nSome words")

    def counts(text: str) -> Counter[str]:
        entries = re.findall(r"(\d+)\. ([a-z]+)", text.partition("\n")[2].partition("\n")[0])
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        return Counter(word for _, word in entries)

    found = counts(test)
    assert found == {word: repeats[0] if word in made.outputs else repeats[1] for word in found} and len(found) == 60
    assert len(made.outputs) == len(set(made.outputs)) == 10 and set(made.outputs) <= set(found)
    before = counts(example)
    assert len(before) == shown[0] and sorted(before.values())[-10:] == [shown[1]] * 10
    assert sorted(before.values())[0] == shown[2]
    common = {word for word, count in before.items() if count == shown[1]}
    answer = example.rpartition("most often are:")[2]
    assert set(re.findall("[a-z]+", answer)) == common
    assert not set(before) & set(found)


def test_long_lists_have_words_enough() -> None:
    made = row("cwe", 9000, length=131_072)
    entries = re.findall(r"\d+\. ([a-z]+)", made.context.rpartition("often than")[2])
    assert len(set(entries)) == 9000 and len(entries) == 10 * 30 + 8990 * 3


@pytest.mark.parametrize("n_words", [73, 81, 83, 1400, 40_000])
def test_coded_words_follow_zipfs_law_with_the_dots_first(n_words: int) -> None:
    made = row("fwe", n_words)
    counts = Counter(re.findall(r"[a-z]{6}\b|\.{6}", made.context.partition(". ")[2]))
    ranked = [word for word, _ in counts.most_common()]
    assert ranked[0] == DOTS and set(ranked[1:4]) == set(made.outputs)
    for rank, word in enumerate([DOTS, *made.outputs], start=1):
        assert counts[word] == int(n_words / rank**2 / (3.141592653589793**2 / 6))
    assert counts[ranked[3]] > counts[ranked[4]]
    assert len(counts) <= 4096 // 50


def test_documents_hold_the_answer_in_one_or_two_steps() -> None:
    for seed in range(5):
        made = row("qa_1", 30, seed)
        name = re.findall(r"was (.+) born\?", made.question)[0]
        assert re.findall(rf"{name} was born in (\w+)", made.context) == list(made.outputs)
        assert made.context.count("Document ") == 30
        made = row("qa_2", 30, seed)
        name = re.findall(r"employs (.+)\?", made.question)[0]
        (company,) = re.findall(rf"{name} was born.*employed by ([^.]+)\.", made.context)
        (city,) = re.findall(rf"{company} was founded.*office is in (\w+)", made.context)
        assert [city] == list(made.outputs) and made.context.count("Document ") == 30


# --- generated rows in their prompts -----------------------------------------------------------


def test_every_task_fills_its_length_and_no_more(tokenizer, tmp_path: Path) -> None:
    made, found = samples(tokenizer, tmp_path, source="embedded", datasets="all", length=3000, rows=2)
    assert [sample.id for sample in found] == [f"{name}-{i}" for i in (0, 1) for name in DATASETS]
    for sample in found:
        prompt = encode(tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt")
        used = len(prompt) + sample.max_new_tokens
        assert 2700 < used <= 3000, (sample.id, used)
        text = tokenizer.decode(prompt.context_ids)
        assert text.endswith("assistant\n\n" + sample.answer_prefix)  # behind the reply header
        answer = " and ".join(one.upper() for one in sample.references)
        assert (made.score(sample, f"\x07{answer}\n"), made.score(sample, "")) == (1, 0)
        assert sample.fields["synthetic"] is True
    tokens = {sample.fields["dataset"]: sample.max_new_tokens for sample in found}
    niah = {name: 128 for name in DATASETS if name.startswith("niah")}
    assert tokens == niah | {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
    assert made.data_source == "embedded" and made.data_digest is None
    assert made.notes[:3] == [
        "prompts: own", "synthetic: true (3000 tokens)", "words: own, documents: own",
    ]  # fmt: skip
    assert made.notes[3].startswith("haystack: pydoc-3.")


def test_rows_depend_on_the_seed_and_on_nothing_else(tokenizer, tmp_path: Path) -> None:
    def second(seed: int, names: list[str]) -> str:
        _, found = samples(tokenizer, tmp_path, source="embedded", seed=seed, datasets=names, length=1500, rows=2)
        return next(sample for sample in found if sample.id == "vt-1").context

    assert second(0, ["vt"]) == second(0, ["niah_single_1", "vt"]) != second(1, ["vt"])


def test_the_context_of_context_only_ends_before_the_question(tokenizer, tmp_path: Path) -> None:
    _, found = samples(tokenizer, tmp_path, source="embedded", datasets=["qa_1"], length=1500, rows=1)
    prompt = encode(tokenizer, found[0], chat="none", system_prompt="", scope="context_only")
    assert tokenizer.decode(prompt.context_ids) == "<s>" + found[0].context
    assert tokenizer.decode(prompt.question_ids).startswith("\n\nReply with the answer alone.")


def test_essays_and_templates_of_the_data_folder_are_used_and_named(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "needle" / "PaulGrahamEssays").mkdir(parents=True)
    essay = tmp_path / "needle" / "PaulGrahamEssays" / "one.txt"
    essay.write_text("A short essay, about nothing. " * 9)
    (tmp_path / "ruler").mkdir()
    words = json.loads(json.dumps(OWN_TEMPLATES).replace("secret", "magic"))
    (tmp_path / "ruler" / "templates.json").write_text(json.dumps(words))
    chosen = {"datasets": ["niah_single_2"], "length": 1500, "rows": 1}
    made, (sample,) = samples(tokenizer, tmp_path, source="embedded", **chosen)
    assert "about nothing. A short essay" in sample.context and "magic number" in sample.question
    assert made.notes[0] == "prompts: official" and made.notes[3] == "haystack: essays-1"
    digest = made.data_digest
    essay.write_text("Another one. " * 9)
    assert samples(tokenizer, tmp_path, source="embedded", **chosen)[0].data_digest != digest is not None
    made, (sample,) = samples(tokenizer, tmp_path, source="embedded", prompts="own", haystack="embedded", **chosen)
    assert "secret number" in sample.question and made.data_digest is None
    essay.unlink()
    with pytest.raises(ConfigError, match="LLMTest_NeedleInAHaystack"):
        task(tmp_path, source="embedded", haystack="essays").check(shape())
    (tmp_path / "ruler" / "templates.json").unlink()
    with pytest.raises(ConfigError, match="NVIDIA/RULER"):
        task(tmp_path, source="embedded", prompts="official").check(shape())


def test_a_length_without_room_for_a_row_is_refused(tokenizer, tmp_path: Path) -> None:
    _, found = samples(tokenizer, tmp_path, source="embedded", length=200)
    with pytest.raises(ConfigError, match=r"task\.length=200 is too short for niah_single_2"):
        found[0]
    with pytest.raises(ConfigError, match=r"task\.length=9000 is more than the 8192"):
        samples(tokenizer, tmp_path, source="embedded", length=9000)


# --- files -------------------------------------------------------------------------------------

TEXT = "Remember it.\nOne of the numbers is 7.\nWhat is the number? The number is"
OLD = {"index": 0, "input": TEXT, "outputs": ["7"], "length": 9}
NEW = {"index": 1, "input": TEXT[:-14], "answer_prefix": TEXT[-14:], "outputs": ["7"], "length": 9}


def write(folder: Path, *lines: str, name: str = "niah_single_1") -> Path:
    path = folder / "ruler" / "4096" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_files_of_both_releases_give_the_same_parts(tokenizer, tmp_path: Path) -> None:
    write(tmp_path, json.dumps(OLD), json.dumps(NEW))
    made, found = samples(tokenizer, tmp_path, datasets=["niah_single_1"])
    assert made.data_source == "local" and [one.id for one in found] == [
        "niah_single_1-0", "niah_single_1-1",
    ]  # fmt: skip
    for sample in found:
        assert sample.context == "Remember it.\nOne of the numbers is 7."
        assert sample.question == "\nWhat is the number?"
        assert sample.answer_prefix == " The number is"
        assert (made.score(sample, "It is 7."), sample.fields["synthetic"]) == (1, False)


def test_every_chosen_task_needs_its_file(tmp_path: Path) -> None:
    write(tmp_path, json.dumps(OLD))
    both = ["niah_single_1", "vt"]
    assert task(tmp_path, datasets=both[:1]).data_source == "local"
    for source in ("auto", "local"):
        with pytest.raises(ConfigError, match=r"ruler/8192/niah_single_1\.jsonl is missing .* ask generated rows"):
            task(tmp_path, datasets=both[:1], length=8192, source=source).check(shape())
        with pytest.raises(ConfigError, match=r"ruler/4096/vt\.jsonl is missing .*NVIDIA/RULER"):
            task(tmp_path, datasets=both, source=source).check(shape())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (json.dumps(OLD)[:-9], "is no whole JSON object"),
        (json.dumps({**NEW, "outputs": []}), "'outputs' is not a list of texts"),
        (json.dumps({**NEW, "answer_prefix": 3}), "'answer_prefix' is not a text"),
        (json.dumps({**NEW, "input": "nothing asked"}), "no question that begins with"),
        (json.dumps({**OLD, "index": 1, "input": TEXT[:-14]}), "does not end in an answer"),
        (json.dumps(OLD), "index=0 stands in line 1 already"),
    ],
)
def test_a_bad_row_is_named_and_refused_or_skipped(tokenizer, tmp_path, bad, message) -> None:
    write(tmp_path, json.dumps(OLD), bad, json.dumps({**NEW, "index": 2}))
    names = ["niah_single_1"]
    with pytest.raises(ConfigError, match=rf"niah_single_1\.jsonl, line 2: .*{message}"):
        task(tmp_path, datasets=names).check(shape())
    made, found = samples(tokenizer, tmp_path, datasets=names, on_bad_row="skip")
    assert [sample.id for sample in found] == ["niah_single_1-0", "niah_single_1-2"]
    assert any("line 2" in note and message in note for note in made.notes)


def test_the_real_file_splits_into_the_published_prompt() -> None:
    path = sources.find("ruler/4096/niah_multikey_3.jsonl", None)
    words = sources.find(ruler.TEMPLATES, None)
    if path is None or words is None:
        pytest.skip("ruler/ is no part of the project and not here")
    published = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    material = Material(json.loads(words.read_text(encoding="utf-8")), (), 4096)
    ours = KINDS["niah_multikey_3"].make(material, random.Random(0), 40)
    theirs = ruler.split("niah_multikey_3", published)
    assert theirs.text == published["input"]

    def shown(made: Row) -> list[str]:
        lines = [made.context.splitlines()[0], made.context.splitlines()[1]]
        return [UUIDS.sub("#", part) for part in [*lines, made.question, made.answer_prefix]]

    assert shown(ours) == shown(theirs)


# --- scores and refusals -----------------------------------------------------------------------


def test_scorers_agree_with_the_official_ones() -> None:
    path = metrics_folder() / "needle_ruler.json"
    if not path.exists():
        pytest.skip(f"{path} is no part of the project and not here")
    results = run_ruler(path)
    assert len(results) > 20
    assert [result for result in results if result[1] is not None] == []


def test_control_characters_are_replaced_or_deleted() -> None:
    assert ruler.cleaned(" \x02a\x00b\x1f ") == "a\nb"
    assert ruler.cleaned(" \x02a\x00b\x1f ", "delete") == "ab"
    assert ruler.match_all("x and Y", ["X", "y", "z", "w"]) == 0.5
    assert ruler.match_part("x and Y", ["z", "X"]) == 1


def test_near_a_tie_the_mean_rounds_as_the_authors_does() -> None:
    found = [1, 0.1, 0, 2 / 3, 2 / 3, 1, 0.5, 0.1, 0, 0, 0, 1]
    found += [1 / 3, 0.75, 0.4, 0.6, 1 / 3, 0, 0, 0.7, 0, 0, 1, 0.3]
    assert ruler.percent(found) == 39.38  # 39.375; by 100 * sum / n it would be 39.37


def test_a_finished_run_says_each_tasks_mean(tmp_path: Path) -> None:
    rows = [
        {"dataset": "vt", "score": 0.2},
        {"dataset": "vt", "score": 1 / 3},
        {"dataset": "cwe", "score": None},
        {"dataset": "fwe", "score": 1.0},
    ]
    task(tmp_path, source="embedded").artifacts(tmp_path, rows, "full")
    lines = (tmp_path / "datasets.csv").read_text().splitlines()
    assert lines == ["dataset,rows,score_percent", "vt,2,26.67", "fwe,1,100.0"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "hub"}, r"task\.source"),
        ({"datasets": ["niah_single"]}, "did you mean 'niah_single_"),
        ({"datasets": ["vt", "vt"]}, "has something twice"),
        ({"datasets": []}, "is empty"),
        ({"haystack": "noise"}, r"task\.haystack"),
        ({"control_characters": "keep"}, r"task\.control_characters"),
        ({"rows": 0}, r"task\.rows=0"),
    ],
)
def test_wrong_values_are_refused_by_key(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(tmp_path, **changes)
