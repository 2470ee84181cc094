"""How much of the decode time a cut of the cache takes, for methods that compress while they answer.

    python -m kvbench.benchmarks.bench_cut
    python -m kvbench.benchmarks.bench_cut --device cuda --steps 640 --methods rkv,triattention

A model with layers of Llama-3.1-8B's shape and drawn weights decodes behind a prompt that fills the budget. Time of the
cuts is a span of its own within the steps; the model's head is left small, so that layers are what is measured.
"""

import argparse

import torch
import transformers

from kvbench.engine.books.spans import recording
from kvbench.engine.budget import BudgetRequest, Fraction
from kvbench.engine.checkpoints.load import shape_of
from kvbench.engine.declared import build_params
from kvbench.engine.decode import decode
from kvbench.engine.model import Model, register_attention
from kvbench.engine.prefill import prefill
from kvbench.evals.settings import from_words, load_class
from kvbench.tests.vectors import built

METHODS = "rkv,snapkv_decode,streamingllm_decode,h2o_decode,tova_decode,random_decode_unprotected,vase,triattention"


def llama_layers(n_layers: int, device: torch.device) -> Model:
    """Layers of Llama-3.1-8B with drawn weights in bfloat16."""
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=n_layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
    )  # fmt: skip
    torch.manual_seed(0)
    hf = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()
    register_attention()
    return Model(hf, None, shape_of(config, "llama-3.1-8b"), torch.bfloat16, device, "random-cut")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--steps", type=int, default=257)
    parser.add_argument("--methods", default=METHODS)
    given = parser.parse_args()
    device = torch.device(given.device)
    model = llama_layers(given.layers, device)
    ids = torch.randint(0, 1000, (given.budget,), generator=torch.Generator().manual_seed(0)).tolist()
    print(f"budget {given.budget}, interval {given.interval}, {given.layers} layers, {given.steps} steps, {device}")
    for name in given.methods.split(","):
        words = [f"method={name}", f"budget={given.budget}", f"method.interval={given.interval}"]
        words += ["method.protect_prompt=false"] if name == "triattention" else []
        settings = from_words(words)
        kind = load_class(settings.method)
        params = build_params(kind, settings.method.params, "method")
        request = BudgetRequest(None, given.budget, Fraction(0))
        variant = kind.variant_for(params, request, model.shape, given.budget)  # type: ignore[attr-defined]
        with model.hooked():
            trace = prefill(model, ids, variant.observations)
            row = built(variant.row(trace, given.steps))
            decode(model, trace, [built(variant.row(trace, 8))], max_new_tokens=8)  # warm
            with recording(device) as record:
                decode(model, trace, [row], max_new_tokens=given.steps)
        seconds = record.seconds("step")
        total, cut = sum(seconds.values()), seconds.get("compress", 0.0)
        print(f"{name:20} {1e3 * total / (given.steps - 1):8.2f} ms a step, cuts {100 * cut / total:5.2f} % of it")


if __name__ == "__main__":
    main()
