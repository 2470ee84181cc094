"""Checkpoints whose files hang, take all memory, panic or contradict each other: one sentence, and code 2."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.engine.checkpoints import trial
from kvbench.engine.checkpoints.header import wrong_stop
from kvbench.engine.errors import ConfigError
from kvbench.engine.workers.limited import Limited
from kvbench.evals.runner import run_cells
from kvbench.evals.settings import composed_with
from kvbench.run import main
from kvbench.tasks.prompt import render, tokenizing
from kvbench.tests.tasks.test_needle import STRINGS
from kvbench.tests.tiny_run import cell, save_tiny
from kvbench.tests.tiny_tokenizer import tiny_tokenizer

NEEDLE = ("task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[50]", "task.max_new_tokens=4")
CHAT = ("task.style=kamradt",)
Edit = Callable[[Path], Any]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def folder(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to be damaged; trials of it are noted nowhere else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "TRY_S", 0.5)
    return Path(shutil.copytree(sound, tmp_path / "model"))


def said(folder: Path, *more: str) -> str:
    """The sentence that refuses a run, before there is a folder of it."""
    out = folder.parent / "run"
    with pytest.raises(ConfigError) as error:
        run_cells([cell([*NEEDLE, *more, "method=full", "model=any", f"model.id={folder}"], out)])
    assert "\n" not in str(error.value) and not out.exists()
    return str(error.value)


def with_stops(file: str, value: Any) -> Edit:
    return lambda folder: changed(folder / file, eos_token_id=value)


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def with_tokenizer(**values: Any) -> Edit:
    return lambda folder: changed(folder / "tokenizer.json", **values)


def with_template(text: str) -> Edit:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def with_tokens_beyond(folder: Path) -> None:
    """Letters have tokens that the model has no embedding of."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model["vocab"] = {word: id + 5000 * (len(word) == 1) for word, id in model["vocab"].items()}
    changed(folder / "tokenizer.json", model=model)


def steps(*each: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(each)}


