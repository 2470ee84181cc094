"""`python run.py --check model=NAME`: what a model has and which methods run on it, before its weights are downloaded.

All of it is told by the model's configuration: its file on the hub or in a folder, or what conf/architecture has where
the hub does not answer. The model's own class runs once without numbers (`engine/checkpoints/kinds.py`), and each
method is asked as a run asks it, with a prompt of 4,096 tokens or what the window holds, or with the prompt and the
memory that are given in addition to the model: `tokens=32k memory=4GB`.

Not here: what fits into that memory (`evals/screen/room.py`), whether answers agree, which the loaded model is asked
(`engine/passes/agreement.py`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.engine import terminal
from kvbench.engine.books.width import PASS_VALUES, SHARE
from kvbench.engine.budget import token_bytes
from kvbench.engine.checkpoints.digests import digests_of
from kvbench.engine.checkpoints.kinds import Survey, check_compresses, kinds_of, survey
from kvbench.engine.checkpoints.load import empty_model, load_tokenizer, read_checkpoint, read_config, shape_of
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.rotations import rotary_dims
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.evals.cells import rules_and_params
from kvbench.evals.every import methods_for
from kvbench.evals.screen import check, room
from kvbench.evals.screen.fits import longest
from kvbench.evals.settings import ModelSpec, architecture, from_words
from kvbench.methods.rules import planned

OWN = "its own configuration"
BUDGETS = {"ratio": "ratio=0.2", "memory": "memory=0.25", "answer": f"budget={2 * room.PROMPT}"}  # in a command's words


@dataclass(frozen=True)
class Known:
    """A model of which no weight was read."""

    spec: ModelSpec
    config: Any
    checkpoint: Checkpoint
    told_by: str  # where the configuration comes from

    @property
    def shape(self) -> ModelShape:
        return self.checkpoint.shape

    @property
    def survey(self) -> Survey:
        return survey(self.config)

    @property
    def kinds(self) -> list[str]:
        return kinds_of(self.config, self.shape.name)


def main(words: Sequence[str]) -> int:
    """Print the screen; `ConfigError` for a model that KVBench refuses."""
    console = terminal.console(highlight=False)
    asked, words = room.asked(words)
    known = look(words)
    beside = [*room.facts(asked, known.shape)]
    console.print(check.grid([*facts(known), *beside]))
    s_prompt = asked.length(known.shape)
    budgets = BUDGETS if asked.memory is None else BUDGETS | asked.budgets(known.shape)
    verdicts = {name: refusal(name, budget, known, words, s_prompt) for name, budget in known_methods(budgets).items()}
    of = "" if asked == room.Asked() else f" at {s_prompt:,} tokens"
    of += "" if asked.memory is None else f" with {budgets['memory']}"
    runs = [name for name, why in verdicts.items() if why is None]
    by_tokens = [name for name in runs if asked.memory is not None and name in methods_for("answer")]
    rest = [name for name in runs if name not in by_tokens]
    console.print(check.grid([("run on it", f"{len(rest)} method{'s' * (len(rest) != 1)}{of}: {', '.join(rest)}")]))
    if by_tokens:
        console.print(check.grid([("and", f"at {budgets['answer']} of prompt and answer: {', '.join(by_tokens)}")]))
    refused = [(name, why) for name, why in verdicts.items() if why is not None]
    if refused and known.shape.choosing_layers:
        console.print(check.grid([("all others", refused[0][1])], "refused"))
    elif refused:
        console.print(check.grid(refused, "refused"))
    return 0


def look(words: Sequence[str]) -> Known:
    """The model that a command line names, by its configuration."""
    spec = from_words(["method=full", *words]).model
    given = architecture(spec)
    how: dict[str, Any] = {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}
    try:
        checkpoint = read_checkpoint(spec.name, spec.id, **how)
        config, told_by = read_config(spec.id, **how), OWN
    except ConfigError as error:
        if given is None or not is_not_had(error):
            raise
        config, told_by = read_config(spec.id, given), "conf/architecture, as the hub does not answer"
        digests = digests_of(spec.id, spec.revision)
        checkpoint = Checkpoint(shape_of(config, spec.name), digests, rotary_dims(empty_model(config)))
    check_compresses(checkpoint.shape)
    if told_by == OWN and Path(spec.id).expanduser().is_dir():  # of a name on the hub nothing more is downloaded
        load_tokenizer(spec.id, **how)
    return Known(spec, config, checkpoint, told_by)


def is_not_had(error: ConfigError) -> bool:
    """Whether a model's files could not be had, and nothing is said against the model."""
    return "could not be had from the hub" in str(error)


