import csv
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvbench.plots.read import load
from kvbench.plots.run_sets import run_sets
from kvbench.plots.site.overview import overview
from kvbench.plots.tables.command import main, write_table
from kvbench.plots.tables.paper_words import comm, records, sheet_of
from kvbench.plots.tables.papers import (
    AVERAGE,
    PUBLISHED,
    PaperTable,
    Table,
    build_all,
    canonical,
    paper_tables,
    read_published,
)
from kvbench.plots.tables.pivot import Cell
from kvbench.plots.tables.words import ANY, samples_below
from kvbench.results import sheet
from kvbench.results.intervals import FEW
from kvbench.tests.plots.made_runs import answers, every_kind
from kvbench.tests.plots.made_runs import write as make_run

CONF = Path(__file__).resolve().parents[2] / "conf"
TABLES = paper_tables()
TABLE2, TIMES = TABLES["pqcache_table2"], TABLES["xkv_table4"]
PAPER = ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum",
         "multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en")  # fmt: skip
OURS: dict[str, Any] = {"comm": "1/128", "model": "llama-3.1-8b-instruct", "source": "local"}


def markdown(table: Table) -> str:
    return sheet.markdown(sheet_of(table))


def latex(table: Table) -> str:
    return sheet.latex(sheet_of(table))


def as_csv(tables: list[Table]) -> str:
    return sheet.as_csv(records(tables))


def at(table: Table, dataset: str, method: str, budget: str) -> Cell:
    found = table.cell(dataset, method, budget)
    assert found is not None
    return found


def score(table: Table, dataset: str, method: str, budget: str) -> float:
    """As printed, unrounded."""
    mean = at(table, dataset, method, budget).mean
    assert mean is not None
    return table.pivot.scale * mean


def changed(**changes: Any) -> dict[str, Any]:
    return {**OURS, **changes}


def build(paper_table: PaperTable, root: Path) -> list[Table]:
    return build_all(samples_below(root))[paper_table.name]


def one(root: Path, paper_table: PaperTable = TABLE2) -> Table:
    (table,) = build(paper_table, root)
    return table


def test_a_cell_is_the_score_of_result_json_to_the_printed_digit(tmp_path: Path) -> None:
    _, full = make_run(tmp_path, "full", "longbench", answers(["qasper"], 0.7, 24), ratio="1", **OURS)
    _, ours = make_run(tmp_path, "h2o", "longbench", answers(["qasper"], 0.5, 24), **OURS)
    assert full.score and ours.score and ours.score_ci95
    table = one(tmp_path)
    place = "Qasper", "H2O (C)", "1/5"
    cell = at(table, *place)
    assert score(table, *place) == 100 * ours.score
    assert [cell.low, cell.high] == ours.score_ci95
    assert table.printed(*place) == "37.38" and cell.n == ours.n_samples
    assert table.difference(cell, "37.38") == pytest.approx(round(100 * ours.score, 2) - 37.38)
    text = markdown(table)
    half = (ours.score_ci95[1] - ours.score_ci95[0]) * 50
    assert f"| {100 * full.score:.2f} ±" in text
    assert f"{100 * ours.score:.2f} ± {half:.2f}" in text and "37.38 (" in text
    assert "| SPARQ |" in next(line for line in text.splitlines() if line.startswith("|"))
    assert cell.against is not None
    assert cell.against.paired.mean == pytest.approx(ours.score - full.score)


def test_what_an_index_on_the_device_costs_to_read_stands_beside_what_comm_allows(tmp_path: Path) -> None:
    """InfLLM moves nothing to find its blocks: the table said 0.0000 where the run's own said 311 KB of 216 allowed."""
    make_run(tmp_path, "full", "longbench", answers(["qasper"], 0.7), ratio="1", **OURS)
    keys = 2.0e6 / 2 / (1000 + 8 - 1) * 1000  # of the prompt: full attention keeps K and V of all tokens but the last
    for method, of_keys in (("infllm", 1 / 80), ("pqcache", 1 / 160)):
        read = {"bytes_moved_meta_per_step": 0.0, "bytes_index_read_per_step": keys * of_keys}
        make_run(tmp_path, method, "longbench", answers(["qasper"], 0.5, ledger=read), **OURS)
    table = one(tmp_path)
    assert comm(table, at(table, "Qasper", "InfLLM", "1/5")) == pytest.approx(1 / 80)
    costs = [line for line in markdown(table).splitlines() if " / 1/128 |" in line]
    assert [line.split(" | ")[0] for line in costs] == ["| Full", "| InfLLM", "| PQCache"]
    assert "| 0.0125 / 1/128 |" in costs[1] and "| 0.0063 / 1/128 |" in costs[2]
    assert "InfLLM read more to find tokens than comm prices" in markdown(table)
    (line,) = [line for line in records([table]) if line["method"] == "InfLLM" and line["run"]]
    assert line["comm_measured"] == pytest.approx(1 / 80)


