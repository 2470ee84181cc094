"""What cannot be asked together, and why: `GROUPS` of rows, each a condition and a sentence.

A row reads a `Case`: a method's traits and parameters, what else the command line says, and what is known of the model
at its stage. The command line, serving and `kvbench ls combinations` read these rows; what only numbers tell, such as a
budget that is too small, methods say themselves (`Rules.check`, `Rules.plan_for`).

Not here: values of single keys (`evals/settings.py`), who checks a cell and when (`evals/cells.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from string import Formatter
from typing import Any, NamedTuple

from kvbench.engine.budget import gigabytes
from kvbench.engine.errors import ConfigError
from kvbench.methods.traits import Traits

# What is known: the words alone; the model's header; its files, and once they are loaded its weights; and the words
# again, where vLLM is to serve.
COMMAND, SHAPE, MODEL, SERVING = "command", "shape", "model", "serving"
MOST_ANSWERS = 1_024  # to one prompt; papers draw up to 64, and a line of samples.jsonl is written for each


class Case:
    """What rows read. What is not given is as `settings` say it, or None."""

    def __init__(self, rules: Any, params: Any, settings: Any = None, **given: Any) -> None:
        self.rules, self.params, self.settings, self.given = rules, params, settings, given

    def __getattr__(self, name: str) -> Any:
        return self.given[name] if name in self.given else getattr(self.settings, name, None)

    @cached_property
    def traits(self) -> Traits:
        return self.rules.traits_of(self.params)

    @property
    def asking(self) -> Any:
        """How several turns are asked; None for a task of one."""
        return getattr(self.task, "asking", None)

    @property
    def is_divided(self) -> bool:
        """Whether an allocator gives layers or heads other numbers of tokens."""
        return self.allocator is not None and self.allocator.name != "uniform"

    @property
    def reads_whole(self) -> bool:
        """Whether nothing says that it may choose before it has seen the whole prompt."""
        return self.traits.unreadable is None and not self.traits.by_keys

    @property
    def spans_tokens(self) -> bool:
        """Whether codes are of several tokens at once, of which all layers and heads have to keep as many."""
        return self.quantizer is None or not self.quantizer.rules.traits.codes_singly

    def of_parts(self, trait: str) -> Iterator[str]:
        """Why not, of the methods that are asked at once: this one, its scorer, who makes codes."""
        scorer = getattr(self.params, "scorer", None)
        for one in (self, *(Case(x.rules, x.params) for x in (scorer, self.quantizer) if x is not None)):
            if why := getattr(one.traits, trait):
                yield why if trait == "turns_queries" else f"{one.rules.title} {why}"


Reasons = Sequence[tuple[Callable[[Case], Any], str]]  # of which the first that holds stands in a sentence


class Row(NamedTuple):
    """A combination that is refused. `says` has fields of the case and of `WORDS`."""

    when: Callable[[Case], Any]
    says: str  # `{why}` is what `when` returns, or the first of the reasons that holds
    stage: str = COMMAND
    names_cell: bool = False  # the sentence begins with the method and its budget
    reasons: Reasons = ()  # it is refused where one of them holds


WORDS: dict[str, Callable[[Case], Any]] = {
    "title": lambda c: c.rules.title,
    "model": lambda c: repr(c.shape.name),
    "task": lambda c: c.settings.task.name,
    "sampled": lambda c: "{}={}".format(*next(iter(c.sampling.identity().items()))),
    "answer_bytes": lambda c: answer_bytes(c),
    "n_choosing": lambda c: len(c.shape.choosing_layers),
    "n_readers": lambda c: len(c.shape.readers),
    "last_layer": lambda c: max(c.shape.attention_layers),
    "unturned": lambda c: ", ".join(map(str, c.checkpoint.unturned)),
}


def said(says: str, case: Case, why: Any = "") -> str:
    """A sentence of this case."""
    return says.format_map(_Fields(case, why))


class _Fields(dict[str, Any]):
    def __init__(self, case: Case, why: Any) -> None:
        super().__init__(why=why)
        self.case = case

    def __missing__(self, field: str) -> Any:
        return WORDS[field](self.case) if field in WORDS else getattr(self.case, field)


def in_general(says: str) -> str:
    """A sentence with the names of fields in place of what a case has there."""

    def name(field: str) -> str:
        words = [word for word in field.split(".") if word not in ("name", "title", "rules")]
        return "…" if field == "why" else (words or ["method"])[-1].upper()

    return "".join(text + (name(field) if field else "") for text, field, *_ in Formatter().parse(says))


def why(reasons: Reasons, case: Case) -> str:
    """The first of these reasons that holds; "" where none does."""
    return next((said(says, case, found) for when, says in reasons if (found := when(case))), "")


def refusals(rows: Sequence[Row], case: Case, stage: str | None = None) -> Iterator[tuple[Row, str]]:
    """The rows that refuse a case, at one stage or any, each with its sentence."""
    for row in rows:
        if row.stage == (stage or row.stage) and (found := row.when(case)):
            if not row.reasons or (found := why(row.reasons, case)):
                yield row, said(row.says, case, found)


def refuse(rows: Sequence[Row], case: Case, stage: str | None = None) -> None:
    """Raise `ConfigError` for the first of these rows that refuses the case."""
    for _, sentence in refusals(rows, case, stage):
        raise ConfigError(sentence)


# fmt: off

# --- reasons: why what a method keeps cannot be packed, changed, or chosen while a prompt is read -

UNCODABLE: Reasons = (
    (lambda c: c.spans_tokens and c.is_divided,
     "allocator={allocator.name} gives layers or heads other numbers of tokens"),
    (lambda c: c.traits.changes, "{title} makes codes itself, and nothing is packed twice"),
    (lambda c: not c.traits.drops and not c.traits.packs_host,
     "{title} drops no tokens, and has no host tier that could hold codes"),
    (lambda c: c.traits.prunes_prompt, "{title} has a prefill of its own"),
    (lambda c: c.traits.of_answers, "{title} goes on dropping while it decodes"),
    (lambda c: c.traits.drops and c.traits.skips and c.params.full_layers,
     "method.full_layers={params.full_layers} leaves layers whole; use 0 with it"),
    (lambda c: c.traits.drops and c.traits.is_query_wide, "each query head keeps tokens of its own"),
    (lambda c: c.spans_tokens and c.traits.allocator is not None and c.traits.allocator.name != "uniform",
     "{title} keeps other numbers of tokens in each layer or head"),
    (lambda c: c.spans_tokens and c.traits.uneven, "{why}"),
    (lambda c: c.traits.evicts or c.traits.uncodable, "{why}"),
)
UNCHANGEABLE: Reasons = (
    (lambda c: c.traits.unchangeable, "{why}"),
    (lambda c: not c.traits.drops, "{title} drops no tokens"),
    (lambda c: c.traits.changes, "{title} makes keys and values of its own"),
    (lambda c: c.traits.prunes_prompt, "{title} has a prefill of its own"),
    (lambda c: c.traits.of_answers, "{title} goes on dropping while it decodes"),
    (lambda c: c.traits.is_query_wide, "each query head keeps tokens of its own"),
    (lambda c: c.traits.unchangeable is None and c.traits.evicts, "{why}"),
)
UNSHARED: Reasons = (
    (lambda c: c.traits.unshared, "{title} {why}"),
    (lambda c: c.traits.drops or c.traits.changes, "{title} fetches nothing that another layer could"),
)
UNREADABLE: Reasons = (
    (lambda c: c.traits.unreadable, "{why}"),
    (lambda c: c.reads_whole and c.traits.prunes_prompt, "{title} has a prefill of its own"),
    (lambda c: c.reads_whole and c.traits.of_answers, "{title} compresses while it answers"),
    (lambda c: c.reads_whole and c.traits.drops, "{title} chooses by the whole prompt"),
    (lambda c: c.reads_whole, "{title} drops no tokens"),
    (lambda c: c.is_divided, "allocator={allocator.name} gives layers or heads other numbers of tokens"),
    (lambda c: c.compose, "compose={compose.name} makes codes of what an exact pass leaves"),
    (lambda c: c.settings and (c.settings.post_processing.positions or c.settings.post_processing.dropped),
     "positions and dropped change keys and values that an exact pass leaves"),
)

SILENT: Reasons = (
    (lambda c: not isinstance(getattr(c.task, "dataset", None), str), "dataset"),
    (lambda c: not isinstance(getattr(c.task, "data_source", None), str), "data_source"),
)
UNDRAWN: Reasons = (
    (lambda c: c.task.is_timed, "takes times"),
    (lambda c: c.task.is_forced, "reads a continuation"),
    (lambda c: c.asking, "asks several questions greedily"),
)
UNSERVED: Reasons = (
    (lambda c: c.prefill, "prefill="),
    (lambda c: c.evicts, "prefill.evict"),
    (lambda c: c.chunk, "prefill.chunk"),
    (lambda c: c.compose, "compose="),
    (lambda c: c.reuse, "reuse="),
    (lambda c: c.cache.tokens, "cache.tokens"),
    (lambda c: c.budget.memory, "memory="),
    (lambda c: c.budget.counts, "budget_counts="),
    (lambda c: not c.sampling.is_greedy, "temperature="),
    (lambda c: c.settings.post_processing.positions, "positions="),
    (lambda c: c.settings.post_processing.dropped, "dropped="),
    (lambda c: c.scope != "full_prompt", "compression_scope=context_only"),
    (lambda c: c.weights == "random", "weights=random"),
)

# --- the rows, by what is asked for ---------------------------------------------------------------

KEPT = (
    Row(lambda c: c.traits.has_budget and c.post_processing.changes,
        "method={method.name} cannot have {post_processing.asked}: {why}", reasons=UNCHANGEABLE),
    Row(lambda c: c.post_processing.changes and c.shape.is_latent,
        "{post_processing.asked} changes keys and values of each head, and the model {model} keeps one latent per "
        "token for all of them; leave it out", SHAPE, True),
    Row(lambda c: c.post_processing.positions != "kept" and not c.checkpoint.n_rotary,
        "positions={post_processing.positions} turns keys to other positions, and the model {model} has no rotary "
        "positions, or their angles depend on how long the text is; use kept", MODEL, True),
    Row(lambda c: c.post_processing.positions != "kept" and c.checkpoint.unturned,
        "positions={post_processing.positions} turns keys to other positions, and the model {model} has layers without "
        "positions ({unturned}); use positions=kept", MODEL, True),
)
NO_CHUNKS = "prefill.evict=true drops tokens between chunks of the prompt, and "
CHUNKS = (
    Row(lambda c: c.evicts, NO_CHUNKS + "method={method.name} cannot: {why}", reasons=UNREADABLE),
    Row(lambda c: not c.evicts and c.traits.reads_in_chunks,
        "method={method.name} with these parameters reads a prompt in chunks; give prefill.evict=true beside it"),
    Row(lambda c: c.evicts and c.shape.hybrid_layers,
        NO_CHUNKS + "the model {model} has a state beside attention in its layers; leave it out", SHAPE),
    Row(lambda c: c.evicts and c.shape.readers,
        NO_CHUNKS + "the model {model} has layers that attend to keys and values of another; leave it out", SHAPE),
)
ALLOCATION = (
    Row(lambda c: c.allocator and not c.traits.drops,
        "allocator={allocator.name} divides what a method keeps, and {title} keeps every token; leave it out",
        names_cell=True),
    Row(lambda c: c.allocator and not c.traits.is_scorer,
        "allocator={allocator.name} would replace the division that makes {title} what it is; use it with a scorer "
        "such as method=snapkv", names_cell=True),
    Row(lambda c: c.is_divided and c.traits.evicts,
        "allocator={allocator.name} divides the prompt once, and {why}", names_cell=True),
    Row(lambda c: c.is_divided and c.traits.comparable == "none" and c.allocator.pools and not c.allocator.force,
        "allocator={allocator.name} pools scores of different heads, and those of {title} do not compare; use uniform "
        "or pyramid, or allocator.force=true all the same", names_cell=True),
    Row(lambda c: c.is_divided and c.traits.comparable == "set" and c.allocator.of_heads != "uniform",
        "allocator={allocator.name} gives heads of a layer different counts, and {title} keeps one set for all of "
        "them; use uniform, pyramid or by_need", names_cell=True),
    Row(lambda c: c.allocator and c.allocator.of_heads != "uniform" and c.shape.is_latent,
        "allocator={allocator.name} divides tokens among KV heads, and the model {model} keeps one latent per token "
        "for all heads; use allocator=uniform or one that divides among layers", SHAPE, True),
)
PREFILL = (
    Row(lambda c: c.prefill and c.traits.prunes_prompt,
        "method={method.name} has a prefill of its own, which prefill={prefill.name} cannot make sparse; use "
        "prefill=exact with it"),
    Row(lambda c: c.prefill and c.shape.choosing_layers,
        "a sparse prefill has no meaning for the model {model}, which chooses by itself what it attends to; leave it "
        "away", SHAPE),
)
UNCOMPOSED = "method={method.name} cannot be composed with {compose.name}: "
COMPOSITION = (
    Row(lambda c: not c.compose and c.compose_order == "quantise_first" and c.traits.has_budget and not c.traits.adapts,
        "compose_order={compose_order} means nothing without compose; give compose=kivi"),
    Row(lambda c: c.quantizer and not c.quantizer.rules.traits.composes,
        "compose={compose.name} makes no codes of what another method keeps; use compose=kivi"),
    Row(lambda c: c.quantizer, UNCOMPOSED + "{why}", reasons=UNCODABLE),
    Row(lambda c: c.quantizer and not c.traits.drops and c.quantizer.token_code() is None,
        UNCOMPOSED + "{quantizer.rules.title} makes no codes of single tokens, which a step could fetch"),
    Row(lambda c: c.quantizer and c.quantizer.first and not c.traits.drops,
        "compose_order={compose_order} is for methods that drop tokens, and {title} drops none; leave it out"),
)
REUSED = (
    Row(lambda c: c.reuse, "method={method.name} has no choice that reuse={reuse.name} could hand to other layers: "
        "{why}; leave reuse out", reasons=UNSHARED),
    Row(lambda c: c.reuse and c.reuse.comm_counts == "mean" and c.budget.comm is None,
        "reuse.comm_counts=mean divides comm among layers, and there is none; give comm=1/64, or leave the key out"),
)
BUDGETS = (
    Row(lambda c: c.budget.counts and not c.traits.of_answers and c.instead(),
        "budget_counts={budget.counts} is for methods that compress while they answer, and method={method.name} "
        "compresses the prompt; use {why}"),
)
TASKS = (
    Row(lambda c: c.task, "task={task} has no {why}, which results print; see tasks/base.py", reasons=SILENT),
    Row(lambda c: c.weights == "random" and c.task and not c.task.is_timed,
        "weights=random answers nothing that task={task} could score; use it with task=latency"),
    Row(lambda c: c.task and c.task.is_forced and c.scope != "full_prompt",
        "compression_scope={scope} has no meaning for task={task}, whose prompts have no question; use full_prompt"),
    Row(lambda c: c.asking and c.asking.budget_base == "conversation" and c.asking.takes_back,
        "task.budget_base=conversation grows with turns that stay, and task.mode={asking.mode} takes them back; use "
        "task.mode=golden, task.mode=dialogue or task.budget_base=context", names_cell=True),
    Row(lambda c: c.asking and c.asking.budget_base == "conversation" and no_growth(c),
        "task.budget_base=conversation compresses the tokens of each turn, which {title} cannot: it {why}; use "
        "task.budget_base=context", names_cell=True),
    Row(lambda c: c.asking and c.asking.mode in ("independent", "golden") and not c.traits.rolls_back,
        "task.mode={asking.mode} takes back what was read, which this method cannot (rolls_back=False); use "
        "task.mode=dialogue or task.mode=query_aware with it", names_cell=True),
    Row(lambda c: c.asking and c.asking.feed == "dense" and (c.traits.drops or c.traits.prunes_prompt),
        "task.feed=dense reads questions through the whole context, which this method no longer holds; use compressed "
        "or tokenwise", names_cell=True),
    Row(lambda c: c.asking and not c.sampling.is_greedy,
        "temperature={sampling.temperature:g} draws answers, and task={task} with several turns is answered greedily; "
        "use temperature=0"),
    Row(lambda c: c.asking and c.scope != "full_prompt",
        "compression_scope={scope} has no meaning for task={task} with several turns, where task.mode says what is "
        "compressed; leave it away"),
    Row(lambda c: c.task and c.sampling.identity(),
        "{sampled} means nothing for task={task}, which {why}; leave it out", reasons=UNDRAWN),
    Row(lambda c: c.asking and c.traits.of_answers,
        "method={method.name} compresses a prompt and one answer, and task={task} asks several questions in turn; use "
        "another method with it"),
    Row(lambda c: c.traits.asks_question and (c.scope != "full_prompt" or c.asking),
        "method={method.name} chooses tokens by the question, which is not in the context that is compressed here; use "
        "compression_scope=full_prompt and a task with one question, or method.window=64"),
)
ANSWERS = (
    Row(lambda c: c.sampling.n_answers > MOST_ANSWERS,
        f"n_answers={{sampling.n_answers}} is out of range; it is at most {MOST_ANSWERS}: with model {{model}} each "
        "generated token of so many answers takes {answer_bytes} of keys and values", SHAPE),
)
LATENT = "the model {model} keeps one latent per token for all heads, and "
KINDS = (  # what of a model a method makes no sense of, or who reads what it keeps
    Row(lambda c: c.traits.has_budget and c.shape.choosing_layers,
        "the model {model} chooses by itself what {n_choosing} of its {shape.n_layers} layers attend to, and {title} "
        "is not defined on top of that; use method=full, which runs and counts the model as it is, or a model with "
        "full attention", SHAPE, True),
    Row(lambda c: c.shape.is_latent and next(c.of_parts("no_latents"), ""),
        LATENT + "{why}; use another method with it", SHAPE, True),
    Row(lambda c: c.shape.is_latent and c.quantizer and not c.traits.drops,
        LATENT + "{title} with {quantizer.rules.title} packs keys and values apart on the host; use another method "
        "with it", SHAPE, True),
    Row(lambda c: c.shape.width != 2 * c.shape.d_h and not c.shape.is_latent and next(c.of_parts("no_widths"), ""),
        "the model {model} has keys of {shape.d_h} and values of {shape.d_v} numbers, and {why}; use another method "
        "with it", SHAPE, True),
    Row(lambda c: c.shape.readers and next(c.of_parts("turns_queries"), ""),
        "{why} turns queries for some tokens, and {n_readers} layers of the model {model} attend to these with queries "
        "of their own; use a method that leaves queries as they are", SHAPE, True),
    Row(lambda c: c.traits.skips and c.params.full_layers > max(c.shape.attention_layers),
        "method.full_layers={params.full_layers} leaves no layer of {shape.name} to compress; use at most "
        "{last_layer}", SHAPE, True),
)
RUNG = "{title} cannot be served on rung={rung}: it "
RUNGS = (
    Row(lambda c: True, "{why} is not served by vLLM, whose prefill and pages are one for all; leave it out", SERVING,
        reasons=UNSERVED),
    Row(lambda c: c.traits.reads_inputs,
        "{title} reads the attention's input, which vLLM does not hand out; leave it out", SERVING),
    Row(lambda c: c.rung == "dropping" and not c.traits.drops and c.traits.has_budget,
        RUNG + "retrieves what it needs, so that no page may go; use rung=visible with it", SERVING),
    Row(lambda c: c.rung == "dropping" and c.traits.adapts,
        RUNG + "keeps as many tokens as each prompt needs, which vLLM's scheduler does not foresee", SERVING),
    Row(lambda c: c.rung and c.traits.asks_question,
        RUNG + "wants to know where the question begins, which no request says", SERVING),
    Row(lambda c: c.rung and c.traits.prunes_prompt,
        RUNG + "leaves tokens out of the prefill, and vLLM's is one for all", SERVING),
    Row(lambda c: c.rung and c.traits.changes,
        RUNG + "keeps codes or numbers of its own, and pages hold the model's", SERVING),
    Row(lambda c: c.rung and c.traits.of_answers,
        RUNG + "cuts prompt and answer between steps, which vLLM's scheduler does not foresee", SERVING),
    Row(lambda c: c.rung and (own := c.allocator or c.traits.allocator) is not None and own.needs_all_layers,
        RUNG + "divides its budget once it has seen all layers, which a request that is read again has not", SERVING),
)
GROUPS = {
    "n_answers": ANSWERS,
    "model": KINDS,
    "positions, dropped": KEPT,
    "prefill.evict": CHUNKS,
    "allocator": ALLOCATION,
    "prefill": PREFILL,
    "compose": COMPOSITION,
    "reuse": REUSED,
    "budget": BUDGETS,
    "task": TASKS,
    "serving": RUNGS,
}
# fmt: on
TABLE = tuple(row for rows in GROUPS.values() for row in rows)


def answer_bytes(c: Case) -> str:
    """What a token of so many answers takes."""
    element, shape = 4 if c.dtype == "float32" else 2, c.shape
    return gigabytes(c.sampling.n_answers * len(shape.kept_layers) * shape.h_kv * shape.width * element)


def no_growth(c: Case) -> str:
    """Why a method's budget cannot grow; those that do divide their tokens by themselves."""
    counts_tokens = c.budget.memory is None or c.traits.drops  # bytes of tokens, all of which it attends to
    is_plain = c.allocator is c.compose is None and counts_tokens and not c.post_processing.changes
    return "" if is_plain and c.traits.grows else c.traits.no_growth or "does not with these settings"
