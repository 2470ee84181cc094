"""GSM8K: the prompt, how many exemplars fit, extraction quirks, bad rows, and the official scores."""

import json
from pathlib import Path

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks import download, gsm8k, sources
from kvbench.tasks.gsm8k import Gsm8k
from kvbench.tasks.prompt import encode
from kvbench.tests.golden_metrics import metrics_folder
from kvbench.tests.tiny_tokenizer import LLAMA_TEMPLATE, tiny_tokenizer

REPO = Path(__file__).resolve().parents[2]
ROWS = [
    {"question": "What is 2 plus 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {
        "question": "A sheep costs {money}. What do 1,000 sheep cost at $2 each?",
        "answer": "#### 2,000",
    },
]
SOLVED = [f"Question: q{i}?\nThink.\nIt is {i}.\nThe answer is {i}" for i in range(3)]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(LLAMA_TEMPLATE, adds_bos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "gsm8k").mkdir()
    write(tmp_path, *(json.dumps(row) for row in ROWS))
    (tmp_path / "gsm8k" / "gsm8k_prompt_formal.txt").write_text("\n\n".join(SOLVED))
    return tmp_path


def write(folder: Path, *lines: str, encoding: str = "utf-8") -> None:
    text = "".join(f"{line}\n" for line in lines)
    (folder / "gsm8k" / "test.jsonl").write_bytes(text.encode(encoding))


def shape(window: int = 8192) -> ModelShape:
    return ModelShape("tiny", 2, 4, 2, 8, window, (0, 1))


def task(data_dir: Path, **changes) -> Gsm8k:
    values = yaml.safe_load((REPO / "conf" / "task" / "gsm8k.yaml").read_text())
    assert values.pop("_target_") == "kvbench.tasks.gsm8k.Gsm8k"
    return Gsm8k(build_params(Gsm8k, values | changes, "task"), str(data_dir), seed=0)


def samples(data_dir: Path, tokenizer, window: int = 8192, **changes):
    made = task(data_dir, **changes)
    made.check(shape(window))
    return made, made.samples(tokenizer)


# --- the prompt --------------------------------------------------------------------------------


def test_the_prompt_is_exemplars_newline_question_newline_with_one_bos(tokenizer, folder) -> None:
    made, (first, second) = samples(folder, tokenizer)
    assert first.context + first.question == "\n\n".join(SOLVED) + "\nQuestion: What is 2 plus 3?\n"
    assert "{money}" in second.question
    prompt = encode(tokenizer, first, chat="auto", system_prompt="", scope="full_prompt")
    text = tokenizer.decode(prompt.context_ids)
    assert text == "<s>" + first.context + first.question  # no turns although there is a template
    assert (first.max_new_tokens, first.stop_at_newline) == (256, False)
    assert (made.dataset, made.data_source) == ("test/3-shot", "local")
    assert made.notes == ["prompts: official", "exemplars: 3 of 3"]
    assert (first.id, first.references) == ("test-1", (ROWS[0]["answer"],))


def test_the_exemplars_alone_are_the_context_of_context_only(tokenizer, folder) -> None:
    _, (first, _) = samples(folder, tokenizer)
    prompt = encode(tokenizer, first, chat="auto", system_prompt="", scope="context_only")
    assert tokenizer.decode(prompt.context_ids) == "<s>" + "\n\n".join(SOLVED)
    assert tokenizer.decode(prompt.question_ids) == "\nQuestion: What is 2 plus 3?\n"


def test_fewer_exemplars_are_the_first_ones(tokenizer, folder) -> None:
    made, (first, _) = samples(folder, tokenizer, exemplars=2)
    assert first.context == "\n\n".join(SOLVED[:2])
    assert made.dataset == "test/2-shot"


@pytest.mark.parametrize("n", [1, 2, 3])
def test_as_many_exemplars_as_fit_and_not_one_more(tokenizer, folder, n: int) -> None:
    longest = f"\nQuestion: {ROWS[1]['question']}\n"
    needed = len(tokenizer.encode("\n\n".join(SOLVED[:n]) + longest)) + gsm8k.SLACK
    made, both = samples(folder, tokenizer, max_prompt_tokens=needed)
    assert made.dataset == f"test/{n}-shot"
    assert {sample.fields["exemplars"] for sample in both} == {n}  # one number for all rows
    made, _ = samples(folder, tokenizer, window=needed + 256)
    assert made.dataset == f"test/{n}-shot"
    if n > 1:
        made, _ = samples(folder, tokenizer, window=needed + 255)
        assert made.dataset == f"test/{n - 1}-shot"
        with pytest.raises(ConfigError, match=rf"task\.exemplars={n} .*give {n - 1} or fewer"):
            samples(folder, tokenizer, window=needed + 255, exemplars=n)


