"""Of a checkpoint with eyes the text model alone is made, or what reads text; it answers as the whole does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvbench.engine.checkpoints.kinds import shape_of, survey
from kvbench.engine.checkpoints.load import image_ids, load, made, read_checkpoint, read_config
from kvbench.engine.checkpoints.text import how_to_read, marks, text_part
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import register_attention
from kvbench.engine.passes.agreement import check_attention
from kvbench.methods.full import Full
from kvbench.tasks.base import Sample
from kvbench.tasks.prompt import check_ids
from kvbench.tests.architectures import COMMON, LATENT, LOCAL_TOO, answers, generated, model_of, prompt
from kvbench.tests.tiny_tokenizer import tiny_tokenizer

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


# Those whose text model transformers has no causal model for.
QWEN = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 48}
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}, QWEN),
    "qwen3_vl": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        QWEN | {"deepstack_visual_indexes": [0]},
    ),
    "mistral3": (
        LATENT | {"model_type": "mistral4", "first_k_dense_replace": 0, "head_dim": 16},
        EYES | {"model_type": "pixtral", "head_dim": 16},
    ),
}


def composite(name: str, parts: Any = PARTS) -> Any:
    text, eyes = parts[name]
    given = {key: value for key, value in MARKS.items() if name != "gemma3" or key != "image_token_id"}
    return transformers.AutoConfig.for_model(name, text_config=COMMON | text, vision_config=eyes, **given)


def saved(name: str, folder: Path, parts: Any = PARTS) -> Any:
    """The whole model with drawn weights, in a folder."""
    config = composite(name, parts)
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


@pytest.mark.parametrize("name", WHOLE)
def test_of_a_model_without_a_causal_text_model_the_parts_that_see_are_not_made(name: str, tmp_path: Path) -> None:
    whole = saved(name, tmp_path, WHOLE)
    tiny_tokenizer(None, adds_bos=True).save_pretrained(tmp_path)
    model = load(name, str(tmp_path), dtype="float32", device="cpu")
    apart = {key.split(".")[1] for key, _ in whole.named_parameters()} & {"visual", "vision_tower"}
    assert apart and not any(part in key for key, _ in model.hf.named_parameters() for part in apart)
    assert not any("projector" in key for key, _ in model.hf.named_parameters())
    assert answers(model, prompt(), [Full]) == [generated(whole, prompt())]
    assert read_checkpoint(name, str(tmp_path)).shape == model.shape
    assert survey(read_config(str(tmp_path))).n_weights == sum(x.numel() for x in model.hf.parameters())


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