# --- what it has ---------------------------------------------------------------------------------


def facts(known: Known) -> Iterator[tuple[str, str]]:
    """Lines of the screen."""
    shape, spec, n_weights = known.shape, known.spec, known.survey.n_weights
    revision = f" at {spec.revision[:12]}" if spec.revision else ""
    yield "model", f"{shape.name}: {spec.id}{revision}, told by {known.told_by}"
    n = longest(shape, n_weights, check.free_bytes(), 2, SHARE, PASS_VALUES)
    yield "weights", f"{n_weights / 1e9:,.2f} billion numbers of its text model, {check.gb(2 * n_weights)} in 16 bits"
    yield "window", f"{shape.window:,} tokens; longest prompt here, in 16 bits: {check.tokens(n, shape.window)}"
    yield "layers", layers(known)
    yield "a token" if shape.choosing_layers else "compressed", of_a_token(shape)
    if extras := [*particulars(known)]:
        yield "and", "; ".join(extras)
    if shape.choosing_layers:
        yield "cache", f"{check.gb(shape.left_bytes(shape.window))} at {shape.window:,} tokens, with what it chooses by"
        return
    each = token_bytes(shape) * len(shape.attention_layers)
    yield "K and V", f"{each:,} bytes a token in 16 bits, {check.gb(each * shape.window)} at {shape.window:,} tokens"
    if left := shape.left_bytes(shape.window):
        part = shape.compressed_share(shape.window)
        yield "beside them", f"{left / 1e6:,.1f} MB at {shape.window:,} tokens that no method changes"
        yield "so", f"methods compress {part:.1%} of what a text of {shape.window:,} tokens takes"


def layers(known: Known) -> str:
    """How many there are of each kind."""
    names = Counter(known.kinds)
    n, of = len(known.shape.attention_layers), known.shape.n_layers
    if known.shape.choosing_layers:
        every = ", ".join(f"{n} {kind}" for kind, n in names.items())
        return f"{every}: the model chooses by itself what it attends to, and methods compress nothing of it"
    left = [f"{names[kind]} {kind}" for kind in names if kind not in ("full_attention", "hybrid")]
    rest = f"; left as they are: {', '.join(left)}" if left else ""
    return f"{n} of {of} are compressed{rest}"


def of_a_token(shape: ModelShape) -> str:
    """What a layer keeps of a token that no window forgets."""
    if shape.is_latent and shape.d_h == shape.d_v:
        return f"one row of {shape.d_h} numbers that is key and value, for {shape.h} query heads"
    if shape.is_latent:
        return (
            f"one latent of {shape.d_v} numbers and a rotary key of {shape.d_h - shape.d_v} a token, for "
            f"{shape.h} query heads"
        )
    widths = f"{shape.d_h}" if shape.d_h == shape.d_v else f"{shape.d_h} (keys) and {shape.d_v} (values)"
    return f"{shape.h_kv} KV heads of {widths} numbers, {shape.h} query heads"


def particulars(known: Known) -> Iterator[str]:
    """What else methods meet in a layer of the model."""
    if known.shape.readers:
        yield f"{len(known.shape.readers)} layers read K and V of others, which count once"
    if known.shape.hybrid_layers:
        yield f"{len(known.shape.hybrid_layers)} of them keep a state beside K and V"
    if known.shape.is_capped:
        yield "logits are capped"
    if any(call.has_sink for call in known.survey.calls):
        yield "each head has a learned sink"
    if not known.checkpoint.n_rotary:
        yield "no rotation of queries is known before it is loaded"


# --- which methods run on it ---------------------------------------------------------------------


def known_methods(budgets: Mapping[str, str] = BUDGETS) -> dict[str, str]:
    """Every method of ours, and the budget that it takes in the words of a command."""
    return {name: words for takes, words in reversed([*budgets.items()]) for name in methods_for(takes)}


def refusal(name: str, budget: str, known: Known, words: Sequence[str], s_prompt: int | None = None) -> str | None:
    """Why a method cannot run on this model; None where nothing speaks against it before weights are read."""
    settings = from_words([f"method={name}", budget, *words])
    shape = known.shape
    try:
        rules, params = rules_and_params(settings.method)
        rules.check(params, settings.budget, shape)
        planned(rules, params, settings.budget, shape, s_prompt or room.Asked().length(shape))
        rules.check_model(params, known.checkpoint)
    except ConfigError as error:
        return str(error)
    return None