def test_a_window_without_room_for_one_exemplar_is_refused(tokenizer, folder) -> None:
    with pytest.raises(ConfigError, match="not even one exemplar fits into 44 tokens"):
        samples(folder, tokenizer, window=300)


def test_without_the_exemplar_file_ours_are_used_and_named(tokenizer, folder) -> None:
    (folder / "gsm8k" / "gsm8k_prompt_formal.txt").unlink()
    made, (first, _) = samples(folder, tokenizer)
    assert made.notes == ["prompts: own", "exemplars: 10 of 10"]
    assert first.fields["prompts"] == "own"
    with pytest.raises(ConfigError, match="HugoZHL/PQCache"):
        task(folder, prompts="official").check(shape())


def test_our_exemplars_are_right() -> None:
    """Every step `a op b … = c` holds, and the last one is the answer."""
    for _, steps, value in gsm8k.OWN_EXEMPLARS:
        sums = gsm8k.re.findall(r"([\d+*/ -]*\d) = (\d+)", steps)
        assert sums
        for left, right in sums:
            assert eval(left) == int(right), left
        assert gsm8k.last_number(steps) == float(value)
    assert all(f"\n\n{one}".count(gsm8k.NEXT_QUESTION) == 1 for one in gsm8k.own_exemplars())


# --- scores ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "answer", "correct"),
    [
        ("It is 18.", "#### 18", True),
        ("It is -18", "#### 18", True),
        ("so 1,800 of them", "#### 1800", True),
        ("half: 1/2", "#### 2", True),
        ("version 1.2.3", "#### .3", True),
        ("It is 18.\nQuestion: what is 9?", "#### 18", True),
        ("It is 18.\nQuestion:what is 9?", "#### 18", False),
        ("Question: 7", "#### 7", True),
        ("no idea", "#### 7", False),
        ("", "#### 7", False),
    ],
)
def test_the_last_number_before_the_next_question_counts(prediction, answer, correct) -> None:
    assert gsm8k.cot(prediction, answer) == correct


@pytest.mark.parametrize(
    ("prediction", "correct"),
    [("#### 18", True), ("#### 18.00", False), ("#### 18.", False), ("18", False)],
)
def test_hash4_compares_texts(prediction: str, correct: bool) -> None:
    assert gsm8k.hash4(prediction, "so\n#### 18") == correct


def test_scorers_agree_with_the_official_ones() -> None:
    path = metrics_folder() / "gsm8k_extraction.json"
    if not path.exists():
        pytest.skip(f"{path} is no part of the project and not here")
    results = run_vectors(path)
    assert len(results) > 3 * 100
    assert [result for result in results if result[1]] == []


def run_vectors(path: Path) -> list[tuple[str, str | None]]:
    """What is found in each generation and how it is judged, both ways, and the two accuracies."""
    vectors = json.loads(path.read_text(encoding="utf-8"))
    pairs, results = [], []
    for i, case in enumerate(vectors["samples"]):
        generation, answer = case["generation"], case["answer"]
        is_cot, is_hash4 = gsm8k.cot(generation, answer), gsm8k.hash4(generation, answer)
        pairs.append((is_cot, is_hash4))
        kept = gsm8k.cut(generation)
        ours = {
            "cut": (len(kept), case["cot"]["used_text_len"]),
            "pred": (gsm8k.last_number(kept), case["cot"]["pred"]),
            "gold": (gsm8k.last_number(answer), case["cot"]["gold"]),
            "cot": (bool(is_cot), case["cot"]["correct"]),
            "hash4.extracted": (gsm8k.hash4_value(generation), case["hash4"]["extracted"]),
            "hash4.gold": (gsm8k.hash4_value(answer), case["hash4"]["gold"]),
            "hash4": (bool(is_hash4), case["hash4"]["correct"]),
        }
        results += [(f"samples[{i}].{name}", differs(*pair)) for name, pair in ours.items()]
    for j, name in enumerate(("cot", "hash4")):
        mean = sum(pair[j] for pair in pairs) / len(pairs)
        results.append((f"aggregate.{name}", differs(mean, vectors["aggregate"][f"{name}_accuracy"])))
    return results


