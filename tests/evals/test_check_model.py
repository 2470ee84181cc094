"""`python run.py --check model=NAME`: what a model has and which methods run on it, before its weights are there."""

from pathlib import Path

import pytest
import yaml

from kvbench import run
from kvbench.engine.budget import Bytes, parse_bytes
from kvbench.evals.screen import room
from kvbench.evals.screen.model import BUDGETS, facts, known_methods, look, refusal
from kvbench.tests.architectures import config_of, is_too_new
from kvbench.tests.engine.passes.test_chosen import saved

MODELS = Path(run.CONF) / "model"


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hub answers, and its cache is empty."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


def lines(*words: str) -> dict[str, str]:
    return dict(facts(look(words)))


def test_a_model_with_windows_sinks_and_experts_says_so() -> None:
    found = lines("model=gpt-oss-20b")
    assert found["model"].startswith("gpt-oss-20b: openai/gpt-oss-20b at 6cee5e81ee83, told by conf/architecture")
    assert "12 of 24 are compressed; left as they are: 12 sliding_attention" in found["layers"]
    assert found["and"].startswith("each head has a learned sink")
    assert found["K and V"].startswith("24,576 bytes a token")  # 12 layers, 8 heads, twice 64 numbers of 2 bytes
    assert found["beside them"].startswith("3.1 MB")  # 12 layers, 128 tokens, 2,048 bytes a token


def test_a_model_with_states_says_what_of_it_is_compressed() -> None:
    found = lines("model=qwen3-next-80b-a3b-instruct")
    assert "12 of 48 are compressed; left as they are: 36 linear_attention" in found["layers"]
    assert found["K and V"].startswith("24,576 bytes a token")
    assert 70 < float(found["beside them"].split()[0]) < 80  # MB of states
    assert "%" in found["so"]


def test_a_model_with_latents_refuses_by_name() -> None:
    words = ["model=deepseek-v2-lite-chat"]
    known = look(words)
    assert dict(facts(known))["compressed"].startswith("one latent of 512 numbers and a rotary key of 64")
    assert dict(facts(known))["K and V"].startswith(f"{27 * 1152:,} bytes a token")
    assert refusal("snapkv", "ratio=0.2", known, words) is None
    assert "one latent per token" in (refusal("shadowkv", "ratio=0.2", known, words) or "")


def test_every_method_is_asked_with_a_budget_that_it_takes() -> None:
    methods = known_methods()
    assert {"full", "snapkv", "kivi", "h2o_decode"} <= {*methods}
    assert {*methods.values()} == {*BUDGETS.values()}