def test_a_compensated_method_has_one_name_in_every_table(tmp_path: Path) -> None:
    """The papers' tables said "H2O(C)" and all others "H2O (C)"."""
    for paper_table in TABLES.values():
        assert {*read_published(paper_table).methods} <= {*paper_table.methods}
    make_run(tmp_path, "h2o", "longbench", answers(["qasper"], 0.4), **OURS)
    (run,) = load(tmp_path)
    assert run.result.method_label == "H2O (C)" in one(tmp_path).published.methods
    assert "(C)" not in re.sub(r" \(C\)", "", markdown(one(tmp_path)))


def test_what_our_run_is_called_stands_below_where_the_papers_name_says_less(tmp_path: Path) -> None:
    """A column has the paper's name: its "InfLLM" is no other method's, but our run may differ from the paper's."""
    for method, label in (("infllm", "InfLLM (blocks of 64)"), ("h2o", "H2O (C)"), ("sparq", "SPARQ")):
        make_run(tmp_path, method, "longbench", answers(["qasper"], 0.5), label=label, **OURS)
    text = markdown(one(tmp_path))
    assert "What our runs are, where the paper's name says less or other: InfLLM: InfLLM (blocks of 64)." in text
    cells = {row["method"]: row["label"] for row in csv.DictReader(as_csv([one(tmp_path)]).splitlines()) if row["run"]}
    assert cells == {"InfLLM": "InfLLM (blocks of 64)", "H2O (C)": "H2O (C)", "SPARQ": "SPARQ"}


def test_the_average_is_the_mean_of_the_printed_scores_and_needs_all_datasets(tmp_path: Path) -> None:
    rows = answers(PAPER, 0.4)
    make_run(tmp_path, "pqcache", "longbench", rows, **OURS)
    make_run(tmp_path, "h2o", "longbench", answers(PAPER[:3], 0.4), **OURS)
    table = one(tmp_path)
    parts = [round(100 * sum(r["score"] for r in rows if r["fields"]["dataset"] == name) / 6, 2) for name in PAPER]
    place = AVERAGE, "PQCache", "1/5"
    assert score(table, *place) == pytest.approx(sum(parts) / 14) and table.printed(*place) == "47.29"
    assert table.cell(AVERAGE, "H2O (C)", "1/5") is None
    (common,) = [name for name in table.rows if name.startswith("Mean of 3")]
    assert table.printed(common, "H2O (C)", "1/5") == f"{(30.94 + 37.38 + 48.80) / 3:.2f}"


def test_bold_is_the_best_without_full_oracle_and_runs_over_budget(tmp_path: Path) -> None:
    def add(method: str, level: float, within: bool = True) -> None:
        rows = [{"score": level, "fields": {"dataset": "trec"}, "ledger": {"within_budget": within}}]
        make_run(tmp_path, method, "longbench", rows * FEW, **OURS)

    for method, level in (("full", 0.9), ("oracle", 0.8), ("h2o", 0.3), ("pqcache", 0.4)):
        add(method, level)
    add("sparq", 0.7, within=False)
    table = one(tmp_path)
    marks = {m: cell.mark for ((m,), (_, name)), cell in table.pivot.cells.items() if name == "TREC" and cell.mark}
    assert marks == {"PQCache": "bold"}
    assert "**40.00** ±" in markdown(table) and "70.00 ± 8.42 †" in markdown(table)
    assert r"\textbf{40.00}" in latex(table) and r"$^\dagger$" in latex(table)


def test_what_differs_in_model_data_or_comm_is_never_in_one_table(tmp_path: Path) -> None:
    make_run(tmp_path, "h2o", "longbench", answers(["trec"], 0.5), **OURS)
    make_run(tmp_path, "h2o", "longbench", answers(["trec"], 0.6), **changed(comm="1/64"))
    make_run(tmp_path, "h2o", "longbench", answers(["trec"], 0.7), **changed(model="tiny"))
    make_run(tmp_path, "h2o", "longbench", answers(["docs_qa"], 0.8), **changed(source="embedded"))
    found = build(TABLE2, tmp_path)
    assert [table.is_paper_setting for table in found] == [True, False, False, False]
    embedded = next(table for table in found if table.pivot.where["data"] == "embedded")
    text = markdown(embedded)
    assert "EMBEDDED DATA" in text and "| docs_qa |" in text and "paper |" not in text
    assert "EMBEDDED DATA" not in markdown(found[0])


