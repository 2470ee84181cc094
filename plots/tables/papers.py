"""The papers' tables: their datasets, methods and budgets, and the figures that the papers print.

The figures are read from `plots/published/*.csv`, whose order of datasets, methods and budgets is the table's.

Not here: runs (`plots/tables/cells.py`).
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbench.plots.read import Run
from kvbench.results import EXACT

PUBLISHED = Path(__file__).resolve().parents[1] / "published"
AVERAGE = "Average"
PAPER_AVERAGES = {"Average", "Avg", "avg_of_8"}
# The benchmarks' names of datasets by the names that papers print, both reduced to lower-case letters and digits.
DATASETS = {
    "naqa": "narrativeqa",
    "qas": "qasper",
    "mfqa": "multifieldqaen",
    "multifieldqa": "multifieldqaen",
    "hpqa": "hotpotqa",
    "wkqa": "2wikimqa",
    "mus": "musique",
    "govr": "govreport",
    "mnews": "multinews",
    "ssum": "samsum",
    "trivqa": "triviaqa",
    "rpb": "repobenchp",
    "count": "passagecount",
    "retrieval": "passageretrievalen",
    "ensum": "longbooksumeng",
    "enqa": "longbookqaeng",
    "enmc": "longbookchoiceeng",
    "endia": "longdialogueqaeng",
    "zhqa": "longbookqachn",
    "retrpasskey": "passkey",
    "retrnumber": "numberstring",
    "retrkv": "kvretrieval",
    "plain": "math500",  # its runs are named by their prompt's template
}
CLUSTERKV_DATASETS = (
    *("2WikiMQA", "TriviaQA", "HotpotQA", "MultiFieldQA"),
    *("MuSiQue", "NarrativeQA", "Qasper", "GovReport"),
)


@dataclass(frozen=True)
class Column:
    """Our runs that stand in the column of a published method."""

    method: str
    compensated: bool | None = None  # None: both those that are and those that are not
    prefill: str = EXACT

    def matches(self, run: Run) -> bool:
        same = (run.method, run.prefill) == (self.method, self.prefill)
        return same and self.compensated in (None, run.is_compensated)


@dataclass(frozen=True)
class PaperTable:
    """One table of a paper, and which runs of ours stand next to its figures."""

    name: str  # of the CSV, of the experiment and of what is written
    title: str
    task: str
    models: tuple[str, ...]  # those of conf/model that are the paper's
    comm: str  # the paper's; "" where it has none
    methods: Mapping[str, Column | None]  # by the printed name; None: no run of ours stands for it
    question_first: bool = False
    averages_only: bool = False  # the paper prints means over datasets and nothing else
    tokens: Mapping[str, str] | None = None  # a printed budget and the tokens that it stands for

    @property
    def prefills(self) -> set[str]:
        return {column.prefill for column in self.methods.values() if column is not None}

    @property
    def command(self) -> str:
        return f"python run.py -m experiment={self.name} data_dir=FOLDER"


PQCACHE_METHODS: dict[str, Column | None] = {
    "Full": Column("full"),
    "Oracle": Column("oracle"),
    "H2O (C)": Column("h2o", compensated=True),
    "SnapKV (C)": Column("snapkv", compensated=True),
    "PyramidKV (C)": Column("pyramidkv", compensated=True),
    "InfLLM": Column("infllm"),
    "SPARQ": Column("sparq"),
    "PQCache": Column("pqcache"),
}
LLAMA = ("llama-3.1-8b-instruct", "llama-3.1-8b")
PAPER_TABLES = (
    PaperTable("pqcache_table2", "PQCache, Table 2: LongBench", "longbench", LLAMA, "1/128", PQCACHE_METHODS),
    PaperTable(
        "pqcache_table3",
        "PQCache, Table 3: LongBench QA, the question before the context",
        "longbench",
        LLAMA,
        "1/128",
        PQCACHE_METHODS,
        question_first=True,
    ),
    PaperTable(
        "pqcache_table4",
        "PQCache, Table 4: InfiniteBench",
        "infinitebench",
        LLAMA,
        "1/64",
        PQCACHE_METHODS,
    ),
    PaperTable(
        "pqcache_table5",
        "PQCache, Table 5: InfiniteBench with sparse prefill",
        "infinitebench",
        LLAMA,
        "1/64",
        {
            **PQCACHE_METHODS,
            "MInference": Column("full", prefill="minference"),
            "MInference+PQCache": Column("pqcache", prefill="minference"),
        },
    ),
    PaperTable(
        "pqcache_table6",
        "PQCache, Table 6: LongBench on a 70B model",
        "longbench",
        ("llama-3.1-70b-instruct", "llama-3.1-70b"),
        "1/128",
        # Half the CPU only changes how many rounds of clustering fit into the prefill; no run of ours is limited so.
        {"Full": Column("full"), "PQCache-half-CPU": None, "PQCache-same-CPU": Column("pqcache")},
    ),
    PaperTable(
        "clusterkv_table1",
        "ClusterKV, Table I: LongBench, mean of eight datasets",
        "longbench",
        ("glm4-9b-chat",),
        "",
        {
            "Quest": Column("quest"),
            "InfiniGen": Column("infinigen"),
            "ClusterKV": Column("clusterkv"),
            "FullKV": Column("full"),
        },
        averages_only=True,
    ),
    PaperTable(
        "xkv_table3",
        "XKV, Table III: LongBench",
        "longbench",
        ("llama-3-8b-instruct",),
        "",
        {
            "StreamingLLM": Column("streamingllm", compensated=False),
            "H2O": Column("h2o", compensated=False),
            "SnapKV": Column("snapkv", compensated=False),
            "PyramidKV": Column("pyramidkv", compensated=False),
            "XKV": Column("xkv", compensated=False),
        },
        tokens={"1.6%": "128", "1.2%": "96"},
    ),
    # R-KV's authors print curves as pictures; these are TriAttention's authors' runs of it, one answer a question.
    PaperTable(
        "rkv_table",
        "R-KV as TriAttention's authors ran it: MATH-500",
        "math500_rkv",
        ("DeepSeek-R1-Distill-Llama-8B", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
        "",
        {
            "Full": Column("full"),
            "SnapKV": Column("snapkv_decode"),
            "R-KV": Column("rkv"),
            "TriAttention": Column("triattention"),
        },
    ),
)
EFFICIENCY = PaperTable(
    "xkv_table4",
    "XKV, Table IV: efficiency on NarrativeQA",
    "longbench",
    ("llama-3-8b-instruct",),
    "",
    {"FullKV": Column("full"), "XKV": Column("xkv", compensated=False)},
)


def canonical(dataset: str) -> str:
    """A dataset's one name, from the benchmark's or a paper's: `multifieldqa_en`, `MFQA` and `MultiFieldQA` agree."""
    plain = re.sub("[^a-z0-9]", "", dataset.rpartition("/")[2].lower())
    return DATASETS.get(plain, plain)