def test_a_folder_with_a_configuration_and_no_weights_is_not_taken_for_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_of("llama").save_pretrained(tmp_path)
    assert run.main(["--check", f"model={tmp_path}"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("words", [["method=snapkv"], ["model=org/unheard-of"], ["model=smollm2-135m", "ratio=0.1"]])
def test_what_it_cannot_look_at_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--check", *words]) == 2
    said = capsys.readouterr()
    assert not said.out and len(said.err.strip().splitlines()) == 1


def test_the_screen_of_the_embedded_model_names_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--check", "model=smollm2-135m"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "30 of 30 are compressed" in said
    assert "snapkv" in said


def test_a_model_of_today_has_its_revision() -> None:
    """Entries of earlier papers' models name none: runs that exist were made without."""
    specs = {file.stem: yaml.safe_load(file.read_text()) for file in MODELS.glob("*.yaml")}
    pinned = {name: spec["revision"] for name, spec in specs.items() if spec.get("revision")}
    assert len(pinned) >= 22 and all(len(revision) == 40 for revision in pinned.values())


@pytest.mark.skipif(is_too_new("deepseek_v32"), reason="this transformers is too old for it, and it is refused")
def test_a_model_that_chooses_by_itself_is_for_full_attention_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved("deepseek_v32", tmp_path)
    assert run.main(["--check", f"model={tmp_path}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "4 indexed_attention: the model chooses by itself what it attends to" in said
    assert "1 method: full" in said and "all others" in said


# --- a prompt and its memory ---------------------------------------------------------------------

ASKED = ("full", "snapkv", "think", "full_stopped", "h2o_decode")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five methods are asked in place of all, which one screen above has."""
    every = known_methods
    monkeypatch.setattr(
        "kvbench.evals.screen.model.known_methods",
        lambda budgets=BUDGETS: {name: words for name, words in every(budgets).items() if name in ASKED},
    )


def screen(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run.main(["--check", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_bytes_say_how_many_requests_fit_and_what_one_may_take(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    said = screen(capsys, "model=llama-3.1-8b-instruct", "tokens=32k", "memory=4GB")
    assert "its full cache is 4.29 GB at 32,768 tokens: 4 GB is 93.1 % of it" in said
    assert "no request at full attention, 3 at 1/4, 7 at 1/8, 14 at 1/16 of the bytes" in said
    assert "memory=2GB (46.6 % of its cache) for 2 requests at once, memory=1GB (23.3 %) for 4" in said
    assert "methods at 32,768 tokens with memory=4GB: full, " in said
    # Of prompt and answer together: 4 GB over 131,072 bytes a token.
    assert "at budget=30517 of prompt and answer: full_stopped, h2o_decode" in said
    assert said.index("4.29 GB") < said.index("run on it")


def test_a_share_says_its_bytes(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    said = screen(capsys, "model=llama-3.1-8b-instruct", "tokens=32768", "memory=1/4")
    assert "its full cache is 4.29 GB at 32,768 tokens: memory=0.25 is 1.07 GB of it; 4 such requests" in said
    assert "think memory=0.25 of a prompt of 32768 tokens is less than ThinK needs" in said


def test_more_memory_than_the_whole_cache_says_so(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    said = screen(capsys, "model=llama-3.1-8b-instruct", "memory=4GB")
    assert "its full cache is 536.9 MB at 4,096 tokens: 4 GB is more than all of it" in said
    assert "7 requests at full attention, 29 at 1/4" in said
    assert "memory=500MB (93.1 % of its cache) for 8 requests at once" in said


def test_what_no_method_changes_counts_where_requests_are_counted() -> None:
    shape = look(["model=gpt-oss-20b"]).shape
    found = dict(room.facts(room.Asked(32768, Bytes(10**9)), shape))
    whole, left = 32768 * 24_576, shape.left_bytes(32768)
    assert found["and"].startswith("3.1 MB of every request")
    assert f", {int(10**9 / (whole / 4 + left))} at 1/4," in found["in 1 GB"]
    each = parse_bytes(found["for more"].removeprefix("memory=").partition(" ")[0], "memory").n
    assert 2 * (each + left) <= 10**9 < 2 * (each * 1.001 + left)


@pytest.mark.parametrize(("text", "n"), [("32k", 32768), ("128K", 131072), ("32768", 32768), ("1.5k", 1536)])
def test_lengths_are_written_as_people_write_them(text: str, n: int) -> None:
    assert room.parse_length(text) == n


def test_without_a_prompt_and_memory_nothing_is_said_of_them() -> None:
    assert not [*room.facts(room.Asked(), look(["model=llama-3.1-8b-instruct"]).shape)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model=llama-3.1-8b-instruct", "tokens=256k"], "tokens=262144 is more than the window"),
        (["model=llama-3.1-8b-instruct", "tokens=x"], "tokens=x is no number of tokens"),
        (["model=llama-3.1-8b-instruct", "tokens=0"], "tokens=0 is no number of tokens"),
        (["model=llama-3.1-8b-instruct", "memory=4XB"], "memory=4XB is neither"),
        (["model=llama-3.1-8b-instruct", "memory=3/2"], "memory=3/2 is out of range"),
        (["tokens=32k"], "tokens=32k is of a model's prompt"),
    ],
)
def test_a_prompt_or_a_memory_that_makes_no_sense_is_one_sentence(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--check", *words]) == 2
    said = capsys.readouterr()
    assert says in said.err and not said.out and len(said.err.strip().splitlines()) == 1
