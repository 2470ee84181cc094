"""Random models of a few thousand weights, in the architectures whose attention KVBench must fit."""

from typing import Any

import torch
import transformers

from kvbench.engine.checkpoints.load import shape_of
from kvbench.engine.model import Model, register_attention

COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 96,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
PATTERN = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
                                                       "original_max_position_embeddings": 128}}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-sliding": ("MistralConfig", {"sliding_window": 24}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 24, "layer_types": PATTERN, "query_pre_attn_scalar": 16}),
    "glm": ("GlmConfig", {"partial_rotary_factor": 0.5}),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 48, "num_key_value_heads": 6}),
}  # fmt: skip


def tiny(kind: str = "llama", seed: int = 0, **more: Any) -> Model:
    """A model of that architecture with random float32 weights; its tokenizer is missing."""
    class_name, changes = CONFIGS[kind]
    config = getattr(transformers, class_name)(**(COMMON | changes | more))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # transformers draws initial weights from the global generator
        hf = transformers.AutoModelForCausalLM.from_config(config)
        for weight in hf.parameters():  # larger than the usual initial weights, so that attention is not uniform
            if weight.ndim > 1:
                weight.data.normal_(std=0.25)
    hf.eval()
    hf.generation_config.eos_token_id = None  # answers have the length that was asked for
    register_attention()
    return Model(hf, None, shape_of(config, kind), torch.float32, torch.device("cpu"), "tiny")


def prompt(n: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 95, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
