"""PG19: the losses of a plain forward pass, how they combine, where windows lie, and bad files."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.evals import models, runner
from kvbench.methods.calibration.prose import embedded_prose
from kvbench.results import SampleRow, combined, combined_ci95
from kvbench.tasks.pg19 import PG19, curve
from kvbench.tests.tiny_run import CONF, WINDOW, cell, run, save_tiny, sweep
from kvbench.tests.tiny_tokenizer import tiny_tokenizer

TASK = ["task=pg19", "task.lengths=[60,150]", "task.targets=20", "task.bin=8", "task.offsets=2"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    file = tmp_path / "book.txt"
    file.write_text(embedded_prose()[:3000])
    return file


def words(checkpoint: Path, book: Path, *more: str) -> list[str]:
    return ["model=any", f"model.id={checkpoint}", *TASK, f"task.path={book}", *more]


def task(data_dir: Path | None = None, **changes: Any) -> PG19:
    values = yaml.safe_load((CONF / "task" / "pg19.yaml").read_text())
    assert values.pop("_target_") == "kvbench.tasks.pg19.PG19"
    made = PG19(build_params(PG19, values | changes, "task"), None if data_dir is None else str(data_dir), 0)
    made.check(shape())
    return made


def shape(window: int = WINDOW) -> ModelShape:
    return ModelShape("tiny", 2, 4, 2, 8, window, (0, 1))


def plain_losses(checkpoint: Path, ids: list[int]) -> torch.Tensor:
    """The loss of every token but the first, by transformers alone."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        logits = hf(torch.tensor([ids])).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")


@pytest.mark.parametrize(("protocol", "n_targets"), [((), 20), (("task.protocol=reprefill", "task.targets=7"), 1)])
def test_full_attention_has_the_perplexity_of_one_plain_forward_pass(
    checkpoint: Path, book: Path, tmp_path: Path, protocol: tuple[str, ...], n_targets: int
) -> None:
    result, rows = run(words(checkpoint, book, "method=full", *protocol), tmp_path / f"run-{n_targets}")
    assert result.metric == "perplexity"
    bos, *ids = tiny_tokenizer(None, adds_bos=True).encode(book.read_text())
    total, seen = 0.0, 0
    for row in rows:
        start, length = row.fields["start"], row.fields["length"]
        window = [bos, *ids[start : start + length + n_targets]]  # a window begins as a text does
        assert row.prompt_tokens == length and len(window) == length + n_targets + 1
        # The token right behind the prefix is foretold by the prefill, and does not count.
        losses = plain_losses(checkpoint, window)[length:]
        assert row.score == pytest.approx(math.exp(losses.mean()), rel=1e-4)
        assert row.fields["nll_sum"] == pytest.approx(losses.sum().item(), rel=1e-4)
        total, seen = total + losses.sum().item(), seen + len(losses)
    assert [row.fields["length"] for row in rows] == [60, 60, 150, 150][:: 2 if protocol else 1]
    assert seen == n_targets * len(rows)
    assert result.score == pytest.approx(math.exp(total / seen), rel=1e-4)


def test_with_the_whole_prompt_every_method_equals_full_attention_and_else_none_does(
    checkpoint: Path, book: Path, tmp_path: Path
) -> None:
    methods = ("oracle", "streamingllm", "snapkv", "quest", "clusterkv", "pyramidinfer")
    whole = [[f"method={name}", "ratio=1"] for name in methods]
    less = [[f"method={name}", "ratio=0.3", "comm=1/8"] for name in ("oracle", "streamingllm")]
    (full, _), *others = sweep(words(checkpoint, book), [["method=full"], *whole, *less], tmp_path / "sweep")
    scores = [result.score for result, _ in others]
    assert scores[: len(whole)] == pytest.approx([full.score] * len(whole), rel=1e-5)
    for score in scores[len(whole) :]:
        assert score != pytest.approx(full.score, rel=1e-3)
    # Beside others as alone.
    alone, _ = run(words(checkpoint, book, *less[1]), tmp_path / "alone")
    assert alone.score == pytest.approx(scores[-1], rel=1e-6)


def test_the_curve_of_a_run_can_be_merged_from_its_losses(checkpoint: Path, book: Path, tmp_path: Path) -> None:
    result, rows = run(words(checkpoint, book, "method=full"), tmp_path / "run")
    found = json.loads((tmp_path / "run" / "perplexity.json").read_text())
    assert [(each["length"], each["targets"]) for each in found["lengths"]] == [(60, 40), (150, 40)]
    # Bins of 8, 8 and 4 targets behind each length, which begin two behind the prefix; two windows in each.
    assert [(b["position"], b["tokens"], b["targets"]) for b in found["bins"]] == [
        (length + 1 + first, n, 2 * n) for length in (60, 150) for first, n in [(0, 8), (8, 8), (16, 4)]
    ]  # fmt: skip
    assert found["bins"][-1]["running"] == pytest.approx(result.score, rel=1e-5)
    assert sum(b["nll_sum"] for b in found["bins"]) == pytest.approx(sum(row.fields["nll_sum"] for row in rows))