def test_cells_out_of_memory_and_not_run_are_told_apart(tmp_path: Path) -> None:
    rows = [{"score": None, "fields": {"dataset": "trec"}}] * 2
    make_run(tmp_path, "h2o", "longbench", rows, **OURS)
    make_run(tmp_path, "pqcache", "longbench", answers(["trec"], 0.5), **OURS)
    row = next(line for line in markdown(one(tmp_path)).splitlines() if line.startswith("| TREC |"))
    assert row.count("- (2 oom)") == 1 and "| - |" in row


def test_costs_stand_against_what_was_allowed(tmp_path: Path) -> None:
    ledger = {"tokens_attended_mean": 190.0, "tokens_budget": 200.0, "bytes_moved_kv_per_step": 1.5e6}
    make_run(tmp_path, "pqcache", "longbench", answers(["trec"], 0.5, ledger=ledger), **OURS)
    assert "| PQCache | ratio 1/5 | 190 / 200 |" in markdown(one(tmp_path))
    assert "1.5 MB" in markdown(one(tmp_path))


def test_csv_has_every_cell_unrounded(tmp_path: Path) -> None:
    folder, result = make_run(tmp_path, "h2o", "longbench", answers(["trec"], 0.5), **OURS)
    rows = list(csv.DictReader(as_csv([one(tmp_path)]).splitlines()))
    (row,) = [row for row in rows if row["n"] != "0"]
    assert result.score is not None and float(row["value"]) == 100 * result.score
    assert row["run"] == folder.name and row["published"] == "69.00" and row["over_budget"] == "false"


def test_times_of_shared_batches_are_left_out(tmp_path: Path) -> None:
    rows = answers(["narrativeqa"], 0.5, n=3)
    make_run(tmp_path, "full", "longbench", rows, ratio="1")
    (table,) = build(TIMES, tmp_path)
    place = "single_task_runtime_s", "FullKV", ANY
    assert score(table, *place) == pytest.approx(0.9) and table.printed(*place) == "7.18"
    assert score(table, "total_runtime_s", "FullKV", ANY) == pytest.approx(2.7)


def test_the_embedded_set_stands_in_for_the_efficiency_tables_dataset(tmp_path: Path) -> None:
    make_run(tmp_path, "full", "longbench", answers(["docs_qa"], 0.7), ratio="1")
    make_run(tmp_path, "full", "longbench", answers(["docs_qa"], 0.7), ratio="1", comm="1/16")
    make_run(tmp_path, "xkv", "longbench", answers(["docs_qa"], 0.7), ratio="0.385", label="XKV")
    (table,) = build(TIMES, tmp_path)
    assert score(table, "single_task_runtime_s", "XKV", ANY) == pytest.approx(0.9)
    assert "EMBEDDED DATA" in markdown(table)


def test_full_attention_alone_is_a_table_only_where_nothing_else_was_run(tmp_path: Path) -> None:
    rows = answers(["qasper"], 0.4)
    make_run(tmp_path, "full", "longbench", rows, ratio="1", **OURS)
    assert len(build(TABLE2, tmp_path)) == 1
    make_run(tmp_path, "full", "longbench", rows, ratio="1", task_params={"strip": True}, **OURS)
    make_run(tmp_path, "h2o", "longbench", rows, **OURS)
    (table,) = build(TABLE2, tmp_path)
    assert at(table, "Qasper", "H2O (C)", "1/5").n


@pytest.mark.parametrize("paper_table", TABLES.values(), ids=lambda paper_table: paper_table.name)
def test_each_table_has_its_published_figures_and_experiment(paper_table: PaperTable) -> None:
    assert (CONF / "experiment" / f"{paper_table.name}.yaml").is_file()
    paper = read_published(paper_table)
    assert set(paper.methods) <= set(paper_table.methods) and (paper.budgets or paper_table is TIMES)
    assert len({canonical(name) for name in paper.datasets}) == len(paper.datasets)


