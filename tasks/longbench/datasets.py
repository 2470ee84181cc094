"""LongBench's datasets, LongBench-E's, and the embedded ones: category, metric, answer length, and named lists of them.

Not here: their prompts (`prompts.py` next to this file), and how embedded rows are made (`embedded.py`).
"""

from dataclasses import dataclass

from kvbench.tasks.download import Piece
from kvbench.tasks.longbench import embedded

E_SUFFIX = "_e"


@dataclass(frozen=True)
class Dataset:
    """Facts that are fixed for a dataset, whichever prompts are used."""

    category: str
    metric: str
    max_new_tokens: int
    language: str = "en"
    use_chat: bool = True  # whether the prompt is an instruction; otherwise a text to be continued
    in_e: bool = False
    one_line: bool = False  # the score looks at the first line alone
    stop_at_newline: bool = False  # of the embedded datasets


SINGLE, MULTI, SUMMARY, SHOTS = "single-doc QA", "multi-doc QA", "summarization", "few-shot"
DATASETS = {
    "narrativeqa": Dataset(SINGLE, "qa_f1", 128),
    "qasper": Dataset(SINGLE, "qa_f1", 128, in_e=True),
    "multifieldqa_en": Dataset(SINGLE, "qa_f1", 64, in_e=True),
    "multifieldqa_zh": Dataset(SINGLE, "qa_f1_zh", 64, "zh"),
    "hotpotqa": Dataset(MULTI, "qa_f1", 32, in_e=True),
    "2wikimqa": Dataset(MULTI, "qa_f1", 32, in_e=True),
    "musique": Dataset(MULTI, "qa_f1", 32),
    "dureader": Dataset(MULTI, "rouge_zh", 128, "zh"),
    "gov_report": Dataset(SUMMARY, "rouge", 512, in_e=True),
    "qmsum": Dataset(SUMMARY, "rouge", 512),
    "multi_news": Dataset(SUMMARY, "rouge", 512, in_e=True),
    "vcsum": Dataset(SUMMARY, "rouge_zh", 512, "zh"),
    "trec": Dataset(SHOTS, "classification", 64, use_chat=False, in_e=True, one_line=True),
    "triviaqa": Dataset(SHOTS, "qa_f1", 32, use_chat=False, in_e=True, one_line=True),
    "samsum": Dataset(SHOTS, "rouge", 128, use_chat=False, in_e=True, one_line=True),
    "lsht": Dataset(SHOTS, "classification", 64, "zh", use_chat=False, one_line=True),
    "passage_count": Dataset("synthetic", "count", 32, in_e=True),
    "passage_retrieval_en": Dataset("synthetic", "retrieval", 32, in_e=True),
    "passage_retrieval_zh": Dataset("synthetic", "retrieval_zh", 32, "zh"),
    "lcc": Dataset("code", "code_sim", 64, "code", use_chat=False, in_e=True),
    "repobench-p": Dataset("code", "code_sim", 64, "code", use_chat=False, in_e=True),
}
EMBEDDED = {
    name: Dataset(one.category, one.metric, one.max_new_tokens, use_chat=False, stop_at_newline=True)
    for name, one in embedded.DATASETS.items()
}
EMBEDDED_ROWS = 6  # of each embedded dataset, without task.rows: a run then takes minutes on two cores
E13 = tuple(f"{name}{E_SUFFIX}" for name, one in DATASETS.items() if one.in_e)
LISTS = {
    "all21": tuple(DATASETS),
    "en16": tuple(name for name, one in DATASETS.items() if one.language != "zh"),
    "zh5": tuple(name for name, one in DATASETS.items() if one.language == "zh"),
    # PQCache's Table 2: the English ones without code
    "paper14": tuple(name for name, one in DATASETS.items() if one.language == "en"),
    "e13": E13,
    "embedded": embedded.SET,
}
NAMES = (*DATASETS, *E13, *EMBEDDED)


def base_name(dataset: str) -> str:
    """`qasper` for `qasper_e`."""
    return dataset.removesuffix(E_SUFFIX) if dataset in E13 else dataset


def facts_of(dataset: str) -> Dataset:
    return EMBEDDED.get(dataset) or DATASETS[base_name(dataset)]


LONGBENCH_REVISION = "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"
LONGBENCH_CODE = "2e00731f8d0bff23dc4325161044d0ed8af94c1e"
PIECES = (
    Piece(
        "THUDM/LongBench", LONGBENCH_CODE, "LongBench/config/dataset2prompt.json",
        "longbench/config/dataset2prompt.json", site="github",
        sha256="56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30",
    ),
    Piece(
        "THUDM/LongBench", LONGBENCH_CODE, "LongBench/config/dataset2maxlen.json",
        "longbench/config/dataset2maxlen.json", site="github",
        sha256="72966b3c0933e214591637fb085798c5e687ebff4ddaab5d99bbc31120532022",
    ),
    Piece(
        "THUDM/LongBench", LONGBENCH_REVISION, "data.zip", "longbench/data",
        members="data/*.jsonl",
        sha256="cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64",
    ),
)  # fmt: skip
