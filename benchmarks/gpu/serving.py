"""Methods inside vLLM, where it is installed: `python -m kvbench.benchmarks.gpu.serving RUNG`.

vLLM starts with a small Llama of drawn weights, without a tokenizer, as shipped (`shipped`) or on a rung, and answers
some prompts by each method. Printed are the backend that vLLM chose and its pages, the blocks that were in use, and how
many answers are those of KVBench's own engine with the same weights, whole and in their first three tokens. On a CPU
all are. On a GPU sums in another order turn near ties, of which drawn weights have many: half of the beginnings will
do.

exit code: 0 it ran, all blocks came back, and answers agree; 1 not; 2 wrong input

Not here: whether answers are good, times (`task=serving`).
"""

import argparse
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kvbench.engine.checkpoints.load import load_random, read_config
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.serving.order import DROPPING, PAGES, VISIBLE, Order
from kvbench.serving.rehearsal import rehearse
from kvbench.tasks.latency import Timed, read

SHIPPED = "shipped"
BLOCK, N_NEW, LENGTHS = 16, 12, (200, 271, 333, 421, 512, 577, 640, 700)
HEAD = 3  # tokens of an answer's beginning: the first is full attention's
QUEST = "method=quest ratio=0.2 comm=1/4 method.comm_mode=native method.page_len=16 method.page_generated=true"
METHODS = {
    SHIPPED: ("method=full",),
    DROPPING: ("method=full", "method=snapkv ratio=0.2", "method=streamingllm ratio=0.2", "method=tova ratio=0.2"),
    VISIBLE: ("method=full", "method=snapkv ratio=0.2", "method=quest ratio=0.2 comm=1/8", "method=oracle ratio=0.2"),
    PAGES: (f"{QUEST} method.agg=group_mean",),
}
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "initializer_range": 0.08, "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip


def drawn(folder: Path, dtype: str) -> Model:
    """The model, and its checkpoint in the folder."""
    model = load_random("drawn", read_config("drawn", CONFIG), dtype="float32", device="cpu")
    model.hf.save_pretrained(folder)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind = getattr(torch, dtype)
    hf = type(model.hf).from_pretrained(folder, dtype=kind).eval().to(device)  # rotation stays in float32
    return replace(model, hf=hf, dtype=kind, device=device)


def own_answer(model: Model, order: Order, ids: Sequence[int]) -> list[int]:
    """KVBench's engine."""
    with torch.inference_mode(), model.hooked():
        trace, row = read(model, Timed(order.variant(len(ids))), ids, N_NEW)
        return decode(model, trace, [row], max_new_tokens=N_NEW).answers[0].ids


def steps(engine: Any, prompts: Sequence[Sequence[int]], name: str) -> tuple[list[list[int]], list[int]]:
    """Answers, and the blocks in use step by step."""
    free, used, said = engine.n_free, list[int](), dict[str, list[int]]()
    for i, ids in enumerate(prompts):
        engine.core.add_request(f"{name} {i}", {"prompt_token_ids": [*ids]}, engine.params(N_NEW))
    while engine.core.has_unfinished_requests():
        for output in engine.core.step():
            said[output.request_id] = [*output.outputs[0].token_ids]
        used.append(free - engine.n_free)
    return [said[f"{name} {i}"] for i in range(len(prompts))], used


def compare(
    engine: Any, model: Model, order: Order, prompts: Sequence[Sequence[int]], full: Sequence[Sequence[int]]
) -> bool:
    """Print how the engine's answers by a method compare; whether they are KVBench's."""
    label = order.chosen.label
    answers, used = steps(engine, prompts, label)
    own = [own_answer(model, order, ids) for ids in prompts]
    others = sum(a != b for a, b in zip(own, full, strict=True))
    pairs, n = [*zip(answers, own, strict=True)], len(prompts)
    same, begin = sum(a == b for a, b in pairs), sum(a[:HEAD] == b[:HEAD] for a, b in pairs)
    print(
        f"{label}: {same} of {n} answers are KVBench's, {begin} in their first {HEAD} tokens; {others} are others "
        f"than full attention's; blocks in use, step by step: {' '.join(map(str, used))}",
        flush=True,
    )
    return not used[-1] and (same == n if model.device.type == "cpu" else begin >= n / 2)


def serve(rung: str, dtype: str, backend: str | None) -> bool:
    """Whether all that was asked for was right."""
    os.environ["KVBENCH_SERVING_ON_GPU"] = "1"
    from kvbench.serving.adapter.front import Engine

    picked = random.Random(0)
    prompts = [[picked.randrange(2, CONFIG["vocab_size"]) for _ in range(n)] for n in LENGTHS]
    with tempfile.TemporaryDirectory() as folder:
        model = drawn(Path(folder), dtype)
        on_gpu = model.device.type == "cuda"
        flags: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": dtype, "max_model_len": 2048, "max_num_seqs": 8}
        flags |= {"gpu_memory_utilization": 0.2} if on_gpu else {}
        flags |= {"attention_backend": backend} if backend else {}
        shipped, block = rung == SHIPPED, BLOCK if on_gpu else 2 * BLOCK
        words = [(f"model={folder}", *each.replace("len=16", f"len={block}").split()) for each in METHODS[rung]]
        orders = [rehearse(Order(each, VISIBLE if shipped else rung), block) for each in words]
        engine = Engine.start(
            None if shipped else orders[0], folder, **flags, **({} if shipped else {"block_size": block})
        )
        for name, layer in engine.core.vllm_config.compilation_config.static_forward_context.items():
            print(f"{name}: {layer.attn_backend.full_cls_name()}, {layer.impl.kv_cache_dtype}, pages "
                  f"{[*layer.kv_cache.shape]} with strides {layer.kv_cache.stride()}", flush=True)  # fmt: skip
            break
        whole = Order((words[0][0], "method=full"), VISIBLE)
        well, full = list[bool](), [own_answer(model, whole, ids) for ids in prompts]
        for order in orders:
            if not shipped:
                engine.switch(order)
            well.append(compare(engine, model, order, prompts, full))
        engine.close()
    return all(well)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.benchmarks.gpu.serving", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("rung", choices=[*METHODS])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--backend", help="vLLM's name of its attention, such as FLASHINFER")
    asked = parser.parse_args(words)
    if find_spec("vllm") is None:
        print("vLLM is not installed here: nothing was started")
        return 0
    try:
        return int(not serve(asked.rung, asked.dtype, asked.backend))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception:  # whatever vLLM has to say
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(main())