def differs(ours: object, official: object) -> str | None:
    return None if ours == official else f"{ours} instead of {official}"


def test_a_finished_run_says_both_accuracies_and_the_length_after_the_cut(tokenizer, folder) -> None:
    made, _ = samples(folder, tokenizer)
    rows = [
        {"prediction": "5\nQuestion: 9?", "references": ["#### 5"], "score": 1.0},
        {"prediction": "#### 6", "references": ["#### 5"], "score": 0.0},
        {"prediction": "", "references": ["#### 5"], "score": None},  # ran out of memory
    ]
    made.artifacts(folder, rows, "full")
    summary = json.loads((folder / "gsm8k.json").read_text())
    lengths = [len(tokenizer.encode(t, add_special_tokens=False)) for t in ("5", "#### 6")]
    assert summary == {
        "rows": 2,
        "cot_accuracy": 0.5,
        "hash4_accuracy": 0,
        "tokens_after_cut_mean": sum(lengths) / 2,
    }


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "embedded"}, r"task\.source"),
        ({"prompts": "mine"}, r"task\.prompts"),
        ({"extraction": "hash"}, "use cot or hash4"),
        ({"on_bad_row": "drop"}, r"task\.on_bad_row"),
        ({"exemplars": 0}, r"task\.exemplars=0"),
        ({"exemplars": 4}, r"task\.exemplars=4 is more than there are; give 3"),
        ({"max_new_tokens": 8192}, r"task\.max_new_tokens=8192"),
        ({"max_prompt_tokens": 8000}, r"task\.max_prompt_tokens=8000"),
    ],
)
def test_wrong_values_are_refused_by_key(folder: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(folder, **changes).check(shape())


def test_a_missing_file_names_its_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="openai/grade-school-math"):
        task(tmp_path, source="local").check(shape())


def test_what_is_missing_is_fetched_into_the_cache_or_the_folder_that_was_named(
    monkeypatch, tokenizer, folder: Path, tmp_path_factory
) -> None:
    asked = []

    def fetch(name: str, root: Path | None, *, only: list[str]) -> list[Path]:
        asked.append((name, root, *only))
        return [folder / only[0]]

    monkeypatch.setattr(download, "fetch", fetch)
    monkeypatch.setattr(sources, "data_roots", lambda data_dir: [])
    values = yaml.safe_load((REPO / "conf" / "task" / "gsm8k.yaml").read_text())
    del values["_target_"]

    def fetched(data_dir: str | None, **changes) -> list[tuple]:
        asked.clear()
        made = Gsm8k(build_params(Gsm8k, values | changes, "task"), data_dir, seed=0)
        made.check(shape())
        assert len(made.samples(tokenizer)) == 2 and made.data_digest is not None
        return list(asked)

    cache = download.cache_root()
    test, exemplars = ("gsm8k", cache, gsm8k.TEST), ("gsm8k", cache, gsm8k.EXEMPLARS)
    assert fetched(None) == [test]
    assert fetched(None, source="hub") == [exemplars, test]
    assert fetched(None, prompts="official") == [exemplars, test]
    assert fetched(None, source="hub", prompts="own") == [test]
    root = tmp_path_factory.mktemp("named")
    assert fetched(str(root), source="hub", prompts="own") == [("gsm8k", root, gsm8k.TEST)]
    with pytest.raises(ConfigError, match=r"kvbench fetch gsm8k"):
        fetched(str(root))


def test_other_rows_or_exemplars_are_another_run(folder: Path) -> None:
    def digest() -> str | None:
        made = task(folder)
        made.check(shape())
        return made.data_digest

    first = digest()
    write(folder, json.dumps(ROWS[0]))
    second = digest()
    (folder / "gsm8k" / "gsm8k_prompt_formal.txt").unlink()
    assert len({first, second, digest()}) == 3


def test_the_real_file_has_the_official_shape(tokenizer) -> None:
    path = sources.find(gsm8k.EXEMPLARS, None)
    if path is None:
        pytest.skip("gsm8k/gsm8k_prompt_formal.txt is no part of the project and not here")
    solved = gsm8k.split_exemplars(path)
    assert "\n\n".join(solved) == path.read_text(encoding="utf-8")
    assert [one.count("\n") for one in solved] == [11] * 8 + [10] * 2
