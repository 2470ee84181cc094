"""Runs of `task=serving`: each cell's engine, its trace, its folder, and what it cost.

Full attention is served twice: as vLLM ships it, and with what a method asks of vLLM (`RESTRICTED`). The step from one
to the other is what the restrictions cost, and the step from there to a method is what the method does.

A multirun ends with a table of its methods at the same memory (`results/served.py`).

Not here: the requests (`tasks/serving/`), steps (`serving/measure.py`), vLLM (`serving/adapter`).
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.terminal import say
from kvbench.evals.cells import Cell
from kvbench.evals.loop import Group
from kvbench.evals.prepare import PreparedSample
from kvbench.evals.runner import prepare
from kvbench.evals.settings import Settings
from kvbench.results import RunResult, SampleRow
from kvbench.results.opened import open_folders, results_of
from kvbench.results.served import FILE, METHOD, sheets
from kvbench.results.sheet import show
from kvbench.serving.adapter.versions import need_vllm
from kvbench.serving.order import Order, refuse
from kvbench.serving.rehearsal import rehearse
from kvbench.tasks.serving.task import Serving


def run_cells(cells: Sequence[Settings]) -> list[tuple[Path, RunResult]]:
    """Run cells; each one's folder and result, in their order."""
    need_vllm()
    ready = prepare(cells)
    orders = {cell.path: order_of(cell) for cell in ready}
    results: dict[Path, RunResult] = {}
    for cell in ready:
        with ExitStack() as stack:
            folders = open_folders([cell], stack, say)
            group = Group([cell])
            group.prepare()
            waiting = group.enter(folders)
            if group.cells:
                serve(cell, orders[cell.path], group, waiting)
            results |= results_of([cell], folders)
    done = [(cell.path, results[cell.path]) for cell in ready]
    for sheet in sheets(done) if len(done) > 1 else ():
        show(sheet)
    return done


def order_of(cell: Cell) -> Order:
    """The order to vLLM; `ConfigError` where the method cannot be served."""
    task = cell.task
    assert isinstance(task, Serving)
    settings = cell.settings
    refuse(cell)
    if settings.dtype != "float32":
        raise ConfigError(f"dtype={settings.dtype} has other pages in vLLM than are known; use dtype=float32")
    rung = task.params.rung
    if rung == "auto":
        rung = "dropping" if cell.traits.drops else "visible"
    return rehearse(Order(words_of(settings), rung))


def words_of(settings: Settings) -> tuple[str, ...]:
    """A command line that chooses the same method, budget and model."""
    budget, model = settings.budget, settings.model
    keys: dict[str, Any] = {"model": model.name if model.id == "embedded" else None, "method": settings.method.name}
    keys |= {f"method.{key}": value for key, value in settings.method.params.items()}
    comm = "null" if budget.comm is None else budget.comm
    keys |= {"ratio": budget.ratio, "budget": budget.tokens, "comm": comm, "compensate": budget.compensate}
    if model.id != "embedded":
        keys |= {"model": "any", "model.id": model.id, "model.name": model.name}
    if settings.allocator is not None:
        keys["allocator"] = settings.allocator.name
    keys["seed"] = settings.seed
    return tuple(
        f"{key}={word(value)}" for key, value in keys.items() if value is not None or key.startswith("method.")
    )


def word(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, Fraction):
        return f"{value}"
    return value if isinstance(value, str) else json.dumps(value)


