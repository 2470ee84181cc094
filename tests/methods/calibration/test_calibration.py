"""Calibrations: what is measured, where files lie, and which are refused."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.prefill import prefill
from kvbench.evals import calibrate as command
from kvbench.methods.calibration import files, known
from kvbench.methods.calibration.base import Seen, watch
from kvbench.methods.calibration.files import place
from kvbench.methods.calibration.kinds import KINDS
from kvbench.methods.calibration.known import Calibrated, obtain
from kvbench.tests.tiny import prompt, tiny


class Bytes:
    """A tokenizer of few letters."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [2 + ord(letter) % 90 for letter in text]


@pytest.fixture
def model(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A small model of a file, so that what is made for it is kept, in a cache folder of its own."""
    for kind in KINDS.values():
        monkeypatch.setattr(kind, "n_tokens", 64)
    return replace(tiny(), tokenizer=Bytes(), digest="0123abc")


def test_keys_are_turned_back_to_what_they_were_before_rotary_embedding() -> None:
    """Behind no position the projection itself is seen: block by block, whatever the position."""
    model, seen = tiny(), dict[int, list[Seen]]()
    with model.hooked():
        watch(model, prompt(40) * 2, 512, lambda layer, each: seen.setdefault(layer, []).append(each))
        (whole,) = seen[0]
        attention = model.hf.model.layers[0]
        x = attention.input_layernorm(model.hf.model.embed_tokens(torch.tensor([prompt(40) * 2])))
        keys = attention.self_attn.k_proj(x).view(1, 80, 2, 8).transpose(1, 2)
    torch.testing.assert_close(whole.k_before, keys, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(whole.k, keys, atol=1e-2)
    # The first layer sees a token alone: before rotation its second half is its first.
    torch.testing.assert_close(whole.q_before[:, :, :40], whole.q_before[:, :, 40:], atol=1e-5, rtol=1e-4)


def test_sums_over_blocks_are_those_of_single_blocks() -> None:
    model, kind = tiny(), KINDS["channels"]
    with model.hooked():
        ids = prompt(3 * 512)
        whole = kind.measure(model, ids)
        parts = [kind.measure(model, ids[i : i + 512]) for i in (0, 512, 1024)]
    for name in ("q", "k", "qk"):
        torch.testing.assert_close(whole[name], sum(part[name] for part in parts))
    assert torch.equal(whole["qk_as_released"], parts[-1]["qk_as_released"])
    assert whole["q"].shape == (3, 6, 8) and whole["k"].shape == (3, 2, 8)


def test_it_is_made_once_and_kept(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    with model.hooked():
        made, again = obtain(model, "pca"), obtain(replace(model, facts={}), "pca")
    assert capsys.readouterr().err.count("Calibrating llama (pca)") == 1
    assert again.about == made.about and made.about.text.startswith("pydoc-")
    assert all(np.array_equal(again.arrays[name], x) for name, x in made.arrays.items())
    assert [*place("pca", model.digest).parent.glob("*.npz")] == [place("pca", model.digest)]
    assert place("pca", model.digest).stat().st_mode & 0o077 == 0


def test_two_starts_at_once_make_one(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    models, found = [replace(tiny(), tokenizer=Bytes(), digest=model.digest) for _ in range(2)], []

    def start(mine: Model) -> None:
        with mine.hooked():
            found.append(obtain(mine, "channels"))

    threads = [threading.Thread(target=start, args=(mine,)) for mine in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capsys.readouterr().err.count("Calibrating") == 1
    assert np.array_equal(found[0].arrays["q"], found[1].arrays["q"])


def test_without_a_cache_folder_it_is_made_all_the_same(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with model.hooked():
        assert obtain(model, "channels").arrays["q"].shape == (3, 6, 8)


def test_a_damaged_file_in_the_cache_folder_is_made_anew(model: Model) -> None:
    path = place("channels", model.digest)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PK and nothing else")
    with model.hooked():
        obtain(model, "channels")
    assert files.read(path, "x").about.digest == model.digest


def test_a_prefill_looks_it_up_once_per_model(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    what, calls = Calibrated("channels", "q", None, True), []
    monkeypatch.setattr(known, "obtain", lambda *given: calls.append(given) or obtain(*given))
    with model.hooked():
        traces = [prefill(model, prompt(30, seed), [what]) for seed in (0, 1)]
    assert len(calls) == 1
    assert all(torch.equal(trace.observed(what, 2), traces[0].observed(what, 2)) for trace in traces)
    assert traces[0].origins[what]["kind"] == "channels"


def test_none_is_made_where_that_is_forbidden(model: Model) -> None:
    with (
        pytest.raises(ConfigError, match=r"there is no calibration of kind pca for llama; make it with"),
        model.hooked(),
    ):
        prefill(model, prompt(30), [Calibrated("pca", "post", None, False)])


def test_files_of_others_are_refused(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    with model.hooked():
        files.write(path, obtain(model, "channels"))
        assert obtain(model, "channels", path).about.digest == model.digest
        with pytest.raises(ConfigError, match=r"another model \(llama, 0123abc\) than llama \(fff\)"):
            obtain(replace(model, digest="fff"), "channels", path)
        with pytest.raises(ConfigError, match="kind channels, and pca is asked for"):
            obtain(model, "pca", path)
    wider = replace(model.shape, h_kv=6)
    with pytest.raises(ConfigError, match=r"2 KV heads and 8 dimensions, and llama has .*6 KV heads"):
        files.check_file(path, "channels", wider)
    (tmp_path / "text.npz").write_text("channels")
    with pytest.raises(ConfigError, match=r"text.npz is no calibration file"):
        files.check_file(tmp_path / "text.npz", "channels", model.shape)
    with pytest.raises(ConfigError, match=r"none.npz cannot be read \(No such file"):
        files.check_file(tmp_path / "none.npz", "channels", model.shape)
    np.savez(tmp_path / "other.npz", about=json.dumps({"layers": [0]}), q=np.zeros(3))
    with pytest.raises(ConfigError, match=r"other.npz is no calibration file"):
        files.check_file(tmp_path / "other.npz", "channels", model.shape)
    assert files.digest_of_file(path) != files.digest_of_file(tmp_path / "text.npz") and not files.digest_of_file(None)


def test_too_few_tokens_give_no_components(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KINDS["pca"], "n_tokens", 31)
    with pytest.raises(ConfigError, match=r"31 tokens are too few .* use tokens=32 or more"), model.hooked():
        obtain(model, "pca")


# --- The command ------------------------------------------------------------------------------


def test_the_command_writes_where_runs_look(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "load_model", lambda settings: model)
    assert command.main(["channels", "model=smollm2-135m", "device=cpu"]) == 0
    assert capsys.readouterr().out.strip() == str(place("channels", model.digest))
    text = tmp_path / "text.txt"
    text.write_text("All work and no play. " * 20)
    mine = tmp_path / "mine.npz"
    words = ["pca", "model=smollm2-135m", "device=cpu", f"text={text}", "tokens=100", f"out={mine}"]
    assert command.main(words) == 0
    assert files.read(mine, "mine").about.n_tokens == 100


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model=smollm2-135m"], "give one kind of calibration, such as channels or pca"),
        (["chanels"], "no kind of calibration 'chanels'; did you mean 'channels'"),
        (["pca", "tokens=many"], "tokens=many is not a whole number"),
        (["pca", "tokens=0", "out=x"], "tokens=0 is out of range"),
        (["pca", "tokens=999"], "say where to write it with out=FILE"),
        (["pca", "ratio=0.1"], "ratio=0.1 means nothing here"),
        (["pca", "text=none.txt", "out=x"], "text=none.txt is no file"),
        (["pca", "model=nosuch"], "nosuch"),
    ],
)
def test_wrong_words_are_answered_in_a_sentence(words: list[str], says: str, capsys: Any) -> None:
    assert command.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error


def test_a_text_that_is_too_short_is_refused(model: Model, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(command, "load_model", lambda settings: model)
    text = tmp_path / "text.txt"
    text.write_text("Short.")
    assert command.main(["pca", "model=smollm2-135m", "device=cpu", f"text={text}", f"out={tmp_path / 'x'}"]) == 2
    assert "has 6 tokens, and tokens=64 are asked for" in capsys.readouterr().err
