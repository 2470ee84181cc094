"""Checkpoints are found, and damaged ones are refused in a sentence."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.engine.checkpoints import conversion, header, load
from kvbench.engine.checkpoints.digests import cache_home, digest_of
from kvbench.engine.errors import ConfigError
from kvbench.tests.tiny_gguf import save_tiny_gguf
from kvbench.tests.tiny_run import save_tiny


@pytest.fixture
def tiny(own_cache: Path, tmp_path: Path) -> Path:
    """A small GGUF file that can be converted."""
    return save_tiny_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint in Hugging Face form."""
    return save_tiny(tmp_path / "checkpoint")


def test_a_digest_follows_weights_and_revision(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"a" * 100)
    before = digest_of(str(tmp_path), None)
    assert digest_of(str(tmp_path), None) == before
    (tmp_path / "model.safetensors").write_bytes(b"b" * 100)
    assert digest_of(str(tmp_path), None) != before
    assert digest_of("org/name", "v1") != digest_of("org/name", "v2")


def test_code_of_a_checkpoint_runs_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load.locate(str(tmp_path), None, False) == (str(tmp_path), {"trust_remote_code": False})
    assert load.locate("org/name", "v1", True) == ("org/name", {"trust_remote_code": True, "revision": "v1"})


@pytest.mark.parametrize(
    ("flags", "kind"), [("avx2 avx512f", "float32"), ("avx512_bf16", "bfloat16"), ("amx_bf16", "bfloat16")]
)
def test_auto_is_bfloat16_only_where_the_cpu_multiplies_it(
    flags: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self, *_, **__: f"flags\t\t: fpu {flags}")
    assert load.resolve_dtype("auto", "cpu") == kind
    assert load.resolve_dtype("float16", "cpu") == "float16"


def test_a_missing_embedded_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="make setup"):
        header.embedded_file()


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load.locate(str(tmp_path), None, False)


def test_a_shape_is_read_without_a_conversion(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_convert_gguf", lambda *_: pytest.fail("converted"))
        shape = load.read_shape("tiny", str(tiny))
    assert (shape.n_layers, shape.h, shape.h_kv, shape.d_h, shape.window) == (2, 4, 2, 8, 256)
    conversion.from_gguf(tiny)
    assert load.read_shape("tiny", str(tiny)) == shape


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_a_layer(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if "layers.1." not in key}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def with_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


DAMAGES: dict[str, Callable[[Path], object]] = {
    "weights cut": lambda folder: cut(folder / "model.safetensors"),
    "weights empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "weights with a huge header": lambda folder: (folder / "model.safetensors").write_bytes(
        b"\xff" * 7 + b"\x00" + bytes(100)
    ),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "a layer lost": without_a_layer,
    "config cut": lambda folder: cut(folder / "config.json"),
    "config no object": lambda folder: (folder / "config.json").write_text("[]"),
    "config no text": lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"),
    "config deep": lambda folder: (folder / "config.json").write_text('{"a":' * 100_000),
    "config less deep": lambda folder: (folder / "config.json").write_text('{"a":' * 900 + "1" + "}" * 900),
    "config empty": lambda folder: (folder / "config.json").write_text("{}"),
    "a billion layers": with_config(num_hidden_layers=10**9),
    "no heads": with_config(num_attention_heads=0),
    "heads in words": with_config(num_attention_heads="six"),
    "no number of layers": with_config(num_hidden_layers=None),
    "another size": with_config(hidden_size=96),
    "an unknown architecture": with_config(model_type="unheard-of"),
    "a nameless architecture": with_config(model_type=[1]),
    "tokenizer cut": lambda folder: cut(folder / "tokenizer.json"),
    "tokenizer of another kind": lambda folder: (folder / "tokenizer.json").write_text("[]"),
    "tokenizer deep": lambda folder: (folder / "tokenizer.json").write_text("[" * 100_000),
    "tokenizer settings cut": lambda folder: cut(folder / "tokenizer_config.json"),
}


@pytest.mark.filterwarnings("ignore")  # of libraries that look at damaged files
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_one_sentence(folder: Path, damage: Callable[[Path], object]) -> None:
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        load.read_shape("tiny", str(folder))
        load.load("tiny", str(folder), dtype="float32", device="cpu")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_transformers_without_a_name_is_not_the_checkpoints_fault(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.cache_utils

    monkeypatch.delattr(transformers.cache_utils, "get_layer_types_and_kwargs")
    with pytest.raises(
        ConfigError, match=r"cannot be loaded with transformers 5\S* \(cannot import name.*--check"
    ) as refused:
        load.read_shape("tiny", str(tiny))
    assert "again" not in str(refused.value)


def test_a_huge_configuration_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "config.json").open("r+b") as file:
        file.truncate(header.MAX_CONFIG + 1)
    with pytest.raises(ConfigError, match=r"config\.json is no model's configuration"):
        load.read_shape("tiny", str(folder))


@pytest.mark.parametrize("name", ["notes.txt", "model.gguf", "model.safetensors"])
def test_a_plain_file_that_is_no_gguf_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(ConfigError, match="is no GGUF file"):
        load.read_shape("x", str(tmp_path / name))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no file"):
        load.read_shape("x", str(tmp_path / "pipe"))


def test_a_damaged_conversion_says_what_to_delete(tiny: Path) -> None:
    folder = conversion.from_gguf(tiny)
    cut(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"delete {folder}, which is made anew"):
        load.load("tiny", str(tiny), dtype="float32", device="cpu")


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.filterwarnings("ignore")
def test_a_gguf_file_with_flipped_bytes_is_converted_or_refused(tiny: Path, data) -> None:
    changed = bytearray(save_tiny_gguf(tiny).read_bytes())
    header = changed.index(b"blk.1.ffn_down.weight")
    for at in data.draw(st.lists(st.integers(0, header), min_size=1, max_size=3)):
        changed[at] ^= data.draw(st.sampled_from([1, 0x10, 0x80]))
    tiny.write_bytes(changed)
    try:
        load.load("tiny", str(tiny), dtype="float32", device="cpu")
    except ConfigError as error:
        assert "\n" not in str(error)
    assert not list((cache_home() / "models").glob("*.making"))
