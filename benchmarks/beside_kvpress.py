"""kvpress itself beside our words for its presses: the same needles, tokens and model, two scores for each.

    python -m kvbench.benchmarks.beside_kvpress prompts FILE             60 needles behind their texts, as tokens
    KVPRESS_PYTHON benchmarks/beside_kvpress.py answers FILE MODEL   adds what kvpress answers to FILE
    python -m kvbench.benchmarks.beside_kvpress scores FILE RUNS         both scores, and how many answers are alike

KVPRESS_PYTHON is an interpreter that has kvpress and the transformers that it wants, and nothing of ours. MODEL is the
folder of the embedded model as safetensors (`python run.py --check` names the cache folder). RUNS holds the runs of

    python run.py -m method=full,snapkv_kvpress,kvzip,keydiff_kvpress,expected_attention_kvpress ratio=0.25 comm=0 \\
        compression_scope=context_only task=needle task.source=embedded task.style=own task.lengths=[1000] \\
        task.depths=60 dtype=float32 out=RUNS

The context is compressed without the question, which is read through what stays: kvpress' usual order. Three quarters
of the keys go.

Not here: what differs between the two (docs/coming-from-kvpress.md).
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHARE = 0.75  # that goes
WORDS = (
    *("method=full", "task=needle", "task.source=embedded", "task.style=own", "task.lengths=[1000]", "task.depths=60"),
    *("compression_scope=context_only", "dtype=float32"),
)
PRESSES = {  # ours by name, and the press with its arguments
    "full": "",
    "snapkv_kvpress": "SnapKVPress",
    "kvzip": "KVzipPress",
    "keydiff_kvpress": "KeyDiffPress",
    "expected_attention_kvpress": "ExpectedAttentionPress",
}


def prompts(file: Path) -> None:
    """Write each needle's context, question and right answer."""
    from kvbench.evals.cells import ask, ready_cells
    from kvbench.evals.prepare import Preparation
    from kvbench.evals.settings import from_words

    preparation = Preparation(ready_cells(ask([from_words([*WORDS])])))
    found = []
    for i in range(preparation.n):
        one = preparation.prepare(i, preparation.samples[i])
        found.append(
            {
                "id": one.sample.id,
                "context": [*one.prompt.context_ids],
                "question": [*one.prompt.question_ids],
                "references": [*one.sample.references],
                "stop": sorted(one.stop_ids),
                "n_new": one.sample.max_new_tokens,
                "answers": {},
            }
        )
    file.write_text(json.dumps(found))


def answers(file: Path, model_folder: str) -> None:
    """Let kvpress answer, in its own environment."""
    import kvpress  # pyright: ignore[reportMissingImports]
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    rows = json.loads(file.read_text())
    for row in rows:
        for name, press_name in PRESSES.items():
            if name in row["answers"]:
                continue
            context, cache = torch.tensor([row["context"]]), DynamicCache()
            with torch.no_grad():
                if press_name:
                    with getattr(kvpress, press_name)(compression_ratio=SHARE)(model):
                        model.model(input_ids=context, past_key_values=cache)
                else:
                    model.model(input_ids=context, past_key_values=cache)
                ids = greedy(model, cache, row["question"], context.shape[1], row["n_new"], set(row["stop"]))
            row["answers"][name] = {"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=True)}
        file.write_text(json.dumps(rows))
        print(row["id"], {name: one["text"][:12] for name, one in row["answers"].items()}, flush=True)


def greedy(model: Any, cache: Any, question: Sequence[int], start: int, n_new: int, stop: set[int]) -> list[int]:
    """Answers through what stayed of the cache; positions go on behind the whole context."""
    import torch

    ids, found = torch.tensor([question]), list[int]()
    while len(found) < n_new:
        places = torch.arange(start, start + ids.shape[1]).unsqueeze(0)
        logits = model(input_ids=ids, past_key_values=cache, position_ids=places).logits
        start += ids.shape[1]
        best = int(logits[0, -1].argmax())
        if best in stop:
            break
        found.append(best)
        ids = torch.tensor([[best]])
    return found


def scores(file: Path, runs: str) -> None:
    """Print both scores of each press, and how many answers have the same words."""
    from kvbench.plots.pages.read import configured, samples_of
    from kvbench.results.sheet import Sheet, markdown

    rows = {row["id"]: row for row in json.loads(file.read_text())}
    found = []
    for name, press in PRESSES.items():
        ours = {
            line.id: line
            for folder, config in configured(Path(runs))
            if config["method"]["name"] == name
            for line in samples_of(folder)
        }
        both = [id for id in rows if id in ours and name in rows[id]["answers"]]
        theirs = [any(ref in rows[id]["answers"][name]["text"] for ref in rows[id]["references"]) for id in both]
        alike = sum(ours[id].prediction.strip() == rows[id]["answers"][name]["text"].strip() for id in both)
        mine = sum(float(ours[id].score or 0.0) for id in both)
        found.append([press or "full attention", name, f"{sum(theirs)}", f"{mine:g}", f"{alike} of {len(both)}"])
    heads = ["press", "here", "kvpress finds", "KVBench finds", "answers alike"]
    print(markdown(Sheet(heads, found, n_keys=2)))


if __name__ == "__main__":
    what, path, *more = sys.argv[1:]
    {"prompts": prompts, "answers": answers, "scores": scores}[what](Path(path), *more)  # type: ignore[operator]