def line(score: float | None, n: int) -> SampleRow:
    ledger = dict.fromkeys(
        "tokens_budget tokens_attended_mean effective_ratio bytes_resident_device bytes_resident_host "
        "bytes_resident_device_actual bytes_moved_kv_per_step bytes_moved_meta_per_step bytes_searched_per_step "
        "cache_hit_rate".split()
    )
    return SampleRow(
        id=f"{score}-{n}", prompt_sha256="0" * 16, prompt_tokens=1, original_prompt_tokens=1, generated_tokens=0,
        prediction="", references=[], score=score, status="oom" if score is None else "ok", error=None,
        prefill_s=None, decode_s=None, tpot_s=None, batch_rows=1,
        ledger={} if score is None else ledger | {"within_budget": True},
        fields={"metric": "perplexity", "n_targets": n},
    )  # fmt: skip


def test_perplexities_combine_as_their_losses_do() -> None:
    rows = [line(math.exp(2.0), 100), line(math.exp(3.0), 300), line(None, 50)]
    assert combined(rows, "perplexity") == pytest.approx(math.exp((200 + 900) / 400))
    low, high = combined_ci95(rows, "perplexity") or (0, 0)
    assert low < math.exp(2.0) and high > math.exp(3.0), "two samples say little"
    assert low == 1, "no perplexity is lower"
    assert combined([line(None, 5)], "perplexity") is None
    # Resamples of unequal samples weigh them as the score does.
    many = [line(math.exp(2.0), 1)] * 30 + [line(math.exp(3.0), 99)] * 30
    low, high = combined_ci95(many, "perplexity") or (0, 0)
    assert low > math.exp(2.7)  # without weights all of the interval lies below


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"score": 0.5}, "1 or more"),
        ({"fields": {"metric": "perplexity"}}, "'n_targets' is 0"),
        ({"score": 2.0, "fields": {}}, "within 0 to 1"),
    ],
)
def test_a_line_that_cannot_be_a_perplexity_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(line(3.0, 4), **changes)


def test_an_interrupted_curve_leaves_out_what_did_not_fit() -> None:
    row = {"status": "oom", "length": 10}
    assert curve([row]) == {"lengths": [], "bins": []}


def test_lengths_end_where_model_or_text_do(book: Path) -> None:
    tokenizer = tiny_tokenizer(None, adds_bos=True)
    made = task(path=str(book), protocol="reprefill", stride=100, max_length=450)
    found = [sample.fields["length"] for sample in made.samples(tokenizer)]
    assert found == [100, 200, 300, 400]
    made.check(shape(320))
    assert [s.fields["length"] for s in made.samples(tokenizer)] == [100, 200, 300]
    made = task(path=str(book), lengths=[300], targets=8, offsets=3)
    windows = [(*(sample.ids or ()), *(sample.forced or ())) for sample in made.samples(tokenizer)]
    bos, *ids = tokenizer.encode(book.read_text())
    assert [window[0] for window in windows] == [bos] * 3
    assert windows[0][1:] == tuple(ids[:308])
    assert windows[2][1:] == tuple(ids[-308:])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "no/such/file.txt"}, "is no file"),
        ({"source": "hub"}, "task.source"),
        ({"protocol": "stream"}, "task.protocol"),
        ({"targets": 0}, "task.targets=0 is out of range"),
        ({"lengths": [50, 50]}, "has something twice"),
        ({"lengths": [1]}, "from 2"),
        ({"source": "embedded", "lengths": [900]}, "longest that fits is 767"),
        ({"source": "embedded", "max_length": 900}, "leaves no prefix"),
        ({"source": "embedded", "books": 2, "lengths": [50]}, "books=2 .* the 1 text"),
    ],
)
def test_parameters_that_cannot_be_met_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        task(**changes)


