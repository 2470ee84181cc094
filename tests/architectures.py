"""Tiny random models of the architectures that transformers has, and what KVBench makes of each.

    python -m kvbench.tests.architectures                 # a line for every causal model of transformers, two minutes
    python -m kvbench.tests.architectures qwen3_next gpt_oss
    python -m kvbench.tests.architectures --write         # all of them, into the table of docs/models.md

A model is *exact* where full attention says what `generate` says, alone and as three rows of a batch, where Oracle with
the whole budget says so too, and where the rotation that methods get moves queries as each compressed layer does. It is
*refused* where a `ConfigError` says why. Anything else is *wrong* or *broken*, and the exit code 1.

Prompts are longer than all windows and chunks. Some architectures cannot be built from the common values alone;
`VALUES` has what they need, and those that need more are listed as *not built*: nothing is said of them.
"""

import copy
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.checkpoints.load import made, shape_of
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError, one_line
from kvbench.engine.model import Model, register_attention
from kvbench.engine.passes.agreement import check_attention
from kvbench.engine.prefill import prefill
from kvbench.methods.dropping.streamingllm import StreamingLLM
from kvbench.methods.full import Full
from kvbench.methods.retrieving.oracle import Oracle
from kvbench.results.sheet import ABSENT, Cell, Sheet, Word, markdown

