"""What every task must hold: `kvbench conformance path/to/mine.yaml`, for one of the user's own or of ours.

Each property is a function that raises an `AssertionError` with the case that breaks it. No model is loaded; texts are
encoded by a tokenizer of a few hundred tokens, so that a length in tokens is a shorter text than a model is asked.

exit code: 0 all properties hold, 1 one is broken, 2 wrong input

Not here: whether a task asks anything worth asking; a run of full attention next to `random` says that.
"""

import argparse
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from typing import Any

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.evals.settings import from_words, load_class
from kvbench.results.schema import METRICS, SampleRow
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.prompt import encode
from kvbench.tasks.turns.encode import prompt_of
from kvbench.tests.judging import judged, report
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer

SHAPE = ModelShape("tiny", 3, 6, 2, 8, 1 << 20, (0, 1, 2))
MOST = 8  # samples that are looked at closely
NEARLY = 1e-6  # ROUGE of equal texts is not quite 1
ODD = ("", " ", "\n\n", "1", "no", "¿Qué? 北京\u2028\ufffd", "x" * 5000, "<|im_end|>", "[1, 2", "{")
WRITTEN = {field.name for field in fields(SampleRow)} - {"fields", "original_prompt_tokens"}  # a task may say that one
NOT_ASKED = "not asked: it gives no answer as text"


@dataclass(frozen=True)
class Subject:
    """A task with one set of parameters."""

    name: str
    kind: Any
    params: Any
    n: int  # samples that are looked at

    def made(self) -> Task:
        """The task anew and checked."""
        task = self.kind(self.params, None, 0)
        task.check(SHAPE)
        return task

    def first(self, task: Task, tokenizer: Any) -> list[Sample]:
        return [*islice(task.samples(tokenizer), self.n)]

    @cached_property
    def by_tokenizer(self) -> list[tuple[Any, list[Sample]]]:
        """The first samples by a tokenizer without a chat template and by one that has it; some tasks want one."""
        found, refusals = list[tuple[Any, list[Sample]]](), list[ConfigError]()
        for tokenizer in (tiny_tokenizer(None, adds_bos=True), tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)):
            try:
                found.append((tokenizer, self.first(self.made(), tokenizer)))
            except ConfigError as error:
                refusals.append(error)
        if not found:
            raise refusals[0]
        return found

    @property
    def tokenizer(self) -> Any:
        return self.by_tokenizer[0][0]

    @property
    def samples(self) -> list[Sample]:
        return self.by_tokenizer[0][1]

    @cached_property
    def task(self) -> Task:
        return self.made()

    @property
    def answered(self) -> list[Sample]:
        """The questions one by one, as lines of a result have them; none where nothing is answered in words."""
        return [] if self.kind.is_forced or self.kind.is_timed else [one for s in self.samples for one in turns_of(s)]


def turns_of(sample: Sample) -> Iterator[Sample]:
    if sample.conversation is None:
        yield sample
        return
    for i, turn in enumerate(sample.conversation.turns, 1):
        yield replace(
            sample, id=f"{sample.id}/{i}", question=turn.question, references=turn.references,
            fields={**sample.fields, **turn.fields}, conversation=None,
        )  # fmt: skip


def subject(word: str, settings: list[str], n: int) -> Subject:
    """The task of a command line such as `task=path/to/mine.yaml task.max_new_tokens=8`."""
    part = from_words([f"task={word}", *settings]).task
    kind: Any = load_class(part)
    return Subject(part.name, kind, build_params(kind, part.params, "task"), n)


# --- properties --------------------------------------------------------------------------------


def says_what_results_print(one: Subject) -> None:
    for word in ("dataset", "data_source"):
        assert isinstance(getattr(one.task, word, None), str), f"{word} is no text"
    assert one.task.metric is None or one.task.metric in METRICS, f"metric={one.task.metric} is none of {[*METRICS]}"
    assert one.samples, "it has no samples"


def ids_are_unique(one: Subject) -> None:
    seen: dict[str, int] = {}
    every = one.samples if one.task.is_embedded else one.task.samples(one.tokenizer)  # drawn ones take their time
    for i, sample in enumerate(every):
        assert isinstance(sample.id, str) and sample.id, f"sample {i} has the id {sample.id!r}, which is no text"
        assert sample.id not in seen, f"samples {seen[sample.id]} and {i} are both called {sample.id!r}"
        seen[sample.id] = i


def is_the_same_again(one: Subject) -> None:
    again = one.made()
    assert again.data_digest == one.task.data_digest, f"data_digest was {one.task.data_digest}, is {again.data_digest}"
    every = again.samples(one.tokenizer)
    order = range(len(one.samples))
    for i in reversed(order):  # the last one first: a sample doesn't depend on those that were made before
        compare(one.samples[i], every[i], f"sample {i}")
    assert len(every) == len(one.task.samples(one.tokenizer)), "another number of samples"


def compare(before: Sample, now: Sample, what: str) -> None:
    for field in fields(Sample):
        was, came = getattr(before, field.name), getattr(now, field.name)
        assert was == came, (
            f"{field.name} of {what} was {was!r:.60} and is {came!r:.60} when it is made again; draw from "
            "random.Random with the seed and the sample's number"
        )


def prompts_encode(one: Subject) -> None:
    for tokenizer, samples in one.by_tokenizer:
        for sample in samples:
            prompt = prompt_of(tokenizer, sample, chat="auto", system_prompt="", scope="full_prompt")
            assert len(prompt) > 1, f"sample {sample.id!r} has a prompt of {len(prompt)} tokens"