def test_a_text_that_is_too_short_is_named(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("A few words only.")
    wanted: list[dict[str, Any]] = [{"lengths": [500], "targets": 4}, {"protocol": "reprefill"}]
    for changes in wanted:
        with pytest.raises(ConfigError, match=r"'short' has \d+ tokens, too few"):
            task(path=str(short), **changes).samples(tiny_tokenizer(None, adds_bos=True))


GOOD = json.dumps({"text": "A line that can be read. " * 20, "id": "first"}).encode()
BAD = [
    (GOOD[:-20], "no whole JSON object"),
    (b'{"body": "x"}', "field 'text' is missing"),
    (b'{"text": 5}', "field 'text' is not a text"),
    (b'{"text": "  "}', "field 'text' is no text or an empty one"),
    (b'{"text": "\\ud800"}', "half a surrogate pair"),
    (GOOD.replace(b"can", b"c\xe4n"), "no UTF-8"),
    (GOOD, "id='first' stands in an earlier line already"),
    (b"", "is empty"),
]


@pytest.mark.parametrize(("bad", "said"), BAD, ids=[said for _, said in BAD])
def test_a_bad_line_is_named_and_refused_or_skipped_as_asked(tmp_path: Path, bad: bytes, said: str) -> None:
    file = tmp_path / "books.jsonl"
    last = b'{"text": "Another line that can be read, to the end."}'
    file.write_bytes(b"\n".join([GOOD, bad, last]) + b"\n")
    changes = {"path": str(file), "books": 2, "lengths": [10], "targets": 4}
    with pytest.raises(ConfigError, match=rf"books\.jsonl, line 2: .*{said}"):
        task(**changes)
    made = task(**changes, on_bad_row="skip")
    samples = made.samples(tiny_tokenizer(None, adds_bos=True))
    assert [sample.fields["text"] for sample in samples] == ["books:1", "books:3"]
    assert len(made.notes) == 1 and said in made.notes[0] and "line 2" in made.notes[0]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b" \n\n", r"a\.txt: the file is empty"),
        ("a.txt", "one\ntwo £".encode("latin-1"), r"a\.txt, line 2: byte 8 of the file is no UTF-8"),
        ("a.jsonl", b"", r"a\.jsonl: the file is empty"),
        ("a.jsonl", b"{}\n", r"a\.jsonl, line 1: field 'text' is missing"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused_before_a_model_is_loaded(
    checkpoint: Path, tmp_path: Path, name: str, content: bytes, said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        run(words(checkpoint, tmp_path / name, "method=full"), tmp_path / "run")


def test_books_of_the_data_folder_come_in_order(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pg19/\*\.txt is missing .*emozilla/pg19-test"):
        task(tmp_path)
    (tmp_path / "pg19").mkdir()
    for name in "cab":
        (tmp_path / "pg19" / f"{name}.txt").write_text(f"The book {name}. " * 20)
    made = task(tmp_path, books=2, lengths=[20], targets=3)
    found = [s.fields["text"] for s in made.samples(tiny_tokenizer(None, adds_bos=True))]
    assert (found, made.dataset) == (["a", "b"], "chunked-3/a-and-1")
    assert (made.data_source, made.notes) == ("local", ())


def test_a_file_that_changed_is_another_run(checkpoint: Path, book: Path, tmp_path: Path) -> None:
    before = runner.prepare([cell(words(checkpoint, book, "method=full"), tmp_path, True)])[0]
    book.write_text(book.read_text() + "And then.")
    after = runner.prepare([cell(words(checkpoint, book, "method=full"), tmp_path, True)])[0]
    assert before.path != after.path


def test_a_text_has_no_question_to_leave_out(checkpoint: Path, book: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="context_only has no meaning for task=pg19"):
        run(words(checkpoint, book, "method=full", "compression_scope=context_only"), tmp_path)


def test_the_embedded_model_reads_as_one_plain_pass_does(tmp_path: Path) -> None:
    """Within 1e-3, and compression costs something."""
    from kvbench.engine.checkpoints.load import load

    grid = ["task=pg19", "task.source=embedded", "task.lengths=[400]", "task.targets=16"]
    variants = [
        ["method=full"],
        ["method=oracle", "ratio=1"],
        ["method=streamingllm", "ratio=0.05"],
    ]
    (full, rows), (whole, _), (ends, _) = sweep(grid, variants, tmp_path)
    model = load("smollm2-135m", "embedded", dtype="float32", device="cpu")
    ids = model.tokenizer.encode(embedded_prose())[:417]
    with torch.inference_mode():
        logits = model.hf(torch.tensor([ids])).logits[0, 400:-1]
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[401:]))
    assert full.score == pytest.approx(math.exp(losses), rel=1e-3)
    assert full.score == pytest.approx(whole.score, rel=1e-5)
    assert rows[0].fields["n_targets"] == 16
    assert ends.score is not None and full.score is not None and ends.score > 1.02 * full.score
