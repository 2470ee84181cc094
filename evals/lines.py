"""What is written of a sample and of a run: a line of samples.jsonl, the facts of result.json.

Not here: how they are written (`results`), means over samples (there, too).
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import fmean, median
from typing import Any

from kvbench.engine.books.audit import uncounted_bytes
from kvbench.engine.books.ledger import Entry
from kvbench.engine.books.strip import attended_bins
from kvbench.engine.budget import exact, show, token_bytes
from kvbench.engine.checkpoints.packages import out_of_bounds
from kvbench.engine.machine import left_out
from kvbench.engine.sampling.spec import draw_id
from kvbench.evals.batch.reply import Reply, TurnReply
from kvbench.evals.cells import Cell
from kvbench.evals.prepare import PreparedSample
from kvbench.evals.screen.progress import Standing
from kvbench.methods.base import SelectiveAttention, reported
from kvbench.methods.reuse import comm_mean
from kvbench.results import (
    EVICT,
    EXACT,
    METRICS,
    OFF,
    RunFacts,
    SampleRow,
    combined,
    config_hash,
    environment,
    peak_rss_bytes,
)
from kvbench.tasks.base import Sample
from kvbench.tasks.prompt import Prompt
from kvbench.tasks.turns.questions import one_question


def line_of(one: PreparedSample, reply: Reply) -> tuple[SampleRow, dict[str, list[int]] | None]:
    """The line of what a cell gave to a sample or to one of its turns, and its ledger as columns."""
    turn, sample, prompt = reply.turn, one.sample, one.prompt
    if turn is not None:
        sample = one_question(sample, turn.index)
    if reply.lost is not None:
        return lost_line(sample, prompt, one.sha, *reply.lost, reply.cell), None
    assert reply.row is not None, f"{reply.cell.label} has neither an answer nor a reason"
    if turn is None:
        line = answer_line(sample, prompt, one.sha, reply, reply.row)
    else:
        read = Prompt(prompt.context_ids, turn.feed_ids, prompt.frame)
        line = answer_line(sample, read, one.sha, reply, reply.row)
        columns = turn_columns(one.sample, reply.row, turn, line.score)
        columns["measures"] |= line.fields.get("measures", {})
        line = replace(line, fields=line.fields | columns)
    return line, reply.row.store.ledger.columns()


def answer_line(sample: Sample, prompt: Prompt, sha: str, reply: Reply, row: SelectiveAttention) -> SampleRow:
    """The line of a sample that was answered."""
    cell, answer, decoded, outcome = reply.cell, reply.answer, reply.decoded, reply.outcome
    n_steps = len(prompt.question_ids) + len(answer.ids) - 1
    steps = decoded.step_seconds[:n_steps] if outcome is None else decoded.step_seconds
    ledger = books_of(row)
    uncounted = uncounted_bytes(row) if row.store.checked_for else 0
    if uncounted:
        ledger["within_budget"] = False
    second_passes = row.variant.second_passes
    probe_s = sum(row.trace.second_passes[what].seconds for what in second_passes) if second_passes else None
    report = reported(row)
    score, measures = cell.task.verdict_now(sample, reply.text) if outcome is None else (outcome.score, {})
    return SampleRow(
        id=draw_id(sample.id, cell.draw),
        prompt_sha256=sha,
        prompt_tokens=len(prompt),
        original_prompt_tokens=int(sample.fields.get("original_prompt_tokens", len(prompt))),
        generated_tokens=len(answer.ids),
        prediction=reply.text,
        references=list(sample.references),
        score=score,
        status="ok",
        error=None,
        prefill_s=reply.prefill_s,
        decode_s=sum(steps),
        tpot_s=median(steps) if steps else None,
        batch_rows=len(decoded.answers),
        ledger=ledger
        | {
            "bytes_prefill_peak": row.trace.peak_tokens * token_bytes(row.trace.shape),
            "bytes_resident_device_actual": row.store.allocated_bytes(),
        },
        fields=own_columns(sample)
        | draw_columns(sample, cell)
        | ({} if outcome is not None else {"cut_off": not answer.stopped})
        | ({"measures": measures} if measures else {})
        | ({"bytes_uncounted": uncounted} if uncounted else {})
        | ({} if probe_s is None else {"probe_s": probe_s})
        | ({} if outcome is None else outcome.fields)
        | ({"metric": cell.task.metric} if cell.task.metric else {})
        | ({"scores_later": True} if cell.task.scores_later else {})
        | prefill_columns(row, cell)
        | ({} if decoded.by_graphs is None else {"by_graphs": decoded.by_graphs})
        | ({} if decoded.why_no_graphs is None else {"why_no_graphs": decoded.why_no_graphs})
        | ({"kernels_left_out": out} if (out := left_out()) else {})
        | {"variant": variant_words(cell, report, float(row.budget.index_share))}
        | ({"method_report": report} if report else {})
        | ({"attended_bins": bins} if (bins := attended_bins(row.store.layers.values())) else {}),
    )


def variant_words(cell: Cell, report: dict[str, Any], index_share: float = 1) -> str:
    """The variant's label, and what its byte budget chose for this prompt: no label can say that beforehand."""
    chosen = cell.rules.chosen(report) if report and cell.request.memory_alone else ""
    words = [cell.label, chosen, "(smaller index)" if index_share < 1 else ""]
    return " ".join(filter(None, words))


