"""LongBench's prompts: a row in its template, cut to a length, and templates of our own where upstream's are missing.

Not here: which templates a run takes (`tasks/longbench/task.py`).
"""

from collections.abc import Mapping
from typing import Any

from kvbench.tasks.longbench import embedded
from kvbench.tasks.longbench.datasets import EMBEDDED, facts_of
from kvbench.tasks.prompt import middle_truncate

TEXT_QA = (
    "A text:\n\n{context}\n\nA question about the text, to be answered in a few words.\nQuestion: {input}\nAnswer:"
)
PASSAGES_QA = (
    "Some passages:\n\n{context}\n\nA question that these passages answer, to be answered in a few words.\n"
    "Question: {input}\nAnswer:"
)
CODE = "Source code that breaks off, and its next line.\n"
OWN_PROMPTS = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en"), TEXT_QA),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), PASSAGES_QA),
    "multifieldqa_zh": "一篇文章\n\n{context}\n\n请用几个字回答关于这篇文章的问题\n问题: {input}\n答案:",
    "dureader": "几篇文章\n\n{context}\n\n请根据这些文章回答问题\n问题: {input}\n答案:",
    "gov_report": "A report:\n\n{context}\n\nSum this report up on one page.\nSummary:",
    "qmsum": "The record of a meeting:\n\n{context}\n\nA request about the meeting, to be met in a few sentences.\n"
    "Request: {input}\nAnswer:",
    "multi_news": "Articles on one event:\n\n{context}\n\nSum these articles up on one page.\nSummary:",
    "vcsum": "一次会议的记录\n\n{context}\n\n会议的总结:",
    "trec": "Questions and the type of each.\n\n{context}\n{input}",
    "triviaqa": "Passages, each with a question and its short answer.\n\n{context}\n\n{input}",
    "samsum": "Conversations, each with a summary of a few sentences.\n\n{context}\n\n{input}",
    "lsht": "新闻和它们的类别\n\n{context}\n{input}",
    "passage_count": "Paragraphs, some of which stand there more than once.\n\n{context}\n\nSay how many different "
    "paragraphs there are, as a number alone.\nThe number: ",
    "passage_retrieval_en": "Numbered paragraphs:\n\n{context}\n\nA summary of one of them:\n\n{input}\n\nSay which "
    'paragraph it is of, in the form "Paragraph 1".\nIt is of: ',
    "passage_retrieval_zh": "编了号的段落\n\n{context}\n\n其中一段的摘要\n\n{input}\n\n请说出它是哪一段的摘要, "
    '例如"段落1"\n答案:',
    "lcc": CODE + "{context}Next line:\n",
    "repobench-p": CODE + "{context}{input}Next line:\n",
    **{name: one.template for name, one in embedded.DATASETS.items()},
}  # fmt: skip


def fill(template: str, row: Mapping[str, Any]) -> str:
    """Fill in `{context}` and `{input}`, each once: braces in a context stay as they are."""
    parts = template.split("{context}")
    return row["context"].join(part.replace("{input}", row["input"]) for part in parts)


def question_block(dataset: str, template: str) -> tuple[str, str] | None:
    """The question after a template's context, and the cue for the answer; None where no question can be moved."""
    if not takes_question_first(dataset):
        return None
    tail = template.partition("{context}")[2]
    if dataset in EMBEDDED:
        cue = embedded.DATASETS[dataset].cue
        return tail.removesuffix(cue), cue
    if "{input}" in tail and "passage_retrieval" not in dataset:
        head, _, cue = tail.partition("{input}")
        return head + "{input}", cue
    block, _, cue = tail.rpartition("\n")
    return (block, cue) if block.strip() else None


def parts_of(dataset: str, template: str, row: Mapping[str, Any], position: str) -> tuple[str, str]:
    """The filled prompt up to the end of its context, and the rest."""
    head, _, tail = template.partition("{context}")
    before, after = fill(head, row) + row["context"], fill(tail, row)
    found = question_block(dataset, template)
    if position == "after" or found is None:
        return before, after
    question = fill(found[0], row).strip()
    if position == "before":
        after = f"\n\n{fill(found[1], row).lstrip()}"
    return f"{question}\n\n{before}", after


def takes_question_first(dataset: str) -> bool:
    """Whether the question can stand before the context: not where the query is continued."""
    if dataset in EMBEDDED:
        return bool(embedded.DATASETS[dataset].cue)
    return facts_of(dataset).use_chat


def shortened(
    tokenizer: Any, before: str, after: str, limit: int, *, odd_to_end: bool = False
) -> tuple[str, str, int, int]:
    """The prompt cut by `middle_truncate`, in its two parts again, and its token counts before and after."""
    text, n_before, n_after = middle_truncate(tokenizer, before + after, limit, odd_to_end=odd_to_end)
    if n_before <= limit or text.endswith(after):
        cut = len(text) - len(after)
    elif text.startswith(before):  # the question is what was cut
        cut = len(before)
    else:  # the seam is within what was cut, or the tokenizer changes what goes through it
        n_tail = min(len(tokenizer.encode(after, add_special_tokens=False)), limit // 2)
        ids = tokenizer.encode(before + after)
        cut = len(text) - len(tokenizer.decode(ids[len(ids) - n_tail :], skip_special_tokens=True))
    return text[:cut], text[cut:], n_before, n_after