S, N_NEW, WINDOW, CHUNK, N_SINK = 75, 10, 20, 28, 4
MOST_WEIGHTS = 64_000_000
PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
START, END = "<!-- table: `python -m kvbench.tests.architectures --write` -->", "<!-- end of the table -->"
COMMON: dict[str, Any] = {
    "vocab_size": 89, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 384, "bos_token_id": 1, "eos_token_id": 88,
    "pad_token_id": 0, "tie_word_embeddings": False, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
LOCAL_TOO = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
STATE_TOO = {"layer_types": ["linear_attention", "full_attention"] * 2}
DELTA_RULE = STATE_TOO | {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 20, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 6, "first_k_dense_replace": 1,
}  # fmt: skip
INDEXED = LATENT | {"index_topk": 12, "index_head_dim": 8, "index_n_heads": 2}
SAME_HEADS = {"num_key_value_heads": 6}
# What an architecture needs beside the common values, or so that it has a layer of every kind.
VALUES: dict[str, dict[str, Any]] = {
    "afmoe": LOCAL_TOO | {"num_dense_layers": 1},
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "biogpt": SAME_HEADS,
    "cohere2": LOCAL_TOO,
    "axk1": LATENT,
    "axk2": INDEXED | {"gated_norm_rank": 4},
    "bailing_hybrid": LATENT | STATE_TOO | {"layer_group_size": 2, "qk_head_dim": 16},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": INDEXED,
    "deepseek_v4": {
        "num_key_value_heads": 1, "q_lora_rank": 20, "o_groups": 2, "o_lora_rank": 12, "index_n_heads": 2,
        "index_head_dim": 8, "index_topk": 3, "sliding_window": WINDOW, "hc_mult": 2,
        "layer_types": [
            "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {"heavily_compressed_attention": 16, "compressed_sparse_attention": 4},
    },
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": INDEXED,
    "hy_v4": INDEXED | {"head_dim": 16},
    "kimi_linear": LATENT | STATE_TOO | {"linear_head_dim": 8, "linear_num_heads": 6},
    "longcat_flash": LATENT | {
        "num_layers": 2, "ffn_hidden_size": 56, "moe_topk": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 24,
        "qk_head_dim": 16, "num_hidden_layers": None,
    },
    "mimo_v2_flash": {  # keys wider than values
        "head_dim": 12, "v_head_dim": 8, "sliding_window": WINDOW, "layer_types": ["full_attention"] * 4,
    },
    "minicpm3": LATENT,
    "youtu": LATENT,
    "exaone4": LOCAL_TOO,
    "falcon_h1": MAMBA | {"mamba_d_ssm": 96},
    "gemma2": LOCAL_TOO | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
    "gemma3n_text": {
        "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 89, "laurel_rank": 8, "intermediate_size": 56,
        "activation_sparsity_pattern": [0.0] * 6, "sliding_window": WINDOW,
    },
    "gemma3_text": LOCAL_TOO | {"query_pre_attn_scalar": 8},
    "gemma4_text": LOCAL_TOO | {
        "num_experts": None, "moe_intermediate_size": None, "global_head_dim": 16, "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 89,
    },
    "gpt2": {"num_key_value_heads": None},
    "gpt-sw3": {"num_key_value_heads": None},
    "gpt_oss": LOCAL_TOO,
    "gpt_neox": SAME_HEADS,
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 24},
    "jetmoe": {"num_attention_heads": None, "kv_channels": 8},
    "lfm2": {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {
        "intermediate_size_mlp": 56, "attention_chunk_size": CHUNK, "num_experts_per_tok": 1, "floor_scale": 16,
        "no_rope_layers": [1, 0, 1, 0], "attn_scale": 0.5,
    },
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 16},
    "minimax_m3_vl_text": {
        "dense_intermediate_size": 56, "shared_intermediate_size": 24, "rotary_dim": 8, "index_n_heads": 2,
        "index_head_dim": 8, "index_block_size": 8, "index_topk_blocks": 3,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    },
    "ministral": LOCAL_TOO,
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "modernbert-decoder": SAME_HEADS | {
        "local_attention": WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "nemotron_h": {
        "num_hidden_layers": 6, "layers_block_type": ["mamba", "moe", "attention"] * 2, "mamba_num_heads": 6,
        "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 24,
    },
    "olmo3": LOCAL_TOO,
    "opt": SAME_HEADS | {"ffn_dim": 56, "word_embed_proj_dim": 48},
    "phi3": {"sliding_window": None},
    "qwen2": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {"shared_expert_intermediate_size": 24},
    "qwen3_5_moe_text": DELTA_RULE,
    "qwen3_5_text": DELTA_RULE,
    "qwen3_next": DELTA_RULE,
    "qwen4_exp_text": DELTA_RULE | {
        "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
        "indexer_budget": 12, "indexer_compress_ratio": 4, "ngram_vocab_size_base": 200, "heads_per_ngram": 2,
        "split_ngram_parts": 2, "make_ngram_vocab_size_divisible_by": 8,
    },
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "starcoder2": {"sliding_window": None},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "mamba_expand": 2, "n_mamba_heads": 6,
        "mamba_ngroups": 1, "mamba_headdim": 16, "chunk_size": 16, "num_key_value_heads": 6, "num_mem_blocks": 1,
        "adapter_rank": 8, "use_mem_rope": True,
    },
}  # fmt: skip
# Types with eyes, ears or an encoder: their text models stand in the list too.
NOT_TEXT = {
    "gemma3",
    "gemma3n",
    "gemma4",
    "llama4",
    "qwen3_5",
    "qwen3_5_moe",
    "mllama",
    "emu3",
    "git",
    "fuyu",
    "got_ocr2",
}
SINCE = {  # transformers before that names these layers otherwise or not at all, or caches other things for them
    "deepseek_v32": "5.18",
    "deepseek_v4": "5.23",
    "gemma3n_text": "5.23",
    "hy_v4": "5.18",
    "qwen4_exp_text": "5.21",
}
SEEDS = range(1, 6)  # tried in turn until an answer is no single word


@dataclass(frozen=True)
class Found:
    """What became of one architecture."""

    name: str
    word: str  # exact, refused, wrong, broken, not built
    says: str = ""
    layers: str = ""  # compressed, of all


def quietly() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(50)


def config_of(model_type: str) -> Any:
    given = COMMON | VALUES.get(model_type, {})
    return transformers.AutoConfig.for_model(
        model_type, **{key: x for key, x in given.items() if x is not None or key not in COMMON}
    )


def model_of(config: Any, seed: int, made_by: Any = transformers.AutoModelForCausalLM) -> Any:
    """Drawn weights in float32 with which attention is neither uniform nor one token; it never stops by itself.

    It attends eagerly, by the formula of its own file: transformers' sdpa leaves out Gemma 2's cap before 5.21.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf = made_by.from_config(config, dtype=torch.float32, attn_implementation="eager")
    draw = torch.Generator().manual_seed(seed)
    for name, weight in hf.named_parameters():
        last = name.rpartition(".")[2]
        if weight.ndim > 1:
            weight.data.normal_(std=0.22, generator=draw)
        elif last not in ("A_log", "dt_bias", "D"):  # of states, which decay by them
            weight.data.add_(torch.empty_like(weight).normal_(std=0.1, generator=draw))
    head = hf.get_output_embeddings()
    if head is not None and head.weight is hf.get_input_embeddings().weight:  # else it says what it read
        head.weight.data.mul_(0.2)
    hf.eval()
    hf.generation_config.eos_token_id = None
    hf.generation_config.pad_token_id = 0
    return hf


def n_weights(config: Any) -> int:
    """Of the model, without making them."""
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return sum(weight.numel() for weight in hf.parameters())


def prompt(n: int = S) -> list[int]:
    return torch.randint(2, 80, (n,), generator=torch.Generator().manual_seed(3)).tolist()


def generated(hf: Any, ids: Sequence[int], n_new: int = N_NEW) -> list[int]:
    """What transformers says."""
    asked = torch.tensor([ids])
    with torch.inference_mode():
        out = hf.generate(
            asked, attention_mask=torch.ones_like(asked), max_new_tokens=n_new, min_new_tokens=n_new, do_sample=False
        )
    return out[0, len(ids) :].tolist()


def loaded(config: Any, hf: Any, name: str) -> Model:
    """As a run loads it; `ConfigError` where it refuses."""
    register_attention()
    model = made(hf, None, shape_of(config, name), torch.float32, f"tiny-{name}")
    if not model.shape.kept_layers:
        raise ConfigError(f"the model {name!r} has no layer that methods compress")
    check_attention(model)
    return model


def answers(
    model: Model, ids: Sequence[int], methods: Sequence[Any], n_new: int = N_NEW, ratio: Fraction = Fraction(1)
) -> list[list[int]]:
    """What methods, with a whole budget or a share, say in one batch."""
    params = {
        Full: Full.Params(),
        StreamingLLM: StreamingLLM.Params(N_SINK, "on_top", "original"),
        Oracle: Oracle.Params("group_sum", N_SINK, Fraction(1, 2), "on_top", "fair", "renormalise"),
    }
    request = BudgetRequest(ratio, None, Fraction(1, 2), False)
    variants = [kind.variant_for(params[kind], request, model.shape, len(ids)) for kind in methods]
    with model.hooked():
        trace = prefill(model, ids, [what for one in variants for what in one.observations])
    with torch.inference_mode():
        rows = [one.row(trace, n_new) for one in variants]
        for row in rows:
            for layer in trace.shape.attention_layers:
                row.build(layer)
            row.complete()
    with model.hooked():
        return [answer.ids for answer in decode(model, trace, rows, max_new_tokens=n_new).answers]


def look(model_type: str) -> Found:
    """Build one architecture, let it answer, and say what became of it."""
    try:
        config = config_of(model_type)
        if (n := n_weights(config)) > MOST_WEIGHTS:
            return Found(model_type, "not built", f"{n:,} weights, whose sizes have other names")
        ids, want = prompt(), list[int]()
        for seed in SEEDS:
            hf = model_of(config, seed)
            want = generated(hf, ids)
            if len({*want}) > 2:
                break
    except Exception as error:
        return Found(model_type, "not built", f"{type(error).__name__}: {one_line(error)}"[:150])
    layers = ""
    try:
        model = loaded(config, hf, model_type)
        layers = f"{len(model.shape.attention_layers)} of {model.shape.n_layers}"
        asked = {"one row": [Full], "three rows": [Full] * 3, "whole budget": [Full, Oracle]}
        if model.shape.choosing_layers:
            layers += f"; {len(model.shape.choosing_layers)} choose"
            del asked["whole budget"]
        apart = [what for what, kinds in asked.items() if any(said != want for said in answers(model, ids, kinds))]
    except ConfigError as error:
        return Found(model_type, "refused", str(error))
    except Exception as error:
        return Found(model_type, "broken", f"{type(error).__name__}: {one_line(error)}")
    return Found(model_type, "wrong" if apart else "exact", ", ".join(apart), layers)


def is_too_new(name: str) -> bool:
    """Whether the transformers that is installed is too old for this architecture; then it is refused."""
    return Version(transformers.__version__) < Version(SINCE.get(name, "0"))


def text_types() -> list[str]:
    """Names of all causal text models."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - NOT_TEXT)


def as_markdown(found: Sequence[Found]) -> str:
    """The table of docs/models.md, without what was not built: a row for what became of several alike."""
    alike = dict[tuple[str, str], list[str]]()
    for one in found:
        if one.word != "not built":
            why = one.says.partition(f"the model {one.name!r} ")[2].partition("; use a model")[0] or one.says
            why = re.split(r": logits differ | \(it knows ", why)[0]
            says = "as transformers answers" if one.word == "exact" else f"{one.word}: {why}"
            alike.setdefault((says, one.layers or ABSENT), []).append(one.name)
    rows: list[list[Cell]] = [
        [says, layers, Word(", ".join(alike[says, layers]), "code")] for says, layers in sorted(alike)
    ]
    return markdown(Sheet(["", "layers compressed", "architectures"], rows, n_keys=3))


def counted(found: Sequence[Found]) -> str:
    words = Counter(one.word for one in found)
    return ", ".join(f"{n} {word}" for word, n in words.most_common())


def write(found: Sequence[Found]) -> None:
    """Put the table into its place on the page."""
    head, start, rest = PAGE.read_text().partition(START)
    _, end, tail = rest.partition(END)
    assert start and end, f"{PAGE} has no place for the table"
    line = f"transformers {transformers.__version__}: {counted(found)}."
    PAGE.write_text(f"{head}{start}\n\n{line}\n\n{as_markdown(found)}\n\n{end}{tail}")


def main(words: Sequence[str]) -> int:
    quietly()
    names, found = [word for word in words if word != "--write"], list[Found]()
    for name in names or text_types():
        found.append(look(name))
        print(f"{name:26s} {found[-1].word:9s} {found[-1].says}", flush=True)  # noqa: T201
    print(counted(found))  # noqa: T201
    if "--write" in words:
        write(found)
    return 1 if any(one.word in ("wrong", "broken") for one in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