def serve(cell: Cell, order: Order, group: Group, waiting: Sequence[PreparedSample]) -> None:
    """Serve the whole trace, and write the cell's lines and figures."""
    from kvbench.serving.adapter.front import BLOCK, RESTRICTED, Engine
    from kvbench.serving.measure import Load, Request, drive

    task = cell.task
    assert isinstance(task, Serving)
    params, every = task.params, group.samples or ()
    longest = max(len(one.prompt.context_ids) + one.sample.max_new_tokens for one in every)
    flags: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": params.at_once}
    if params.blocks is not None:
        flags["num_gpu_blocks_override"] = params.blocks
    requests = [
        Request(one.sample.id, one.prompt.context_ids, one.sample.max_new_tokens, float(one.sample.fields["arrival_s"]))
        for one in every
    ]
    load = Load(params.max_concurrency, params.warmups, params.goodput)
    model = model_folder(cell.settings)
    figures: dict[str, Any] = {}
    shipped = {"block_size": BLOCK}  # so that the pool is as large as the others'
    alone = {"as shipped": shipped, "with the method's restrictions": {**RESTRICTED, **params.flags}}
    for name, more in ({} if cell.traits.has_budget else alone).items():
        engine = Engine.start(None, model, **flags, **more)
        replies, found = drive(engine, requests, load)
        figures[name] = found.as_json() | {"score": score(cell, every, texts(engine, replies))}
        engine.close()
    engine = Engine.start(order, model, **flags, **params.flags)
    replies, found = drive(engine, requests, load)
    told, answers = engine.told(), texts(engine, replies)
    engine.close()
    figures[METHOD] = found.as_json() | {"score": score(cell, every, answers)}
    figures[METHOD] |= {"replays": told["replays"], "rung": order.rung, "slack": order.slack}
    books = {name.rpartition("-")[0]: value for name, value in told["books"].items()}
    folder = group.writer.folders[cell.path]
    missing = {one.sample.id for one in waiting}
    for one, reply, text in zip(every, replies, answers, strict=True):
        if one.sample.id in missing:
            folder.append(line(cell, one, reply, text, books.get(one.sample.id, {}), found.at_once), None)
    with folder.placing() as beside:
        (beside / FILE).write_text(json.dumps(figures, indent=1))
    group.finish()
    for name, values in figures.items():
        say(f"{cell.label}, {name}: {shown(values)}")


def texts(engine: Any, replies: Sequence[Any]) -> list[str]:
    """What the engine said."""
    tokenizer = engine.llm.get_tokenizer()
    return [tokenizer.decode(reply.ids, skip_special_tokens=True) for reply in replies]


def score(cell: Cell, every: Sequence[PreparedSample], answers: Sequence[str]) -> float:
    """The mean over requests."""
    return fmean(cell.task.score(one.sample, text) for one, text in zip(every, answers, strict=True))


def line(cell: Cell, one: PreparedSample, reply: Any, text: str, books: Mapping[str, Any], at_once: int) -> SampleRow:
    """The line of a request."""
    ledger = {key: value for key, value in books.items() if key != "s_prompt"}
    n = len(one.prompt.context_ids)
    timing = {"ttft_s": reply.ttft_s, "arrival_s": reply.request.at_s}
    timing |= {"e2el_s": reply.e2el_s, "client_queue_s": reply.queued_s}
    decode_s = reply.times[-1] - reply.times[0]
    return SampleRow(
        id=one.sample.id, prompt_sha256=one.sha, prompt_tokens=n, original_prompt_tokens=n,
        generated_tokens=len(reply.ids), prediction=text, references=list(one.sample.references),
        score=cell.task.score(one.sample, text), status="ok", error=None, prefill_s=reply.ttft_s, decode_s=decode_s,
        tpot_s=reply.tpot_s, batch_rows=at_once, ledger=ledger | {"bytes_resident_device_actual": None},
        fields={"length": n, "timing": timing, "prompt_tokens_cached": reply.n_cached},
    )  # fmt: skip


def shown(figures: Mapping[str, Any]) -> str:
    """The figures on one line."""
    ttft, tpot, goodput = figures["ttft_s"], figures["tpot_s"], figures["bench"]["request_goodput"]
    return (
        f"{figures['at_once']} at once, {figures['preemptions']} preempted, up to {figures['blocks_most']} of "
        f"{figures['blocks']} blocks, {figures['steps']} steps, {figures['tokens_per_s']:.1f} tokens/s, first token "
        f"{ttft['p50']:.2f} s (p99 {ttft['p99']:.2f}), then {1000 * tpot['p50']:.0f} ms (p99 {1000 * tpot['p99']:.0f})"
        + ("" if goodput is None else f", goodput {goodput:.2f} requests/s")
    )


def model_folder(settings: Settings) -> str:
    from kvbench.engine.checkpoints.load import locate

    spec = settings.model
    return locate(spec.id, spec.revision, spec.trust_remote_code)[0]
