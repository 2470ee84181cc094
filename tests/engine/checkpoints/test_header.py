"""A shape read from a header is the one that transformers' configuration gives, or none."""

import json
from pathlib import Path

import pytest
import transformers

from kvbench.engine.checkpoints.header import header_shape, shape_of_config
from kvbench.engine.checkpoints.load import read_shape
from kvbench.engine.errors import ConfigError
from kvbench.evals.cells import early_shape
from kvbench.evals.models import look_up
from kvbench.evals.settings import from_words
from kvbench.tests.tiny import COMMON, CONFIGS
from kvbench.tests.tiny_gguf import save_tiny_gguf


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_a_config_says_what_transformers_says_of_it_or_nothing(kind: str, tmp_path: Path) -> None:
    class_name, changes = CONFIGS[kind]
    getattr(transformers, class_name)(**(COMMON | changes)).save_pretrained(tmp_path)
    shape = header_shape("m", str(tmp_path))
    assert shape is None or shape == read_shape("m", str(tmp_path))
    assert kind != "llama" or shape is not None


def test_a_gguf_file_says_nothing_of_its_shape_and_is_refused_where_it_is_cut(tmp_path: Path) -> None:
    file = save_tiny_gguf(tmp_path / "tiny.gguf")
    assert header_shape("m", str(file)) is None
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="is damaged or incomplete"):
        header_shape("m", str(file))


def test_the_embedded_model_is_what_its_architecture_says() -> None:
    spec = from_words(["method=full"])
    assert early_shape(spec) == look_up(spec) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "other"}, {"num_key_value_heads": None}, {"hidden_size": "64"}, {"sliding_window": 8},
        {"layer_types": ["full_attention", "sliding_attention"]}, {"num_attention_heads": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_certain_is_not_said(changes: dict[str, object]) -> None:
    plain = {
        "model_type": "mistral", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 64, "max_position_embeddings": 128, "sliding_window": None,
    }  # fmt: skip
    assert shape_of_config(plain, "m") is not None
    assert shape_of_config(json.loads(json.dumps(plain | changes)), "m") is None


def test_a_model_that_is_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="model 'org/none' is no folder"):
        header_shape("m", "org/none")