def books_of(row: SelectiveAttention) -> dict[str, float | int | bool | None]:
    """The ledger of an answer, as the sample's line has it."""
    in_mean, whole = row.traits.keeps_budget_in == "mean" or row.budget.counts == "mean", row.skipped
    n_searching = None if row.store.handed is None else len(row.store.handed.reuse.anchors)
    return row.store.ledger.summary(
        row.budget, row.trace.shape, whole, in_mean, not row.traits.drops, n_searching
    )  # fmt: skip


def prefill_columns(row: SelectiveAttention, cell: Cell) -> dict[str, Any]:
    """Columns for a prompt that was computed in part: the share, a sparse prefill's rule, what the method saw."""
    shares, rule = row.trace.layer_shares(), cell.sparsity
    if not shares:
        return {}
    columns: dict[str, Any] = {"prefill_share": fmean(shares), "prefill_shares": shares}
    if rule is None:
        return columns
    s, seen = row.trace.s_prompt, row.variant.observations
    columns["prefill_estimate"] = rule.estimate(s) if min(shares) < 1 else 0.0
    if any(what.of_all_weights for what in seen):
        columns["prefill_observed"] = rule.observe
    votes = max((min(s, what.looks_at or 0) for what in seen), default=0)
    if votes and min(shares) < 1:  # rows of last queries on all keys, computed anew
        columns["prefill_votes"] = votes * (2 * s - votes + 1) / (s * (s + 1))
    return columns


def lost_line(sample: Sample, prompt: Prompt, sha: str, status: str, reason: str, cell: Cell) -> SampleRow:
    """The line of a sample without an answer: one that did not fit ("oom"), or whose logits were NaN ("failed")."""
    return SampleRow(
        id=draw_id(sample.id, cell.draw),
        prompt_sha256=sha,
        prompt_tokens=len(prompt),
        original_prompt_tokens=int(sample.fields.get("original_prompt_tokens", len(prompt))),
        generated_tokens=0,
        prediction="",
        references=list(sample.references),
        score=None,
        status=status,
        error=reason,
        prefill_s=None,
        decode_s=None,
        tpot_s=None,
        batch_rows=1,
        ledger={},
        fields=own_columns(sample) | draw_columns(sample, cell),
    )


def turn_columns(sample: Sample, row: SelectiveAttention, turn: TurnReply, score: float | None) -> dict[str, Any]:
    """What a turn's line says besides every line's columns: how it was asked, what its feed and its answer attended to.

    `measures` has the score under the turn's name, so that a run has a mean for every turn.
    """
    assert sample.conversation is not None, sample.id
    asking, store, h = sample.conversation.asking, row.store, row.trace.shape.h
    n_fed = len(turn.feed_ids) * len(store.layers)
    return {
        "feed": asking.feed,
        "budget_base": asking.budget_base,
        "feed_tokens": len(turn.feed_ids),
        "bytes_rebuilt": store.ledger.rebuilt_bytes,
        "feed_s": turn.feed_s,
        "attended_by_feed": attended(store.ledger.entries[:n_fed], h),
        "attended_by_answer": attended(store.ledger.entries[n_fed:], h),
        "measures": {f"turn_{turn.index + 1}": score},
    }


