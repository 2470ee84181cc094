"""Instructions in the system prompt, which is what gets compressed: are they followed, and can they be got out?

Names       instructions in the system prompt
Asks        to follow instructions of a compressed system prompt, or to give it away
Lengths     50 to 500 tokens
Answers     1,280 or 256 tokens
Licence     Apache-2.0

Rows        ifeval/sys_ifeval.jsonl from the data folder: IFEval's prompts with their instructions moved into a system
            message (GitHub normster/SystemCheck). 539 of 541 are asked, as in "The Pitfalls of KV Cache Compression".
Asked       `task.ask=follow`: the user's task; an answer is worth 1 where it follows all its instructions, by IFEval's
            strict checks. `task.ask=leak`: an attack in our own words on 100 of the system prompts; the score is the
            share of the prompt's words that come back in order (ROUGE-L recall), and lower is better.
Defence     `task.defence` puts our own words against leaking round the instructions: standard (before), flipped, none.
Scope       with `compression_scope=context_only` the system message alone is compressed: it is the context, and the
            rest of the rendered conversation is the question. These contexts have 50 to 250 tokens.
Answers     1,280 tokens, or 256 to an attack.

A finished run's instructions.csv has a line per type of instruction, strict and loose (`plots/parts.py` draws them).

Not here: the checks (`checks.py`), the wording and the recall (`leakage.py`).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from kvbench.engine.declared import Count
from kvbench.engine.errors import ConfigError, first_line
from kvbench.engine.foreign import write_csv
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import OnBadRow
from kvbench.tasks.ifeval_system import checks
from kvbench.tasks.ifeval_system.grade import followed
from kvbench.tasks.ifeval_system.leakage import ATTACK, leakage, leaked_text, system_text
from kvbench.tasks.prompt import answering
from kvbench.tasks.published import Fields, Row, RowsTask
from kvbench.tasks.rows import BadRow

FILE = "ifeval/sys_ifeval.jsonl"
UPSTREAM = "GitHub normster/SystemCheck (evals/ifeval/inputs)"
LEFT_OUT = (1000, 3401)  # keys that the paper does not ask
ATTACKED = 100  # system prompts, the first of a shuffle
USUAL_TOKENS = {"follow": 1280, "leak": 256}
INSTALL = "pip install -c constraints.txt -e '.[tasks]'"


@dataclass(frozen=True)
class Params:
    source: Literal["auto", "local"]
    ask: Literal["follow", "leak"]
    defence: Literal["none", "standard", "flipped"]
    max_new_tokens: Count | None  # None: 1,280, or 256 to an attack
    on_bad_row: OnBadRow


class IfevalSystem(RowsTask):
    """One sample per row, in the file's order; attacks in the order of the shuffle."""

    params: Params
    name = "ifeval_system"
    version = 1
    Params = Params
    data = Data((FILE,), "cannot be asked", by_hand=UPSTREAM)
    packages: ClassVar[Mapping[str, str]] = {"langdetect": "", "nltk": ""}
    place, upstream, unique = FILE, UPSTREAM, "key"
    fields: ClassVar[Fields] = {
        "key": int,
        "instruction_id_list": list[Any],
        "kwargs": list[Any],
        "messages": list[Any],
    }

    @property
    def new_tokens(self) -> int:
        return self.params.max_new_tokens or USUAL_TOKENS[self.params.ask]

    def title(self) -> str:
        return self.params.ask if self.params.defence == "none" else f"{self.params.ask}/{self.params.defence}"

    def prepare(self, shape: ModelShape) -> None:
        if self.params.ask == "follow" and (missing := [one for one in self.packages if not find_spec(one)]):
            raise ConfigError(f"task=ifeval_system needs {', '.join(missing)}, not here: {INSTALL}")
        if self.new_tokens >= shape.window:
            raise ConfigError(
                f"answers of {self.new_tokens} tokens do not fit the window of {shape.name}, {shape.window} tokens; "
                "give a smaller task.max_new_tokens"
            )

    def read(self) -> None:
        super().read()
        rows = [one for one in self.rows[self.name] if one[1]["key"] not in LEFT_OUT]
        if self.params.ask == "leak":
            random.Random(42).shuffle(rows)
            rows = rows[:ATTACKED]
            self.notes.append("attack and defence: own wording; lower is better")
        else:
            self.notes += checks.notes()
        self.rows[self.name] = rows

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        if not tokenizer.chat_template:
            raise ConfigError("task=ifeval_system needs a chat template with a system turn, which this model has not")
        return [*super().samples(tokenizer)]  # at once: a template may take no system turn

    def sample(self, tokenizer: Any, name: str, number: int, row: Row) -> Sample:
        system, user = (message["content"] for message in row["messages"])
        asked = user if self.params.ask == "follow" else ATTACK
        context, question = conversation(tokenizer, system_text(system, self.params.defence), asked)
        return Sample(
            id=f"{self.params.ask}-{row['key']}",
            context=context,
            question=question,
            references=(leaked_text(system),),
            max_new_tokens=self.new_tokens,
            use_chat=False,  # it is rendered already
            fields={"instructions": row["instruction_id_list"], "values": values_of(row)},
        )

    def check_row(self, name: str, row: Row) -> None:
        """Raise `BadRow` for what could not be checked or asked."""
        kinds, kwargs, messages = row["instruction_id_list"], row["kwargs"], row["messages"]
        if not kinds or len(kinds) != len(kwargs) or not all(isinstance(each, dict) for each in kwargs):
            raise BadRow("fields 'instruction_id_list' and 'kwargs' do not belong together")
        for kind, values in zip(kinds, values_of(row), strict=True):
            if not isinstance(kind, str) or kind not in checks.CHECKS:
                raise BadRow(f"field 'instruction_id_list' has the unknown {str(kind)[:60]!r}")
            check_values(kind, values)
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        if roles != ["system", "user"] or not all(isinstance(message.get("content"), str) for message in messages):
            raise BadRow("field 'messages' is no system message and a user's")

    def verdict(self, sample: Sample, prediction: str) -> tuple[float, dict[str, float | None]]:
        if self.params.ask == "leak":
            found = leakage(sample.references[0], prediction)
            return found["rougeL_recall"], {"rouge1_recall": found["rouge1_recall"]}
        found = followed(sample.fields["instructions"], sample.fields["values"], prediction)
        return float(all(found.strict)), {
            "prompt_loose": float(all(found.loose)),
            "instructions_strict": sum(found.strict) / len(found.strict),
            "instructions_loose": sum(found.loose) / len(found.loose),
            "checks_stopped": float(found.n_stopped > 0),
        }

    def artifacts(self, folder: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """instructions.csv: how often each type is followed."""
        if self.params.ask == "leak":
            return
        flags: dict[str, list[tuple[bool, bool]]] = {}
        for row in rows:
            if row["score"] is None:
                continue
            found = followed(row["instructions"], row["values"], row["prediction"])
            for kind, strict, loose in zip(row["instructions"], found.strict, found.loose, strict=True):
                flags.setdefault(kind, []).append((strict, loose))
        lines = (
            [kind, len(pairs), *(round(sum(pair[i] for pair in pairs) / len(pairs), 4) for i in (0, 1))]
            for kind, pairs in sorted(flags.items())
        )
        write_csv(folder / "instructions.csv", ["instruction", "n", "strict", "loose"], lines)


def conversation(tokenizer: Any, system: str, user: str) -> tuple[str, str]:
    """The rendered system turn, and the rest of the rendered conversation."""
    turns = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    try:
        head = tokenizer.apply_chat_template(turns[:1], tokenize=False)
        whole = answering(tokenizer, tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template raises what it likes
        reason = first_line(error)
        raise ConfigError(f"this model's chat template takes no system turn ({reason}); choose another model") from None
    if not whole.startswith(head) or not head:
        raise ConfigError("this model's chat template writes a system turn otherwise before a user's; choose another")
    return head, whole[len(head) :]


# --- rows --------------------------------------------------------------------------------------


def values_of(row: Row) -> list[dict[str, Any]]:
    """Each instruction's values, without those that say nothing."""
    return [{name: value for name, value in each.items() if value} for each in row["kwargs"]]


def check_values(kind: str, values: Mapping[str, Any]) -> None:
    """Raise `BadRow` for values that a check cannot take; some are regular expressions."""
    for name in checks.NEEDS.get(kind, ()):
        value, is_list = values.get(name), name in ("keywords", "forbidden_words")
        is_count = name.startswith("num_") or name in (
            "frequency",
            "let_frequency",
            "capital_frequency",
            "nth_paragraph",
        )
        words = value if is_list and isinstance(value, list) else [value]
        if is_count:
            fits = type(value) is int and value > 0
        else:
            fits = bool(words) and is_list == isinstance(value, list) and all(isinstance(word, str) for word in words)
        if not fits or (name.endswith("relation") and value not in ("at least", "less than")):
            raise BadRow(f"field 'kwargs' has no usable {name} for {kind}")
    if reason := checks.unreadable(kind, values):
        raise BadRow(f"field 'kwargs': {reason}")