@dataclass(frozen=True)
class Published:
    """The figures that a paper's table prints."""

    values: Mapping[tuple[str, str, str], str]  # (dataset, method, budget as printed)
    datasets: list[str]
    methods: list[str]
    budgets: list[str]  # without full attention's

    def value(self, dataset: str, method: str, budget: str) -> str | None:
        """A figure as printed. Those of full attention stand once, at the budget "1" or "full", and hold for all."""
        for printed in (budget, "1", "full"):
            if (value := self.values.get((dataset, method, printed))) is not None:
                return value
        return None


def read_published(paper_table: PaperTable) -> Published:
    with (PUBLISHED / f"{paper_table.name}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    values: dict[tuple[str, str, str], str] = {}
    for row in rows:
        dataset = AVERAGE if row["dataset"] in PAPER_AVERAGES else row["dataset"]
        method = row["method"].replace("(C)", " (C)")  # printed without the space that our labels have
        key = (dataset, method, row.get("ratio") or row["budget_or_ratio"])
        values[key] = row.get("score") or row["value"]
    datasets = [d for d in dict.fromkeys(key[0] for key in values) if d != AVERAGE]
    return Published(
        values=values,
        datasets=datasets or list(CLUSTERKV_DATASETS),
        methods=list(dict.fromkeys(key[1] for key in values)),
        budgets=[b for b in dict.fromkeys(key[2] for key in values) if b not in ("1", "full")],
    )


def read_published_efficiency() -> dict[str, dict[str, str]]:
    """The figures of `EFFICIENCY` by method and metric."""
    with (PUBLISHED / f"{EFFICIENCY.name}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        method: {row["metric"]: row["value"] for row in rows if row["method"] == method}
        for method in EFFICIENCY.methods
    }
