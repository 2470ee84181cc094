"""The tables of docs/cited.md: which value goes into which column, and who is compared."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from kvbench.plots import cited, findings
from kvbench.results import SampleRow
from kvbench.tasks.oolong.made import KINDS

SETS = {asked.experiment: asked for asked in cited.SETS}


def line(method: str, sample: str, value: float = 1.0, column: str = "icl") -> cited.Line:
    return cited.Line("helmet", column, "m", method, sample, value)


def test_a_method_with_few_samples_is_left_out_and_takes_none_from_the_others() -> None:
    samples = [str(i) for i in range(8)]
    lines = [line(method, sample) for method in ("full", "quest") for sample in samples]
    lines += [line("h2o", sample) for sample in samples[:5]] + [line("kvzip", sample) for sample in samples[:6]]
    (column,) = cited.columns_of(SETS["helmet"], lines)
    assert {*column.of} == {"full", "quest", "kvzip"} and len(column.full) == 6
    assert cited.ABSENT in cited.cell(column, "h2o", {})


def row(**fields: object) -> SampleRow:
    made = SampleRow.__new__(SampleRow)
    object.__setattr__(made, "fields", fields)
    return made


def test_every_kind_of_question_on_a_list_and_every_age_has_a_column() -> None:
    asked = SETS["oolong"]
    assert {asked.column(row(kind=kind)) for kind in KINDS} == {*asked.columns}
    ages = [SETS["airline"].column(row(age=age)) for age in (1, 500, 501, 10**6, None)]
    assert ages == ["recent", "recent", "older", "older", ""]


@pytest.mark.parametrize("experiment", [name for name, asked in SETS.items() if asked.chance])
def test_full_attention_that_may_be_guessing_is_compared_with_nobody(experiment: str) -> None:
    asked, (name, chance) = SETS[experiment], next(iter((SETS[experiment].chance or {}).items()))
    at_chance = cited.Column(asked, name, {"full": {str(i): float(i < 10 * chance) for i in range(10)}})
    assert at_chance.is_at_chance
    assert not replace(at_chance, of={"full": {str(i): 1.0 for i in range(10)}}).is_at_chance


def test_the_page_that_is_committed_is_the_one_that_its_values_make() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    assert (docs / "cited.md").read_text(encoding="utf-8") == cited.page(cited.load(docs / "cited" / cited.KEPT))


def test_a_loss_stands_as_what_is_lost_more_with_its_test() -> None:
    levels = {"full": [0.5 + 0.01 * i for i in range(12)], "snapkv": [2.5 + 0.02 * i for i in range(12)]}
    lines = [
        cited.Line("mrcr", "1needle", "m", method, f"{i}", value)
        for method, values in (levels | {"pqcache": levels["full"]}).items()
        for i, value in enumerate(values)
    ]
    text = cited.section(SETS["mrcr"], lines)
    assert "| Full | 0.56 |" in text and "| SnapKV | +2.06 (" in text and " * |" in text
    assert "- one of its kind: SnapKV shown to lose." in text


@pytest.mark.parametrize("module", [cited, findings])
@pytest.mark.parametrize("text", [None, "lr: 0.1\n", "[1, 2]\n"])
def test_a_folder_without_runs_leaves_what_is_kept(
    module: ModuleType, text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, runs = tmp_path / "docs", tmp_path / "runs"
    kept = out / module.NAME / module.KEPT
    kept.parent.mkdir(parents=True)
    cited.keep(kept, [])
    before = kept.read_bytes()
    if text is not None:
        runs.mkdir()
        (runs / "config.yaml").write_text(text)
    assert module.main([str(runs), "--out", str(out)]) == 2
    assert ("holds no sample of a run" in (said := capsys.readouterr().err) or "is no mapping" in said) and said.count(
        "\n"
    ) == 1
    assert kept.read_bytes() == before


def test_what_a_label_warns_of_stands_in_the_table_and_below_it() -> None:
    levels = {"full": (0.5, "Full"), "kvzip": (2.5, "KVzip (C), whole prompt"), "h2o": (2.6, "H2O (C)")}
    lines = [
        cited.Line("mrcr", "1needle", "m", method, str(i), level + 0.01 * (i % 5), label=label)
        for method, (level, label) in levels.items()
        for i in range(12)
    ]
    text = cited.section(SETS["mrcr"], lines)
    assert "| KVzip (C), whole prompt | +2.00" in text and "| H2O (C) | +2.10" in text
    assert "- one of its kind: KVzip (C), whole prompt; H2O (C) shown to lose." in text


def test_every_kept_value_has_its_runs_label() -> None:
    kept = cited.load(Path(__file__).resolve().parents[2] / "docs" / "cited" / cited.KEPT)
    found = {line.method: line.label for line in kept}
    assert all(found.values()) and (found["quest"], found["h2o"]) == ("Quest (matched)", "H2O (C)")
    assert found["kvzip"] == "KVzip (C), whole prompt"
