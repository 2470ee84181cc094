"""Of a checkpoint with eyes the text model alone is made, and answers as the whole does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.checkpoints.kinds import shape_of
from engine.checkpoints.load import image_ids, made, read_checkpoint, read_config
from engine.checkpoints.text import how_to_read, marks, text_part
from engine.errors import ConfigError
from engine.model import register_attention
from engine.passes.agreement import check_attention
from methods.full import Full
from tasks.base import Sample
from tasks.prompt import check_ids
from tests.architectures import COMMON, LOCAL_TOO, answers, generated, model_of, prompt

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' words about sizes of toys
EYES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
MARKS = {"image_token_id": 85, "image_token_index": 85, "video_token_id": 84, "boi_token_index": 82}
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (LOCAL_TOO | {"query_pre_attn_scalar": 8}, EYES),
    "mistral3": ({"model_type": "mistral", "sliding_window": None}, EYES | {"model_type": "pixtral", "head_dim": 16}),
    "llama4": (
        {"intermediate_size_mlp": 56, "attention_chunk_size": 28, "num_experts_per_tok": 1, "floor_scale": 16},
        EYES | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
}


def composite(name: str) -> Any:
    text, eyes = PARTS[name]
    given = {key: value for key, value in MARKS.items() if name != "gemma3" or key != "image_token_id"}
    return transformers.AutoConfig.for_model(name, text_config=COMMON | text, vision_config=eyes, **given)


def saved(name: str, folder: Path) -> Any:
    """The whole model with drawn weights, in a folder."""
    config = composite(name)
    hf = model_of(config, 1, transformers.AutoModelForImageTextToText)
    hf.save_pretrained(folder)
    return hf


@pytest.mark.parametrize("name", PARTS)
def test_the_text_model_alone_answers_as_the_whole_model(name: str, tmp_path: Path) -> None:
    whole = saved(name, tmp_path)
    config = read_config(str(tmp_path))
    assert not hasattr(config, "vision_config") and type(config).__name__.endswith(("TextConfig", "MistralConfig"))
    hf_and_info: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True, **how_to_read(whole.config)
    )
    hf, info = hf_and_info
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert not any("vision" in key for key, _ in hf.named_parameters())
    register_attention()
    model = made(hf.eval(), None, shape_of(hf.config, name), torch.float32, f"text-{name}")
    check_attention(model)
    assert answers(model, prompt(), [Full]) == [generated(whole, prompt())]
    assert read_checkpoint(name, str(tmp_path)).shape == model.shape


def test_a_model_without_eyes_and_one_whose_text_cannot_stand_alone_are_left_as_they_are() -> None:
    plain = transformers.AutoConfig.for_model("llama")
    assert text_part(plain) is plain and how_to_read(plain) == {} and not marks(plain)
    whole = transformers.AutoConfig.for_model("qwen2_5_vl")
    assert text_part(whole) is whole


def test_a_prompt_with_the_mark_of_an_image_is_refused(tmp_path: Path) -> None:
    composite("llama4").save_pretrained(tmp_path)
    found = image_ids(str(tmp_path))
    assert 85 in found
    sample = Sample(id="s", context="", question="", references=(), max_new_tokens=1)
    check_ids([3, 4], 89, sample, found)
    with pytest.raises(ConfigError, match="has the token 85, by which this model is shown an image"):
        check_ids([3, 85], 89, sample, found)
