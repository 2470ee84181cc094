from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.methods.gates import files
from kvbench.methods.gates.networks import GateScores, drawn, fastkvzip, kvzap

SHAPE = ModelShape("m", 3, 4, 2, 8, 1024, (0, 2), 24)
MODEL = Checkpoint(SHAPE, ("abc", "old"), 8)
FACTS = {"kind": "kvzap", "model_digest": "abc", "model": "m"}


def weights(kind: str = "kvzap", h_kv: int = 2, d_model: int = 24, g: int = 2) -> dict[int, dict[str, np.ndarray]]:
    return {layer: {name: x.numpy() for name, x in drawn(kind, layer, d_model, h_kv, g).items()} for layer in (0, 2)}


def gate(path: Path, layers: Mapping[int, Mapping[str, np.ndarray]], **facts: str) -> str:
    files.written(path, layers, FACTS | facts)
    return str(path)


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    made = weights()
    found = files.read(gate(tmp_path / "g.safetensors", made), "kvzap")
    assert found.facts == FACTS and found.layers.keys() == made.keys()
    assert all(np.array_equal(found.layers[a][name], x) for a, own in made.items() for name, x in own.items())
    files.check_model(str(tmp_path / "g.safetensors"), "kvzap", MODEL)
    files.check_model(str(tmp_path / "g.safetensors"), "kvzap", replace(MODEL, digests=("new", "abc")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_numbers_of_any_width_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    x = torch.randn(2, 24).to(dtype)
    save_file({"layers.0.weight": x, "layers.0.bias": x[:, 0].contiguous()}, tmp_path / "g.safetensors")
    found = files.read(str(tmp_path / "g.safetensors"), "kvzap").layers[0]["weight"]
    assert np.array_equal(found, x.float().numpy())


def without(layers: dict[int, dict[str, np.ndarray]], layer: int, name: str | None = None) -> Any:
    made = {a: {**own} for a, own in layers.items()}
    if name is None:
        del made[layer]
    else:
        del made[layer][name]
    return made


def with_nan(layers: dict[int, dict[str, np.ndarray]]) -> Any:
    layers[2]["weight"] = layers[2]["weight"].copy()
    layers[2]["weight"][1, 3] = np.nan
    return layers


@pytest.mark.parametrize(
    ("layers", "facts", "says"),
    [
        (weights(), {"model_digest": "other"}, r"is of another model \(m, other\) than m \(abc\)"),
        (weights(), {"kind": "fastkvzip"}, "is a gate of kind fastkvzip, and kvzap is asked for"),
        (without(weights(), 2), {}, "has no weights for layer 2 of m"),
        (without(weights(), 2, "bias"), {}, "layers.2.bias .* is missing"),
        (weights(d_model=20), {}, r"layers.0.weight .* has the shape \[2, 20\], and m needs \[2, 24\]"),
        (weights(h_kv=3), {}, r"has the shape \[3, 24\]"),
        (with_nan(weights()), {}, "layers.2.weight .* NaN or infinite"),
    ],
    ids=["model", "kind", "layer", "name", "width", "heads", "nan"],
)
def test_a_gate_of_another_model_or_shape_is_refused(
    tmp_path: Path, layers: Any, facts: dict[str, str], says: str
) -> None:
    path = gate(tmp_path / "g.safetensors", layers, **facts)
    with pytest.raises(ConfigError, match=says):
        files.check_model(path, "kvzap", MODEL)


def test_a_gate_that_names_no_model_is_refused(tmp_path: Path) -> None:
    files.written(tmp_path / "g.safetensors", weights(), {})
    with pytest.raises(ConfigError, match="does not say which model it is for; write model_digest=abc"):
        files.check_model(str(tmp_path / "g.safetensors"), "kvzap", MODEL)


def test_a_group_of_another_size_is_refused_where_the_products_agree(tmp_path: Path) -> None:
    """h_kv * g is 4 in both; numbers would be read in another order."""
    path = gate(tmp_path / "g.safetensors", weights("fastkvzip", h_kv=1, g=4), kind="fastkvzip")
    with pytest.raises(ConfigError, match="has the shape"):
        files.check_model(path, "fastkvzip", MODEL)


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]"])
def test_what_is_no_gate_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "g.pt").write_bytes(content)
    with pytest.raises(ConfigError, match="is no safetensors file"):
        files.read(str(tmp_path / "g.pt"), "kvzap")


def test_a_missing_gate_is_never_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no gate of kind kvzap for this model; train one with"):
        files.check_model("auto", "kvzap", MODEL)
    with pytest.raises(ConfigError, match="cannot be read"):
        files.check_model(str(tmp_path / "none.safetensors"), "kvzap", MODEL)
    files.check_model("auto", "kvzap", replace(MODEL, digests=("random-1",)))
    files.place("kvzap", "abc").parent.mkdir(parents=True, mode=0o700)
    files.written(files.place("kvzap", "abc"), weights(), FACTS)
    files.check_model("auto", "kvzap", MODEL)


def test_numbers_of_a_token_do_not_depend_on_others_and_follow_a_bias() -> None:
    x = torch.randn(30, 24)
    own = drawn("fastkvzip", 0, 24, 2, 2)
    found, order = fastkvzip(x, own), torch.randperm(30)
    torch.testing.assert_close(fastkvzip(x[order], own), found[:, order])
    assert ((found > 0) & (found < 1)).all()
    for b, end in ((1e4, 1.0), (-1e4, 0.0)):
        assert (fastkvzip(x, {**own, "b": torch.full((2, 1, 2), b)}) == end).all()
    assert kvzap(x, drawn("kvzap", 0, 24, 2, 2)).shape == (2, 30)


def test_another_file_of_the_same_name_is_another_observation() -> None:
    assert GateScores("kvzap", "g", "1") != GateScores("kvzap", "g", "2")