def test_what_is_published_of_methods_that_cut_an_answer_stands_beside_runs_on_its_model(tmp_path: Path) -> None:
    where: dict[str, Any] = {"model": "DeepSeek-R1-Distill-Llama-8B", "source": "local", "comm": "0"}
    rows = [{"score": score, "fields": {"dataset": "math500/plain"}} for score in (1.0, 1.0, 0.0, 1.0)]
    make_run(tmp_path, "full", "math500_rkv", rows, ratio="1", **where)
    make_run(tmp_path, "rkv_code", "math500_rkv", rows, budget=512, ratio=None, label="R-KV", **where)
    table = one(tmp_path, TABLES["rkv_table"])
    place = "MATH-500", "R-KV", "512"
    assert (score(table, *place), table.printed(*place), at(table, *place).n) == (75.0, "76.9", 4)
    assert table.is_paper_setting and table.printed("MATH-500", "TriAttention", "512") == "80.6"


def test_without_runs_the_commands_are_said(tmp_path: Path, capsys) -> None:
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    for path in PUBLISHED.glob("*.csv"):
        assert f"python run.py -m experiment={path.stem} scale=smoke" in said


def test_a_damaged_run_is_named(tmp_path: Path, capsys) -> None:
    folder, _ = make_run(tmp_path, "h2o", "longbench", answers(["trec"], 0.5), **OURS)
    (folder / "result.json").write_text("{}")
    assert main([str(tmp_path)]) == 2
    assert folder.name in capsys.readouterr().err


@pytest.mark.skipif(
    not (shutil.which("tectonic") or shutil.which("pdflatex")),
    reason="neither pdflatex nor tectonic is installed (Debian: texlive-latex-recommended)",
)
def test_latex_compiles(tmp_path: Path) -> None:
    every_kind(tmp_path / "runs")
    make_run(tmp_path / "runs", "h2o", "longbench", answers(PAPER, 0.5), **OURS)
    made = build_all(samples_below(tmp_path / "runs"))
    names = [name for name, tables in made.items() if tables and write_table(tmp_path, tables)]
    assert "pqcache_table2" in names
    inputs = "\n".join(rf"\input{{{name}}}" for name in names)
    head = r"\documentclass[twocolumn]{article}\usepackage{booktabs,graphicx}"
    page = rf"{head}\begin{{document}}{inputs}\end{{document}}"
    (tmp_path / "page.tex").write_text(page)
    if shutil.which("tectonic"):
        command = ["tectonic", "page.tex"]
    else:
        command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "page.pdf").stat().st_size > 1000


def test_runs_with_other_prompts_have_tables_of_their_own(tmp_path: Path) -> None:
    rows = answers(["qasper"], 0.4)
    make_run(tmp_path, "full", "longbench", rows, ratio="1", **OURS)
    make_run(tmp_path, "h2o", "longbench", rows, **OURS)
    cut = {"max_prompt_tokens": 2000, "rows": 6}
    make_run(tmp_path, "pqcache", "longbench", rows, task_params=cut, **OURS)
    plain, short = build(TABLE2, tmp_path)
    assert (plain.pivot.where["prompts"], short.pivot.where["prompts"]) == ("", "max_prompt_tokens=2000")
    assert plain.cell("Qasper", "PQCache", "1/5") is None
    assert short.cell("Qasper", "Full", "1/5") is None
    assert "max_prompt_tokens=2000" in markdown(short) and "max_prompt_tokens=2000" in latex(short).replace("\\_", "_")


def test_wording_of_our_own_is_never_compared_with_what_was_published(tmp_path: Path) -> None:
    for where, notes in (("own", ["prompts: own"]), ("official", ["prompts: official"])):
        make_run(tmp_path / where, "pqcache", "longbench", answers(["qasper"], 0.4), notes=notes, **OURS)
    own, official = one(tmp_path / "own"), one(tmp_path / "official")
    assert official.is_paper_setting and not own.is_paper_setting
    assert "differences mean little" in markdown(own) and "(ours less it)" in markdown(official)


def by_prefill(root: Path) -> None:
    """Full attention and PQCache, behind the exact prefill and a sparse one."""
    settings: dict[str, Any] = {"comm": "1/64", "model": "llama-3.1-8b-instruct", "source": "local"}
    for i, prefill in enumerate((None, {"n_vertical": 1000, "n_slash": 6096})):
        for j, method in enumerate(("full", "pqcache")):
            rows = answers(["passkey"], 0.8 - 0.2 * i - 0.1 * j, n=7)
            make_run(root, method, "infinitebench", rows, prefill=prefill, **settings)


