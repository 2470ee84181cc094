"""Samples of a run answered a second time on this machine: the only thing that shows who gave an answer.

Which samples is drawn when it is asked, so that nobody knows it before. In float32 on a CPU an answer and its ledger
are the same alone and with others, and a difference is found. Elsewhere the order of sums may decide between two
tokens that are nearly as likely: there a difference is said, and proves nothing.

Not here: what may be run at all (`check.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import SystemRandom
from typing import Any

from kvbench.engine.errors import ConfigError, RunError
from kvbench.evals.cells import ask
from kvbench.evals.submission.check import LEVELS, Checked, read_safely, same
from kvbench.evals.submission.folder import Finding
from kvbench.evals.submission.settings import settings_of
from kvbench.results import SampleRow, read_samples

EXACT = ("float32", "cpu")
OF_THE_MACHINE = {"bytes_resident_device_actual", "bytes_prefill_peak"}  # of a line's ledger: what was allocated


def reproduce(root: Path, one: Checked, n: int, methods: Sequence[Path] = ()) -> None:
    """Answer `n` samples of a run again, drawn at random; what differs is found, or said where it proves nothing."""
    rows = read_samples(root / one.run)
    wanted = {row.sample_id for row in SystemRandom().sample(rows, min(n, len(rows)))}
    config = read_safely(root / one.run)
    try:
        again = {row.id: row for row in answers(config, wanted, root, methods)}
    except (ConfigError, RunError) as error:
        one.why.append(f"it cannot be run on this machine: {' '.join(str(error).split())[:200]}")
        return
    unlike = [(row, why) for row in rows if row.id in again and (why := difference(row, again[row.id]))]
    is_exact = (config.get("dtype"), config.get("device")) == EXACT
    for row, why in unlike:
        if is_exact:
            one.findings.append(Finding(one.run, "answer", f"sample {row.id!r:.60} {why} when it is asked again"))
        else:
            where = f"in {config.get('dtype')} on {config.get('device')}"
            one.why.append(
                f"sample {row.id!r:.60} {why} when it is asked again, which {where} the rows beside it may do"
            )
    one.n_again = len(wanted)
    if not unlike:
        one.level = LEVELS.index("reproduced")


def answers(config: Mapping[str, Any], wanted: set[str], root: Path, methods: Sequence[Path]) -> Iterator[SampleRow]:
    """The lines of some samples; no folder is made."""
    from kvbench.evals.answer import Answering
    from kvbench.evals.batch.reply import Reply
    from kvbench.evals.cells import check_loaded, ready_cells
    from kvbench.evals.lines import line_of
    from kvbench.evals.models import Models
    from kvbench.evals.prepare import Preparation
    from kvbench.evals.screen.progress import Progress

    settings = replace(settings_of(config, methods), out=root / "again", is_sweep=True)
    (cell,) = ready_cells(ask([settings]))
    if unlike := sorted(key for key in config.keys() | cell.config.keys() if config.get(key) != cell.config.get(key)):
        raise ConfigError(f"its {', '.join(unlike)[:100]} are others here")
    prepared = Preparation([cell])
    model = MODELS.setdefault("kept", Models()).get(cell.settings)
    check_loaded([cell], model.checkpoint)
    with Progress(f"{len(wanted)} samples again", len(wanted), 0) as progress:
        answering = Answering(model, cell, progress)
        for place in range(prepared.n):
            if prepared.samples[place].id in wanted:
                one = prepared.prepare(place, prepared.samples[place])
                with model.hooked():
                    for reply in answering.answer(one, cell.draws()):
                        if isinstance(reply, Reply):
                            yield line_of(one, reply)[0]


MODELS: dict[str, Any] = {}


def difference(said: SampleRow, again: SampleRow) -> str:
    """In which way two lines of one sample differ; "" where they do not, but for times and what was allocated."""
    if said.prompt_sha256 != again.prompt_sha256:
        return "has another prompt"
    if said.prediction != again.prediction:
        return "has another answer"
    if said.generated_tokens != again.generated_tokens or not same(said.score, again.score):
        return "has another length or score"
    keys = said.ledger.keys() & again.ledger.keys() - OF_THE_MACHINE
    unlike = sorted(key for key in keys if not same(said.ledger[key], again.ledger[key]))
    return f"has another {unlike[0]}" if unlike else ""