def attended(entries: Sequence[Entry], h: int) -> float | None:
    """Tokens that a query head attended to, mean over steps and layers."""
    return fmean(entry.attended / h for entry in entries) if entries else None


def own_columns(sample: Sample) -> dict[str, Any]:
    """The task's columns, and the end of what was asked, which `shortened` left."""
    columns = {key: value for key, value in sample.fields.items() if key != "original_prompt_tokens"}
    evidence = "\n".join(sample.evidence)
    texts = {"evidence": evidence, "context": sample.context, "question": sample.question, "cue": sample.answer_prefix}
    shown = {key: text for key, text in texts.items() if text}
    return columns | ({"prompt_end": shown} if shown else {})


def draw_columns(sample: Sample, cell: Cell) -> dict[str, Any]:
    """Columns that say whose answer a line is, where a prompt has several."""
    return {} if cell.draw is None else {"sample": sample.id, "draw": cell.draw}


def standing(cell: Cell, rows: Sequence[SampleRow]) -> Standing:
    """A cell's score so far."""
    score, scale = combined(rows, cell.task.metric), METRICS[cell.task.metric or "score"].scale
    shown = None if score is None else scale * score
    n = len({row.sample_id for row in rows})
    return Standing(cell.settings.method.name, cell.request.label(), n, shown, cell.task.scores_later)


def prefill_notes(cell: Cell, rows: Sequence[SampleRow], share: float) -> list[str]:
    """What a reader has to know of a sparse prefill besides its share, or of one that drops tokens."""
    rule, notes = cell.sparsity, list[str]()
    if cell.settings.evicts:
        notes.append(
            f"the prompt was read in chunks of {cell.settings.chunk:,} tokens, and what was dropped behind one was "
            "gone for the next: another thing than compression behind an exact prefill"
        )
    if rule is None:
        return notes
    if rule.density is not None and share > rule.density * Fraction(101, 100):
        notes.append(f"prefill.density={show(rule.density)} is less than what the prefill always computes")
    if any(row.fields.get("prefill_observed") == "kept" for row in rows):
        notes.append("what the method observed of all queries is of the pairs that the sparse prefill computed")
    if votes := [row.fields["prefill_votes"] for row in rows if "prefill_votes" in row.fields]:
        notes.append(f"votes of the last queries look at {fmean(votes):.3f} of the pairs on top, exactly")
    if rule.asks_last and cell.settings.scope == "context_only":
        notes.append("the prefill chose by the context's last queries, and the question was not among them")
    return notes


def chosen_of(cell: Cell, rows: Sequence[SampleRow]) -> list[str]:
    """What a byte budget alone chose of the method's own numbers for its prompts, which the label cannot say."""
    names = dict.fromkeys(row.fields["variant"] for row in rows if "variant" in row.fields)
    return [words for name in names if (words := name.removeprefix(cell.label).strip(" ()"))]