def test_table_5_has_a_column_for_each_prefill_and_all_others_only_exact_runs(tmp_path: Path) -> None:
    by_prefill(tmp_path)
    table = one(tmp_path, TABLES["pqcache_table5"])
    found = {m: at(table, "Retr.PassKey", m, "1/5") for m in table.published.methods}
    assert all(cell.n == 7 for cell in found.values())
    scores = [found[m].mean for m in ("Full", "PQCache", "MInference", "MInference+PQCache")]
    assert scores == sorted((score for score in scores if score is not None), reverse=True)
    assert [("minference" in found[m].of["folder"]) for m in found] == ["MInference" in m for m in found]
    assert table.pivot.notes == [] and table.is_paper_setting
    assert found["MInference+PQCache"].against is not None
    assert "prefill minference n_vertical=1000 n_slash=6096" in markdown(table)
    table = one(tmp_path, TABLES["pqcache_table4"])
    assert not any("minference" in cell.of["folder"] for cell in table.pivot.cells.values())
    assert "minference" not in markdown(table)


def test_two_sparsities_are_two_tables_with_the_same_exact_columns(tmp_path: Path) -> None:
    by_prefill(tmp_path)
    settings: dict[str, Any] = {"comm": "1/64", "model": "llama-3.1-8b-instruct", "source": "local"}
    rows = answers(["passkey"], 0.1)
    make_run(tmp_path, "pqcache", "infinitebench", rows, prefill={"n_vertical": 9}, **settings)
    found = build(TABLES["pqcache_table5"], tmp_path)
    assert len(found) == 2
    full = [at(table, "Retr.PassKey", "Full", "1/5").of["folder"] for table in found]
    both = [score(table, "Retr.PassKey", "MInference+PQCache", "1/5") for table in found]
    assert full[0] == full[1] and both[0] != both[1]
    samples: Any = samples_below(tmp_path)
    (alone,) = build_all(samples[samples["prefill"] == "exact"])["pqcache_table5"]
    assert "prefill" not in alone.pivot.where


def test_figures_and_the_report_take_no_sparse_prefill_for_exact(tmp_path: Path) -> None:
    by_prefill(tmp_path)
    runs = load(tmp_path)
    apart = run_sets(runs)
    assert len(apart) == 2
    assert [len({run.result.prefill for run in run_set.runs}) for run_set in apart] == [1, 1]
    assert sum("prefill minference" in run_set.about for run_set in apart) == 1
    described = {one["label"]: one for one in overview(runs, tmp_path)["runs"]}
    assert set(described) == {"Full", "PQCache", "MInference", "MInference + PQCache"}
    assert [label for label, one in described.items() if one["full"]] == ["Full"]
    paired = {label: one["parts"][0]["paired"] for label, one in described.items()}
    assert paired["Full"] is None and paired["MInference"]["mean"] < 0


def test_runs_on_another_model_do_not_answer_a_papers_table(tmp_path: Path) -> None:
    for method in ("full", "pqcache"):
        make_run(tmp_path, method, "longbench", answers(PAPER[:2], 0.4), **changed(model="tiny", comm="1/128"))
    for paper_table in TABLES.values():
        if paper_table.name in ("pqcache_table2", "pqcache_table6"):
            (table,) = build(paper_table, tmp_path)
            assert table.is_layout_only and not table.published.values
            text = markdown(table)
            assert "NOT THE PAPER'S MODEL" in text and "paper |" not in text
            write_table(tmp_path / "out", [table])
            first = (tmp_path / "out" / f"{paper_table.name}.md").read_text().splitlines()[0]
            assert first.endswith(f"no run is on its model, {paper_table.models[0]}")
            assert "no run is on its model" in latex(table)


def test_a_budget_that_only_full_attention_was_run_at_has_no_block(tmp_path: Path) -> None:
    make_run(tmp_path, "full", "longbench", answers(["trec"], 0.8), ratio="1", **OURS)
    make_run(tmp_path, "h2o", "longbench", answers(["trec"], 0.5), **OURS)
    table = one(tmp_path)
    assert table.budgets == ["1/5"]
    assert markdown(table).count("### ") == 1 and latex(table).count(r"\emph{") == 1


def test_names_of_columns_and_labels_are_said_once(tmp_path: Path) -> None:
    make_run(tmp_path, "h2o", "longbench", answers(["trec"], 0.5), **OURS)
    make_run(tmp_path, "h2o", "longbench", answers(["trec"], 0.5), **changed(comm="1/64"))
    tables = build(TABLE2, tmp_path)
    head = as_csv(tables).splitlines()[0].split(",")
    assert len(set(head)) == len(head)
    write_table(tmp_path / "out", tables)
    labels = re.findall(r"\\label{(.*?)}", (tmp_path / "out" / "pqcache_table2.tex").read_text())
    assert labels == ["tab:pqcache-table2", "tab:pqcache-table2-2"]
    assert "/ 1/128 |" in markdown(tables[0])
