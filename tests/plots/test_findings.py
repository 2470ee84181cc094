"""docs/results.md: findings and tables follow from samples' scores, and those that stand beside it make it again."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from plots.evidence import FULL, HIDDEN, SHOWN, Line, gathered, keep, lines_of, load, mean, read, title
from plots.findings import FINDINGS, LEAST, WORDS, compared, main, section, shown, write
from plots.stats import paired
from results import read_config
from tests.plots import made_runs

DOCS = Path(__file__).resolve().parents[2] / "docs"
N = 24
LEVELS = {  # of the right answers, with the question shown and hidden
    FULL: (0.9, 0.9), "pqcache": (0.9, 0.8), "snapkv": (0.7, 0.1), "kvzip": (0.8, 0.8), "kivi": (0.8, 0.8),
}  # fmt: skip


def lines(levels: dict[str, tuple[float, float]] = LEVELS, n: int = N) -> list[Line]:
    """A sample is answered by all methods whose level is above its difficulty, which grows evenly."""
    found = []
    for method, each in levels.items():
        for scope, level in zip((SHOWN, HIDDEN), each, strict=True):
            for memory in ("",) if method == FULL else ("0.25", "0.125"):
                held = 1000.0 if method == FULL else 1000 * float(memory)
                place = scope, memory, method
                found += [Line("docs", "m", place, f"{i}", float(i / n < level), held) for i in range(n)]
    return found


def written(tmp_path: Path, made: list[Line]) -> str:
    (tmp_path / "results").mkdir(parents=True, exist_ok=True)
    keep(tmp_path / "results" / "scores.csv.gz", made)
    (page, *_) = write(tmp_path, None)
    return page.read_text()


def test_the_page_is_what_its_scores_make_and_its_files_are_there() -> None:
    sets = gathered(load(DOCS / "results" / "scores.csv.gz"))
    text = (DOCS / "results.md").read_text()
    for scores in sets:
        assert section(scores) in text, f"python -m plots.findings was not run after {scores.asked.key} changed"
    for link in re.findall(r"\]\((results/[^)]+)\)", text):
        assert (DOCS / link).is_file()
    assert (DOCS / "results" / "scores.csv.gz").stat().st_size < 500_000


def test_a_finding_is_left_out_unless_the_test_shows_it(tmp_path: Path) -> None:
    (strong,), (weak,) = gathered(lines()), gathered([line for line in lines() if int(line.sample) % 6 == 0])
    wanted = {(f.place, f.against) for f in FINDINGS if f.asked == "docs" and shown(f, [strong])}
    assert ((HIDDEN, "0.125", "snapkv"), "shown") in wanted
    assert ((HIDDEN, "0.125", "pqcache"), "snapkv") in wanted
    assert not any(shown(finding, [weak]) for finding in FINDINGS), "four samples show nothing"
    text = written(tmp_path, lines())
    assert f"n = {N}, p = " in text and "experiment=evidence_docs" in text
    assert "No comparison is shown." in written(tmp_path / "weak", [one for one in lines() if one.sample in "012"])


def test_a_findings_difference_is_that_of_its_samples_and_turns_with_its_direction() -> None:
    (scores,) = gathered(lines())
    finding = next(f for f in FINDINGS if f.against == "snapkv" and f.place == (HIDDEN, "0.125", "pqcache"))
    found = compared(finding, scores)
    ours, theirs = ([*scores.of[HIDDEN, "0.125", name].values()] for name in ("pqcache", "snapkv"))
    alone, turned = paired(ours, theirs), paired(theirs, ours)
    assert found is not None and found.sign == 1 and found.family == 6, "four methods make six pairs"
    assert found.paired.mean == pytest.approx(alone.mean) and found.p >= alone.p
    assert turned.turned.mean == alone.mean and (turned.turned.wins, turned.turned.losses) == (alone.wins, alone.losses)


def test_only_samples_that_all_variants_answered_count(tmp_path: Path) -> None:
    """A sweep that was stopped has answered its last sample for some of its methods."""
    made = [one for one in lines() if one.place[2] != "kivi" or int(one.sample) < 20]
    (scores,) = gathered(made)
    assert {len(values) for values in scores.of.values()} == {20}
    assert mean(scores.full(SHOWN)) == 1.0


def test_what_cannot_be_told_apart_is_said_as_a_group(tmp_path: Path) -> None:
    (scores,) = gathered(lines())
    assert scores.groups(HIDDEN, "0.125") == (["pqcache", "kvzip", "kivi"], ["snapkv"])
    text = written(tmp_path, lines())
    assert "hidden, 1/8: PQCache, KVzip, KIVI cannot be told apart from the best; one other is behind it." in text
    rows = list(csv.DictReader((tmp_path / "results" / "docs.csv").read_text().splitlines()))
    wanted = ("SnapKV", "0.125", WORDS[HIDDEN])
    (one,) = [row for row in rows if (row["method"], row["share of bytes"], row["scope"]) == wanted]
    assert (one["best rank"], one["worst rank"], one["n"]) == ("4", "4", str(N))
    assert float(one["bytes held, share of full"]) == 0.125


def test_where_full_attention_is_at_chance_nothing_is_compared(tmp_path: Path) -> None:
    low = dict.fromkeys(LEVELS, (LEAST / 100 - 0.1, LEAST / 100 - 0.1))
    text = written(tmp_path, lines(low))
    assert "no comparison is possible" in text and "|" not in text.split("## ")[1]


def test_scores_of_runs_are_kept_by_sample_whether_they_ended_or_not(tmp_path: Path) -> None:
    rows = [{"score": i / 4, "ledger": {"bytes_resident_device": 50.0}} for i in range(4)]
    for method, memory in (("full", None), ("snapkv", "1/4")):
        folder, _ = made_runs.write(
            tmp_path / "runs", method, "needle", rows, memory=memory, ratio=None, task_params={"style": "own"}
        )
    (folder / "result.json").unlink()
    found = read(tmp_path / "runs")
    assert {line.place for line in found} == {(SHOWN, "", "full"), (SHOWN, "1/4", "snapkv")}
    assert [line.score for line in found[:4]] == [0, 0.25, 0.5, 0.75] and {line.asked for line in found} == {"needle"}
    assert not [*lines_of(gathered(lines())[0].asked, read_config(folder), [])]
    keep(tmp_path / "kept.csv.gz", found)
    assert load(tmp_path / "kept.csv.gz") == found
    before = (tmp_path / "kept.csv.gz").read_bytes()
    keep(tmp_path / "kept.csv.gz", found)
    assert (tmp_path / "kept.csv.gz").read_bytes() == before


def test_titles_are_the_methods_own_and_a_missing_file_is_a_sentence(tmp_path: Path, capsys: Any) -> None:
    assert [title(name) for name in ("snapkv", "pqcache", "no_such_method")] == ["SnapKV", "PQCache", "no_such_method"]
    assert main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("plots.findings: ") and said.count("\n") == 1


def test_a_finding_of_two_kinds_needs_both_and_the_opposite_of_the_second() -> None:
    finding = next(one for one in FINDINGS if one.but)
    scope, memory, method = finding.place

    def asked(key: str, ours: float, theirs: float) -> list[Line]:
        levels = {("", FULL): 1.0, (memory, method): ours, (memory, finding.against): theirs}
        return [
            Line(key, "m", (scope, share, name), f"{i}", float(i / N < level), 1.0)
            for (share, name), level in levels.items()
            for i in range(N)
        ]

    first, same, other = asked(finding.asked, 0.9, 0.1), asked(finding.but, 0.9, 0.1), asked(finding.but, 0.1, 0.9)
    assert "Of names" in shown(finding, gathered([*first, *other]))
    assert not shown(finding, gathered([*first, *same])) and not shown(finding, gathered(first))