def facts(cell: Cell, rows: Sequence[SampleRow]) -> RunFacts:
    """Facts on a run besides its scores."""
    settings, notes = cell.settings, list(cell.task.notes)
    shares = [row.fields["prefill_share"] for row in rows if "prefill_share" in row.fields]
    if shares:
        notes.append(f"the prefill computed {fmean(shares):.3f} of the pairs of query and key, and is approximate")
        notes += prefill_notes(cell, rows, fmean(shares))
    if uncounted := [row.fields["bytes_uncounted"] for row in rows if "bytes_uncounted" in row.fields]:
        notes.append(
            f"it holds up to {max(uncounted) / 1e6:.1f} MB in tensors of its own, far more than it counts: its budget "
            "does not hold"
        )
    others = cell.shape.n_layers - len(cell.shape.kept_layers)
    if n_choosing := len(cell.shape.choosing_layers):
        notes.append(
            f"the model itself chooses what {n_choosing} of its {cell.shape.n_layers} layers attend to: this is the "
            "model as it is, and what its index reads is counted as such"
        )
    if others:
        notes.append(f"{others} of {cell.shape.n_layers} layers are no full attention and were left as they are")
    if cell.shape.hybrid_layers:
        notes.append(f"{len(cell.shape.hybrid_layers)} layers have a state beside attention, which was left as it was")
    n_read = [row.prompt_tokens + row.generated_tokens for row in rows if row.prompt_tokens]
    compressed = cell.shape.compressed_share(round(fmean(n_read))) if n_read else 1.0
    compressed = 1.0 if cell.shape.choosing_layers else compressed
    if compressed < 1:
        notes.append(
            f"compressed layers hold {compressed:.0%} of the cache's bytes at {fmean(n_read):,.0f} tokens: budgets and "
            "ratios are over these"
        )
    if (reuse := cell.reuse) is not None:
        comm, anchors = cell.of_layer.comm, ", ".join(map(str, reuse.anchors))
        shares = "" if comm is None else f": comm={show(comm)} of each, {float(comm_mean(comm, reuse)):.4g} over all"
        notes.append(
            f"{len(reuse.behind)} layers searched nothing and attended to what {len(reuse.anchors)} chose "
            f"({anchors}){shares}"
        )
    notes += [f"the byte budget chose {words}" for words in chosen_of(cell, rows)]
    if settings.model.check == "never":
        notes.append("KVBench's attention was not compared with transformers' own (model.check=never)")
    if settings.device.startswith("cuda") and (words := out_of_bounds("triton")):
        notes.append(f"{words}: no kernel was tried with it")
    notes += dict.fromkeys(
        f"decode steps ran without CUDA graphs: {row.fields['why_no_graphs']}"
        for row in rows
        if "why_no_graphs" in row.fields
    )
    notes += dict.fromkeys(
        f"torch did the work of the kernel {op}: {why}"
        for row in rows
        for op, why in row.fields.get("kernels_left_out", {}).items()
    )
    errors = [row.error for row in rows if row.status == "failed" and row.error is not None]
    if errors:
        notes.append(f"{len(errors)} of {len(rows)} samples have no answer: {errors[0]}")
    prefill, prefill_params = EXACT, dict[str, Any]()
    if settings.evicts:
        prefill, prefill_params = EVICT, {"chunk": settings.chunk}
    elif settings.prefill is not None:
        prefill, prefill_params = settings.prefill.name, dict(settings.prefill.params)
    return RunFacts(
        method=settings.method.name,
        method_label=cell.label,
        params=dict(settings.method.params),
        task=settings.task.name,
        task_version=cell.task.version,
        dataset=cell.task.dataset,
        data_source=cell.task.data_source,
        model=settings.model.name,
        compressed_layers=list(cell.shape.attention_layers),
        dtype=settings.dtype,
        device=settings.device,
        seed=settings.seed,
        ratio_exact=None if settings.budget.ratio is None else exact(settings.budget.ratio),
        budget=settings.budget.tokens,
        comm_exact=OFF if settings.budget.comm is None else exact(settings.budget.comm),
        protocol=settings.scope if cell.task.asking is None else cell.task.asking.label,
        config_hash=config_hash(cell.config),
        versions=environment()["versions"],
        git_sha=environment()["git_sha"],
        peak_rss_bytes=peak_rss_bytes(),
        notes=notes,
        metric=cell.task.metric,
        prefill=prefill,
        prefill_params=prefill_params,
        budget_counts=(settings.budget.counts or "target") if cell.rules.traits.of_answers else None,
        sampling=settings.sampling.identity(),
        allocator=None if settings.allocator is None else settings.allocator.label(),
        reuse=None if settings.reuse is None else settings.reuse.label,
        keeping=cell.post_processing.label() or None,
        adapts=cell.traits.adapts,
        memory_exact=None if settings.budget.memory is None else exact(settings.budget.memory),
        key_share=None if cell.shape.key_share == Fraction(1, 2) else exact(cell.shape.key_share),
        compressed_share=None if compressed == 1 else round(compressed, 6),
    )
