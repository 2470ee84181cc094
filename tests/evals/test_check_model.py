"""`python run.py --check model=NAME`: what a model has and which methods run on it, before its weights are there."""

from pathlib import Path

import pytest
import yaml

import run
from evals.screen.model import BUDGETS, facts, known_methods, look, refusal
from tests.architectures import config_of, is_too_new
from tests.engine.passes.test_chosen import saved

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
