"""docs/which-method.md: what stands on it follows from the scores beside two other pages."""

from pathlib import Path

import pytest

from kvbench.plots import cited
from kvbench.plots.evidence import FULL, HIDDEN, SHOWN, gathered, load, mean
from kvbench.plots.which import MOST, every, fetches, first, labels, main, needs, page, standings, take, today
from kvbench.tests.plots.test_findings import DOCS, labelled, lines, written


def test_the_page_is_what_the_scores_make() -> None:
    sets, values = gathered(load(DOCS / "results" / "scores.csv.gz")), cited.load(DOCS / "cited" / "scores.csv.gz")
    assert page(sets, values) == (DOCS / "which-method.md").read_text(), "run python -m kvbench.plots.which"


def test_only_what_a_machine_can_run_competes() -> None:
    sets = gathered(lines())
    with_host, alone = (standings(sets, HIDDEN, "0.125", has_host) for has_host in (True, False))
    assert [*with_host] == [*alone] == ["copying"]
    by_host, near = with_host["copying"], alone["copying"]
    assert {*by_host} == {"kivi", "kvzip", "pqcache", "snapkv"} and {*near} == {"kivi", "kvzip", "snapkv"}
    assert not by_host["snapkv"].is_in_front and by_host["snapkv"].distance == pytest.approx(-80, abs=5)
    named = labels(sets, HIDDEN, "0.125")
    assert "KIVI" in first(by_host, named) and "SnapKV" not in first(by_host, named)
    assert fetches("pqcache") and needs("kvzip") == "a second reading of the prompt" and needs("snapkv") == "-"


def test_a_method_that_is_best_of_what_may_run_is_in_front_though_another_beats_it() -> None:
    sets = gathered(lines({FULL: (0.9, 0.9), "pqcache": (0.9, 0.9), "snapkv": (0.5, 0.5), "tova": (0.1, 0.1)}))
    assert not standings(sets, SHOWN, "0.25", has_host=True)["copying"]["snapkv"].is_in_front
    assert standings(sets, SHOWN, "0.25", has_host=False)["copying"]["snapkv"].is_in_front
    table = take(sets)
    assert "| copying | PQCache (0; " in table and "| copying | SnapKV (-42; " in table


def test_a_skill_counts_once_and_a_method_is_in_front_where_none_of_its_tasks_shows_a_better_one() -> None:
    """On the committed scores KVzip collapses on documents at 1/16, whatever three kinds of needles say."""
    sets = gathered(load(DOCS / "results" / "scores.csv.gz"))
    found = standings(sets, SHOWN, "0.0625", has_host=False)
    assert not found["copying"]["kvzip"].is_in_front and found["copying"]["kvzip"].distance < -60
    assert found["finding"]["kvzip"].is_in_front
    (docs,) = [one for one in sets if one.asked.key == "docs"]
    assert found["copying"]["snapkv"].paired.n == docs.n(SHOWN, "0.0625")
    hidden = standings(sets, HIDDEN, "0.25", has_host=True)["copying"]  # documents, and eight questions on a context
    assert "adakv" not in hidden and "snapkv" in hidden  # which was asked one of the two
    shared = next(one for one in sets if one.asked.key == "shared")
    n = [docs.n(HIDDEN, "0.25"), shared.n(HIDDEN, "0.25")]
    assert hidden["snapkv"].paired.n == sum(n)
    means = [100 * (mean(x.of[HIDDEN, "0.25", "snapkv"]) - mean(x.full(HIDDEN, "0.25"))) for x in (docs, shared)]
    assert hidden["snapkv"].distance == pytest.approx(sum(means) / 2)


@pytest.mark.parametrize("level", [0.2, 0.5], ids=["cannot do", "does too seldom for half of it to be seen lost"])
def test_a_task_that_full_attention_hardly_does_counts_for_nobody(level: float) -> None:
    sets = gathered(lines({FULL: (level, level), "pqcache": (level, level), "snapkv": (0.1, 0.1)}))
    assert sets[0].has_room(SHOWN, "0.25") == (level == 0.5)
    assert standings(sets, SHOWN, "0.25", has_host=True) == {} and first({}, {}) == "-"


def test_many_ties_are_counted_and_not_all_named() -> None:
    names = ["snapkv", "tova", "kvzip", "kivi", "keydiff", "h2o"]
    sets = gathered(lines({FULL: (0.9, 0.9), **dict.fromkeys(names, (0.9, 0.9))}))
    standing = standings(sets, SHOWN, "0.25", has_host=False)["copying"]
    assert len(names) > MOST and first(standing, labels(sets, SHOWN, "0.25")).endswith(f" and {len(names) - 1} more")


def test_losses_are_counted_where_full_attention_is_above_chance() -> None:
    def made(method: str, level: float) -> list[cited.Line]:
        return [cited.Line("mrcr", "1needle", "m", method, str(i), level + 0.01 * (i % 3)) for i in range(20)]

    table = today([*made("full", 0.5), *made("oracle", 0.5), *made("snapkv", 2.5), *made("pqcache", 0.5)])
    assert "| SnapKV | 1 of 1 | MRCR: one of its kind |" in table and "| PQCache | 0 of 1 | - |" in table
    assert "Oracle" not in table


def test_a_folder_of_somebodys_own_scores_needs_none_of_cited_tasks(tmp_path: Path) -> None:
    written(tmp_path, lines())
    assert main(["--out", str(tmp_path)]) == 0
    text = (tmp_path / "which-method.md").read_text()
    assert "| PQCache | host memory |" in text and "cited now" not in text
    assert "## On the tasks that are cited now" in (DOCS / "which-method.md").read_text()


def test_scores_that_are_not_there_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("kvbench.plots.which: ")


def test_what_a_label_warns_of_stands_in_every_table() -> None:
    sets = gathered(labelled())
    assert "cannot be told: KVzip, whole prompt (0; " in take(sets)
    assert "| KVzip, whole prompt (question hidden: KVzip) | a second" in every(sets) and "| KIVI 2 bit |" in every(
        sets
    )
    made = [
        cited.Line("mrcr", "1needle", "m", method, str(i), level + 0.01 * (i % 3), label=label)
        for method, level, label in (("full", 0.5, "Full"), ("kvzip", 2.5, "KVzip (C), whole prompt"))
        for i in range(20)
    ]
    assert "| KVzip (C), whole prompt | 1 of 1 |" in today(made)