def is_cut_behind_the_context(one: Subject) -> None:
    for sample in one.samples:
        if sample.ids is not None or sample.conversation is not None or sample.forced is not None:
            continue
        assert sample.context.strip(), f"sample {sample.id!r} has no context, which is what is compressed"
        prompt = encode(one.tokenizer, sample, chat="auto", system_prompt="", scope="context_only")
        assert prompt.question_ids, (
            f"sample {sample.id!r} has nothing behind its context: compression_scope=context_only has no question to "
            "leave out; put the question into `question`"
        )


def evidence_stands_in_the_context(one: Subject) -> None:
    for sample in one.samples:
        context = sample.texts_read if sample.ids is None else one.tokenizer.decode(sample.ids)
        for part in sample.evidence:
            assert part.strip() in context, f"sample {sample.id!r} has the evidence {part!r:.60} nowhere"


def references_score_one(one: Subject) -> None:
    for sample in one.answered:
        if not sample.references:
            continue
        answers = [*sample.references, one.task.right_answer(sample)]
        best = max(one.task.verdict(sample, answer)[0] for answer in answers)
        assert best >= 1 - NEARLY, (
            f"sample {sample.id!r} scores {best:.3g} where its reference {sample.references[0]!r:.60} is the answer; "
            "where a right answer is written otherwise, write `right_answer`"
        )


def empty_answers_do_not(one: Subject) -> None:
    for sample in one.answered:
        if sample.references:
            score = one.task.verdict(sample, "")[0]
            assert score < 1, f"sample {sample.id!r} scores {score:.3g} where the answer is empty"


def scores_are_bounded(one: Subject) -> None:
    metric = METRICS[one.task.metric or "score"]
    for sample in one.answered:
        for answer in (*ODD, *sample.references, sample.context[-500:]):
            score, measures = one.task.verdict(sample, answer)
            case = f"sample {sample.id!r} and the answer {answer!r:.60}"
            assert type(score) in (int, float) and score >= metric.lowest, f"{case}: the score is {score!r}"
            assert metric.highest is None or score <= metric.highest, f"{case}: the score is {score!r}"
            for key, value in measures.items():
                assert value is None or type(value) in (int, float), f"{case}: the measure {key} is {value!r}"


def scores_need_the_line_alone(one: Subject) -> None:
    judge = object.__new__(one.kind)
    judge.params = one.params
    for sample in one.answered:
        written = json.loads(json.dumps(dict(sample.fields)))
        line = Sample(sample.id, "", "", references=sample.references, fields=written)
        for answer in (*sample.references, "no"):
            there, here = one.task.verdict(sample, answer)[0], judge.verdict(line, answer)[0]
            assert there == here, (
                f"sample {sample.id!r} scores {there:.3g}, and {here:.3g} from its line of samples.jsonl; put what the "
                "score needs into `fields`"
            )


def fields_are_json(one: Subject) -> None:
    for sample in [*one.samples, *one.answered]:
        for key, value in sample.fields.items():
            assert key not in WRITTEN, f"sample {sample.id!r} has the field {key!r}, which every line has; rename it"
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise AssertionError(f"field {key!r} of sample {sample.id!r} is no JSON: {error}") from None


def answers_end(one: Subject) -> None:
    for sample in one.samples:
        for part in sample.conversation.turns if sample.conversation else (sample,):
            n = part.max_new_tokens
            assert isinstance(n, int) and n >= 1, f"sample {sample.id!r} has max_new_tokens={n!r}"


PROPERTIES = {
    "it says what results print": says_what_results_print,
    "ids are texts, each of one sample": ids_are_unique,
    "its samples are the same the next time, in any order": is_the_same_again,
    "prompts encode, with a chat template and without": prompts_encode,
    "a prompt is cut between context and question": is_cut_behind_the_context,
    "evidence stands in the context": evidence_stands_in_the_context,
    "answers have a limit": answers_end,
    "a reference, given back, scores 1": references_score_one,
    "an empty answer does not score 1": empty_answers_do_not,
    "scores of any answer are within their bounds": scores_are_bounded,
    "a line of samples.jsonl is enough to score it again": scores_need_the_line_alone,
    "fields are JSON, under names of their own": fields_are_json,
}  # fmt: skip
OF_ANSWERS = {references_score_one, empty_answers_do_not, scores_are_bounded, scores_need_the_line_alone}


def run(one: Subject) -> bool:
    """Print how each property stands: whether none is broken."""
    file = inspect.getfile(one.kind)
    print(f"{one.name}: {one.kind.__name__} of {file}, {one.params}")

    def judge(check: Callable[[Subject], None]) -> tuple[str, str]:
        verdict, why = judged(lambda: check(one), file)
        is_idle = verdict == "held" and check in OF_ANSWERS and not one.answered
        return verdict, NOT_ASKED if is_idle else why

    return report({name: lambda check=check: judge(check) for name, check in PROPERTIES.items()})


def main(arguments: list[str]) -> int:
    """`ConfigError` for a task that cannot be asked."""
    parser = argparse.ArgumentParser(prog="kvbench conformance", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", help="path/to/mine.yaml, path/to/mine.py, path/to/mine.py:Class, or the name of a task")
    parser.add_argument("params", nargs="*", metavar="task.KEY=VALUE", help="parameters other than the file's")
    parser.add_argument("--samples", type=int, default=MOST, metavar="N", help="how many are looked at closely")
    given = parser.parse_args(arguments)
    one = subject(given.task, given.params, given.samples)
    _ = one.samples  # what a task refuses is no property
    return int(not run(one))
