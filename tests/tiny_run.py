"""Runs of a model of a few thousand weights through the same door as run.py, for the tests of tasks."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvbench.evals.composing import composition
from kvbench.evals.runner import run_cells
from kvbench.evals.settings import Settings, settings
from kvbench.results import RunResult, SampleRow, read_samples
from kvbench.tests.tiny import COMMON
from kvbench.tests.tiny_tokenizer import tiny_tokenizer

CONF = Path(__file__).resolve().parents[1] / "conf"
WINDOW = 1024


def save_tiny(folder: Path, window: int = 0) -> Path:
    """A random Llama with a tokenizer that puts a BOS in front, as a folder."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokenizer = tiny_tokenizer(None, adds_bos=True)
    changes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": window or WINDOW,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    config = LlamaConfig(**COMMON | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.data.normal_(std=0.25)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def example_file(folder: Path, name: str = "smallest_keys") -> Path:
    """The method that docs/adding-a-method.md starts from, in a file outside the repository."""
    return example_files(folder, name)[0]


def example_files(folder: Path, *names: str) -> list[Path]:
    """Methods of docs/adding-a-method.md, in files of these names: one that drops, then one that fetches."""
    text = (CONF.parent / "docs" / "adding-a-method.md").read_text()
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.py" for name in names]
    for path, code in zip(paths, re.findall(r"```python\n(.*?)```", text, re.DOTALL), strict=False):
        path.write_text(code)
    return paths


def example_task(folder: Path) -> dict[str, Path]:
    """What docs/adding-a-task.md shows, in files outside the repository, by their names."""
    text = (CONF.parent / "docs" / "adding-a-task.md").read_text()
    folder.mkdir(parents=True, exist_ok=True)
    names = {"json": "notices.jsonl", "yaml": "notices.yaml", "python": "phone_book.py"}
    for kind, name in names.items():
        (folder / name).write_text(re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)[0])
    return {name: folder / name for name in names.values()}


def cell(words: Sequence[str], out: Path, is_sweep: bool = False, device: str = "cpu") -> Settings:
    """Settings of one run, by the words of a command line; `method=` and `task=` are among them."""
    cfg = composition(CONF, (*words, "dtype=float32", f"device={device}"))
    return replace(settings(cfg, cfg.hydra.runtime.choices, is_sweep), out=out)


def run(words: Sequence[str], out: Path, device: str = "cpu") -> tuple[RunResult, list[SampleRow]]:
    """One run: its result and samples."""
    ((folder, result),) = run_cells([cell(words, out, device=device)])
    return result, read_samples(folder)


def sweep(
    words: Sequence[str], variants: Sequence[Sequence[str]], out: Path, device: str = "cpu"
) -> list[tuple[RunResult, list[SampleRow]]]:
    """Runs side by side, in the order of the variants."""
    done = run_cells([cell([*words, *variant], out, is_sweep=True, device=device) for variant in variants])
    return [(result, read_samples(folder)) for folder, result in done]
