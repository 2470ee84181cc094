"""A random Llama of a few thousand weights as a GGUF file, made in milliseconds.

Not here: anything of a real model; its tokenizer knows the bytes and a few words.
"""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from transformers.convert_slow_tokenizer import bytes_to_unicode

LETTERS = list(bytes_to_unicode().values())
WORDS = [*LETTERS, "th", "in", "<s>", "</s>"]
D, FF, LAYERS, HEADS, HEADS_KV = 32, 48, 2, 4, 2


def save_tiny_gguf(file: Path, seed: int = 0) -> Path:
    """Write the file."""
    draw = np.random.default_rng(seed)
    writer = GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS_KV)
    writer.add_rope_dimension_count(D // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([1] * (len(WORDS) - 2) + [3, 3])
    writer.add_token_merges(["t h", "i n"])
    writer.add_bos_token_id(len(WORDS) - 2)
    writer.add_eos_token_id(len(WORDS) - 1)
    kv = D // HEADS * HEADS_KV
    sizes = {"token_embd": (len(WORDS), D), "output": (len(WORDS), D), "output_norm": (D,)}
    for i in range(LAYERS):
        sizes |= {
            f"blk.{i}.attn_norm": (D,), f"blk.{i}.ffn_norm": (D,),
            f"blk.{i}.attn_q": (D, D), f"blk.{i}.attn_output": (D, D),
            f"blk.{i}.attn_k": (kv, D), f"blk.{i}.attn_v": (kv, D),
            f"blk.{i}.ffn_gate": (FF, D), f"blk.{i}.ffn_up": (FF, D), f"blk.{i}.ffn_down": (D, FF),
        }  # fmt: skip
    for name, size in sizes.items():
        writer.add_tensor(f"{name}.weight", draw.normal(0, 0.2, size).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