DOUBLING = [{"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}] * 40
LONG = [{"type": "Prepend", "prepend": "x" * 10**6}] * 20
SEARCHING = {"type": "Replace", "pattern": {"Regex": "(a|a|[a-z ])*(b|[a-z ])*\\1\\2\\1Z"}, "content": "x"}
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
NO_TOKEN = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<zz>", "type_id": 0}}], "pair": [],
            "special_tokens": {}}  # fmt: skip
NO_UNKNOWN = {"type": "WordPiece", "vocab": {}, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
              "max_input_chars_per_word": 100}  # fmt: skip


def as_qwen(folder: Path) -> None:
    """Without files, its class makes a tokenizer that gives no text a token."""
    changed(folder / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")


@pytest.mark.parametrize("edit", [lambda folder: None, as_qwen], ids=["llama", "qwen"])
def test_a_folder_without_a_tokenizer_is_told_which_file_is_missing(
    edit: Edit, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tokenizer.json").unlink()
    edit(folder)
    sentence = f"the folder model.id={folder} has no tokenizer.json"
    assert said(folder).startswith(sentence)
    assert main(["--check", f"model={folder}"]) == 2
    assert capsys.readouterr().err.startswith(f"run.py: {sentence}")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["abc", {"a": 1}, [[1]], 2**70, -5, 10**9, 1.5, True, [1, 10**9], ["x"]], ids=str)
def test_stop_tokens_of_no_type_or_size_are_refused(file: str, value: Any, folder: Path) -> None:
    with_stops(file, value)(folder)
    assert f"{file} has eos_token_id=" in said(folder)


def test_stop_tokens_that_are_tokens_are_not_refused() -> None:
    assert [wrong_stop(value, n) for value, n in ((5, 6), ([0, 5], 6), ((1,), None), ([], 6))] == [None] * 4
    assert wrong_stop(6, 6) == "and tokens are 0 to 5"


@pytest.fixture(scope="module")
def worker() -> Iterator[Limited]:
    """One for all trials: it is started anew only where a reply ended it."""
    one = Limited(trial.__name__, trial.TRY_S)
    yield one
    one.close()


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (with_tokenizer(normalizer=steps(*DOUBLING)), "did not come to an end within 0.5 s"),
        (with_tokenizer(normalizer=steps(*LONG)), "the tokenizer of the model"),
        (with_tokenizer(normalizer=SEARCHING), "the tokenizer of the model"),
        (with_tokenizer(post_processor=NO_TOKEN), "cannot be used (no entry found for key)"),
        (with_tokenizer(model=NO_UNKNOWN), "cannot be used (WordPiece error: Missing [UNK] token"),
        (with_template(LOOPS), "the chat template of the model"),
        (with_template("{{ 'x' * 20000000000 }}{{ messages[0].content }}"), "cannot be used (MemoryError)"),
        (with_template("{{ 'x' * 3000000 }}{{ messages[0].content }}"), "3,000,0"),
    ],
    ids=["doubling", "long", "searching", "panic", "no-unknown", "loops", "huge", "long-template"],
)
def test_tokenizers_and_templates_that_never_end_or_panic_are_refused(
    edit: Edit, says: str, folder: Path, worker: Limited
) -> None:
    edit(folder)
    with pytest.raises(ConfigError) as error:
        trial.try_out(worker, str(folder), {}, str(folder))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.engine.checkpoints.load.check_tokenizer", lambda *_: None)  # it comes to an end
    with_tokens_beyond(folder)
    assert "and the model's embedding ends with 362" in said(folder)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for %}", "cannot be rendered"),
        ("{{ nothing.at.all }}{{ messages[0].content }}", "cannot be rendered ('nothing' is undefined)"),
        ("{{ 1 // 0 }}", "cannot be rendered (integer division or modulo by zero)"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot be rendered (maximum recursion depth exceeded"),
        ("{{ raise_exception('no\n\nthanks') }}", "cannot be rendered (no)"),
        ("{{ messages[0].content | upper }}", "changes a user's words"),
        ("hello", "changes a user's words"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "changes a user's words"),
    ],
)
def test_templates_that_fail_are_refused_where_they_are_used(
    template: str, says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.engine.checkpoints.load.check_tokenizer", lambda *_: None)  # to fail is an end, too
    with_template(template)(folder)
    words = folder.parent / "data" / "needle" / "strings.json"
    words.parent.mkdir(parents=True)
    words.write_text(json.dumps(STRINGS))
    assert says in said(folder, *CHAT, f"data_dir={folder.parent / 'data'}")


def test_what_came_to_an_end_is_noted_by_the_files_content_and_not_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial.check_tokenizer(str(folder), {}, "model")
    with monkeypatch.context() as patch:
        patch.setattr(Limited, "ask", lambda *_: pytest.fail("it was tried again"))
        trial.check_tokenizer(str(folder), {}, "model")
        trial.check_tokenizer("of/others", {"trust_remote_code": True}, "model")
        changed(folder / "config.json", eos_token_id=2)
        trial.check_tokenizer(str(folder), {}, "model")
    with_tokenizer(normalizer=steps(*DOUBLING))(folder)
    monkeypatch.setattr(Limited, "ask", lambda *_: ("timeout", None))
    with pytest.raises(ConfigError, match="did not come to an end within"):
        trial.check_tokenizer(str(folder), {}, "model")


def test_a_note_that_others_can_write_is_not_believed(folder: Path) -> None:
    note = trial.note_of(str(folder), {})
    assert note is not None and not trial.is_noted(note)
    note.parent.mkdir(parents=True)
    note.write_text('{"ended": true}')
    note.chmod(0o644)
    assert trial.is_noted(note)
    note.chmod(0o666)
    assert not trial.is_noted(note)


def test_a_tokenizer_that_gives_up_on_one_text_is_named() -> None:
    panic = type("PanicException", (BaseException,), {})
    for error in (panic("no entry found"), Exception("WordPiece error")):  # tokenizers raise no kinds of their own
        with pytest.raises(ConfigError, match="the tokenizer of the model tiny gives up"), tokenizing("tiny"):
            raise error
    for other in (KeyError("x"), KeyboardInterrupt()):
        with pytest.raises(type(other)), tokenizing("tiny"):
            raise other


def test_a_template_that_raises_is_one_sentence() -> None:
    tokenizer = tiny_tokenizer("{{ 1 // 0 }}", adds_bos=False)
    with pytest.raises(ConfigError, match=r"cannot be rendered \(integer division or modulo by zero\)"):
        render(tokenizer, [{"role": "user", "content": "x"}], False)


@pytest.mark.parametrize("name", ["../model/any", "../method/kivi", "/etc/passwd", "kivi.yaml", "kivi/", ".", "\0"])
def test_only_a_method_by_its_name_is_composed_with(name: str) -> None:
    with pytest.raises(ConfigError, match="no method to compose with"):
        composed_with(name)


def test_such_a_run_ends_with_code_2_and_no_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_tokenizer(post_processor=NO_TOKEN)(folder)
    words = [*NEEDLE, "method=full", "model=any", f"model.id={folder}", f"out={folder.parent / 'run'}"]
    assert main(words) == 2
    text = capsys.readouterr().err
    assert text.count("run.py: ") == 1 and "Traceback" not in text and not (folder.parent / "run").exists()
