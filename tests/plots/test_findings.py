"""docs/results.md: findings and tables follow from samples' scores, and those that stand beside it make it again."""

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.plots.contrasts import CONTRASTS, LOOKED, OTHER_SCOPE, Contrast, looked_at, outcomes
from kvbench.plots.evidence import (
    FULL,
    HIDDEN,
    SETS,
    SHOWN,
    WORDS,
    Costs,
    Line,
    gathered,
    keep,
    lines_of,
    load,
    mean,
    read,
    renewed,
    title,
)
from kvbench.plots.figures.evidence import main_scope, named, picture
from kvbench.plots.findings import FINDINGS, main, page, section, shown, write
from kvbench.plots.stats import paired
from kvbench.plots.which import standings
from kvbench.results import read_config
from kvbench.tests.plots import made_runs

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
                found += [Line("docs", "m", place, f"{i}", float(i / n < level), Costs(held)) for i in range(n)]
    return found


def written(tmp_path: Path, made: list[Line]) -> str:
    (tmp_path / "results").mkdir(parents=True, exist_ok=True)
    keep(tmp_path / "results" / "scores.csv.gz", made)
    (path, *_) = write(tmp_path, None)
    return path.read_text()


def test_the_page_is_what_its_scores_make_and_its_files_are_there() -> None:
    sets = gathered(load(DOCS / "results" / "scores.csv.gz"))
    text = (DOCS / "results.md").read_text()
    assert page(sets) == text, "python -m kvbench.plots.findings was not run after the scores or the words changed"
    for link in re.findall(r"\]\((results/[^)]+)\)", text):
        assert (DOCS / link).is_file()
    assert (DOCS / "results" / "scores.csv.gz").stat().st_size < 500_000


def test_a_finding_is_left_out_unless_the_test_shows_it(tmp_path: Path) -> None:
    (strong,), (weak,) = gathered(lines()), gathered([line for line in lines() if int(line.sample) % 6 == 0])
    wanted = {(f.contrast.place, f.contrast.against) for f in FINDINGS if shown(f, [strong])}
    assert ((HIDDEN, "0.125", "snapkv"), "shown") in wanted
    assert ((HIDDEN, "0.125", "pqcache"), "snapkv") in wanted
    assert not any(shown(finding, [weak]) for finding in FINDINGS), "four samples show nothing"
    text = written(tmp_path, lines())
    assert f"n = {N}, p = " in text and "experiment=evidence_docs" in text and "kind, chosen afterwards; " in text
    assert "No comparison is shown." in written(tmp_path / "weak", [one for one in lines() if one.sample in "012"])


def test_a_findings_difference_is_that_of_its_samples_and_turns_with_its_direction() -> None:
    (scores,) = gathered(lines())
    found = looked_at(Contrast("docs", (HIDDEN, "0.125", "pqcache"), "snapkv", N), scores)
    ours, theirs = ([*scores.of[HIDDEN, "0.125", name].values()] for name in ("pqcache", "snapkv"))
    alone, turned = paired(ours, theirs), paired(theirs, ours)
    assert found is not None and found.sign == 1 and found.family == 6, "four methods make six pairs"
    assert found.paired.mean == pytest.approx(alone.mean) and found.p >= alone.p
    assert turned.turned.mean == alone.mean and (turned.turned.wins, turned.turned.losses) == (alone.wins, alone.losses)


def test_only_samples_that_all_variants_answered_count(tmp_path: Path) -> None:
    """A sweep that was stopped has answered its last sample for some methods; this leaves other budgets as they are."""
    made = [one for one in lines() if one.place[1:] != ("0.25", "kivi") or int(one.sample) < 20]
    (scores,) = gathered(made)
    assert {len(values) for place, values in scores.of.items() if place[1] == "0.25"} == {20}
    assert {len(values) for place, values in scores.of.items() if place[1] == "0.125"} == {N}
    assert mean(scores.full(SHOWN, "0.25")) == 1.0
    assert f"question hidden: n = 20 at 1/4, n = {N} at 1/8, of 100" in section(scores)
    assert "asks. Not asked: H2O.\n" in section(scores, {"kivi": "KIVI", "h2o": "H2O"})
    assert "Not asked" not in section(scores, {"kivi": "KIVI"})


def test_what_cannot_be_told_apart_is_said_as_a_group(tmp_path: Path) -> None:
    (scores,) = gathered(lines())
    assert scores.groups(HIDDEN, "0.125") == (["pqcache", "kivi", "kvzip"], ["snapkv"])
    text = written(tmp_path, lines())
    assert "hidden, 1/8: PQCache, KIVI, KVzip cannot be told apart from the best; one other is behind it." in text
    rows = list(csv.DictReader((tmp_path / "results" / "docs.csv").read_text().splitlines()))
    wanted = ("SnapKV", "0.125", WORDS[HIDDEN])
    (one,) = [row for row in rows if (row["method"], row["share of bytes"], row["scope"]) == wanted]
    assert (one["best rank"], one["worst rank"], one["n"]) == ("4", "4", str(N))
    assert float(one["bytes held, share of full"]) == 0.125


def test_where_full_attention_is_at_chance_nothing_is_compared(tmp_path: Path) -> None:
    low = dict.fromkeys(LEVELS, (0.2, 0.2))
    text = written(tmp_path, lines(low))
    assert "no comparison is possible" in text and "|" not in text.split("\n## ")[2]
    fixed = [Contrast("docs", (SHOWN, "0.125", "pqcache"), "snapkv", 0)]
    assert outcomes(gathered(lines()), fixed) and not outcomes(gathered(lines(low)), fixed)
    assert "| too few answers |" in text


def test_scores_of_runs_are_kept_by_sample_whether_they_ended_or_not(tmp_path: Path) -> None:
    for method, memory, label in (("full", None, ""), ("snapkv", "1/4", "SnapKV (C)")):
        more = {"fields": {"variant": label}} if label else {}
        rows = [{"score": i / 4, "ledger": {"bytes_resident_device": 50.0}} | more for i in range(4)]
        folder, _ = made_runs.write(
            tmp_path / "runs", method, "needle", rows, memory=memory, ratio=None,
            task_params={"style": "own", "needles": 1},
        )  # fmt: skip
    (folder / "result.json").unlink()
    found = read(tmp_path / "runs")
    assert {line.place for line in found} == {(SHOWN, "", "full"), (SHOWN, "1/4", "snapkv")}
    assert {line.label for line in found} == {"Full", "SnapKV (C)"}, "as samples say it, or else result.json"
    assert [line.score for line in found[:4]] == [0, 0.25, 0.5, 0.75] and {line.asked for line in found} == {"needle"}
    assert not [*lines_of(gathered(lines())[0].asked, read_config(folder), [], "")]
    keep(tmp_path / "kept.csv.gz", found)
    assert load(tmp_path / "kept.csv.gz") == found
    before = (tmp_path / "kept.csv.gz").read_bytes()
    keep(tmp_path / "kept.csv.gz", found)
    assert (tmp_path / "kept.csv.gz").read_bytes() == before


def test_runs_of_one_method_at_one_budget_replace_nothing_else() -> None:
    """Of other methods, scopes, budgets, tasks and models everything stays."""
    place = HIDDEN, "0.125", "snapkv"
    others = [*(replace(line, asked="shared") for line in lines()), *(replace(line, model="other") for line in lines())]
    others += [line for line in lines() if line.place != place]
    asked = [line for line in lines() if line.place == place]
    again = [replace(line, score=0.5) for line in asked]
    found = renewed([*others, *asked], again)
    assert {*found} == {*others, *again} and len(found) == len(others) + len(again)


def test_a_place_of_which_one_sample_is_asked_again_is_of_the_later_runs_alone() -> None:
    place = HIDDEN, "0.125", "snapkv"
    again = [replace(line, score=0.5) for line in lines() if line.place == place and 20 <= int(line.sample)]
    found = renewed(lines(), again)
    assert [line for line in found if line.place == place] == again
    (scores,) = gathered(found)
    assert {column: scores.n(*column) for column in scores.columns if scores.n(*column) < N} == {place[:2]: N - 20}


def test_samples_that_are_not_kept_are_added_behind_those_that_are() -> None:
    """A run that went on elsewhere: what was known first stays first, whichever half that is."""
    first, rest = ([line for line in lines() if (int(line.sample) < 10) == is_first] for is_first in (True, False))
    for kept, later in ((first, rest), (rest, first)):
        found = renewed(kept, later)
        assert {*found} == {*lines()} and len(found) == len(lines())
        (scores,) = gathered(found)
        known = [line.sample for line in kept if line.place == (SHOWN, "", FULL)]
        assert [*scores.full(SHOWN, "0.25")][: len(known)] == known


def test_samples_known_before_a_comparison_was_picked_stay_the_first_when_they_are_asked_in_another_order() -> None:
    kept = [line for line in lines() if int(line.sample) < 10]
    turned = [replace(line, sample=f"{(int(line.sample) + 10) % N}") for line in lines()]
    assert turned[0].sample == "10"
    picked = Contrast("docs", (HIDDEN, "0.125", "pqcache"), "snapkv", 10)
    fresh = picked.fresh(gathered(renewed(kept, turned)))
    assert fresh is not None and [*fresh[0]] == [f"{i}" for i in range(10, N)]


def test_what_is_kept_does_not_depend_on_how_many_runs_came_at_once(tmp_path: Path) -> None:
    made, by_method = lines(), list[Line]()
    for method in reversed(LEVELS):
        by_method = renewed(by_method, [line for line in made if line.place[2] == method])
    assert by_method == renewed([], made) == renewed(made, made)
    assert written(tmp_path / "one", by_method) == written(tmp_path / "other", made)


def test_other_methods_are_compared_with_the_first_ones_on_their_own_samples(tmp_path: Path) -> None:
    for method, levels in {"full": 4, "snapkv": 2, "clusterkv": 3}.items():
        rows = [{"score": float(i < levels), "ledger": {"bytes_resident_device": 50.0}} for i in range(4)]
        made_runs.write(
            tmp_path / "runs", method, "longbench", rows, memory=None if method == "full" else "1/4", ratio=None
        )
    found = read(tmp_path / "runs")
    assert {line.place[2] for line in found if line.asked == "docs"} == {"full", "snapkv"}
    assert {line.place[2] for line in found if line.asked == "docs-others"} == {"clusterkv"}

    first = lines({"full": (1.0, 1.0), "snapkv": (0.5, 0.4)})
    others = [
        replace(line, asked="docs-others") for line in lines({"clusterkv": (0.9, 0.2)}, n=20) if line.place[1] == "0.25"
    ]
    others += [replace(line, place=(HIDDEN, "0.5", "clusterkv")) for line in others[:20]]
    every = next(one for one in gathered([*first, *others]) if one.asked.key == "docs-others")
    assert {*every.methods} == {"snapkv", "clusterkv"} and every.memories == ["0.25"], "at no budget but the others'"
    assert every.n(SHOWN, "0.25") == 20, "on no samples but the others'"
    assert len(standings(gathered([*first, *others]), SHOWN, "0.25", has_host=True)) == 1, "docs/which-method.md"
    text = written(tmp_path, [*first, *others])
    part = text.partition("## All methods at one budget")[2]
    assert "| ClusterKV | **90** (" in part and "| SnapKV | 60 (" in part and "experiment=evidence_others_docs" in part
    assert "ClusterKV" not in text.partition("## All methods at one budget")[0]


def test_so_many_losses_are_shown_and_one_fewer_is_not() -> None:
    levels = {FULL: (0.5, 0.5), **dict.fromkeys(("pqcache", "snapkv", "kvzip", "kivi"), (0.5, 0.5))}
    (scores,) = gathered(lines(levels, 40))
    least, place = scores.least_lost(SHOWN), (SHOWN, "0.25", "snapkv")
    assert scores.answered(SHOWN, "0.25") == 20 and scores.has_room(SHOWN, "0.25")
    for n, sign in ((least, -1), (least - 1, 0)):
        lost = {**scores.of[place], **dict.fromkeys([*scores.of[place]][:n], 0.0)}
        assert replace(scores, of={**scores.of, place: lost}).against_full[place].sign == sign
    assert "does worse on 9 of those and better on none" in section(gathered(lines(levels, 30))[0])


def test_a_budget_in_tokens_is_of_draws_whose_mean_counts_with_their_lengths(tmp_path: Path) -> None:
    asked = next(one for one in SETS if one.key == "generating")
    rows = [
        {"score": float(i < 5 or draw), "generated_tokens": 100 + 100 * draw,
         "fields": {"sample": f"q{i}", "draw": draw, "cut_off": bool(draw)}}
        for i in range(40) for draw in (0, 1)
    ]  # fmt: skip
    for method, budget in (("full", None), ("rkv", 96)):
        made_runs.write(tmp_path, method, asked.task, rows, budget=budget, ratio=None, task_params=dict(asked.where))
        made_runs.write(tmp_path, method, asked.task, rows, budget=budget, ratio=None, task_params={"thinking": False})
    (scores,) = gathered(read(tmp_path))
    assert (scores.asked, scores.n(SHOWN, "96")) == (asked, 40) and scores.columns == [(SHOWN, "96")]
    assert mean(scores.of[SHOWN, "96", "rkv"]) == pytest.approx((5 + 0.5 * 35) / 40)
    text = section(scores, {"snapkv": "SnapKV"})
    assert "| R-KV | 56 (50 to 63) | 150 | 50 % |" in text and "n = 40, of 50" in text and "Not asked" not in text
    assert "| method | 96 tokens | answer in tokens | cut off |" in text and "question" not in text.split("|")[1]


def test_titles_are_the_methods_own_and_a_missing_file_is_a_sentence(tmp_path: Path, capsys: Any) -> None:
    assert [title(name) for name in ("snapkv", "pqcache", "no_such_method")] == ["SnapKV", "PQCache", "no_such_method"]
    assert main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvbench.plots.findings: ") and said.count("\n") == 1


LABELS = {
    (SHOWN, "kvzip"): "KVzip, whole prompt", (HIDDEN, "kvzip"): "KVzip",
    **dict.fromkeys(((SHOWN, "kivi"), (HIDDEN, "kivi")), "KIVI 2 bit"),
    **dict.fromkeys(((SHOWN, "quest"), (HIDDEN, "quest")), "Quest (matched)"),
}  # fmt: skip


def labelled() -> list[Line]:
    """As runs label them: KVzip reads the question, or does not."""
    levels = {FULL: (0.9, 0.9), "pqcache": (0.9, 0.8), "kvzip": (0.9, 0.8), "kivi": (0.2, 0.2), "quest": (0.2, 0.2)}
    return [replace(line, label=LABELS.get((line.place[0], line.place[2]), "")) for line in lines(levels)]


def test_what_a_label_warns_of_stands_on_the_page_in_its_tables_and_under_its_figure(tmp_path: Path) -> None:
    text = written(tmp_path, labelled())
    assert "| KVzip, whole prompt (question hidden: KVzip) |" in text and "| KIVI 2 bit |" in text
    assert "hidden, 1/8: KVzip, PQCache cannot be told apart from the best; 2 others are behind it." in text
    assert "shown, 1/8: KVzip, whole prompt; PQCache cannot" in text, "its comma is none between two methods"
    assert "methods that fetch (PQCache, Quest (matched)) keep" in text
    assert "documents: KIVI 2 bit against Full" in text and "KVzip, whole prompt against SnapKV" not in text
    assert "| Quest |" not in text and "| KIVI |" not in text
    rows = list(csv.DictReader((tmp_path / "results" / "docs.csv").read_text().splitlines()))
    assert {(row["scope"], row["method"]) for row in rows} >= {
        (WORDS[SHOWN], "KVzip, whole prompt"), (WORDS[HIDDEN], "KVzip"), (WORDS[HIDDEN], "Quest (matched)")
    }  # fmt: skip
    drawn = picture(gathered(labelled())[0])
    names = {label.get_text() for (ax,) in drawn.axes for label in ax.get_yticklabels()}
    assert names == {"PQCache", "KVzip", "KIVI 2 bit", "Quest (matched)"}
    assert any("Hollow marks of KVzip are KVzip, whole prompt" in note for note in drawn.notes)
    written(tmp_path, labelled())
    assert [line.label for line in load(tmp_path / "results" / "scores.csv.gz")] == [line.label for line in labelled()]


def test_bits_that_a_byte_budget_chose_stand_behind_the_label(tmp_path: Path) -> None:
    """KIVI at a quarter of the bytes has 2 bits, which nobody asked for by name; short prompts may have fewer."""
    asked = {"style": "own", "needles": 1}
    for method, memory, names in (
        ("full", None, ["Full"] * 4),
        ("pqcache", "1/4", [*["KIVI 4 bit"] * 3, "KIVI 2 bit"]),
    ):
        rows = [{"score": i / 4, "fields": {"variant": name}} for i, name in enumerate(names)]
        made_runs.write(tmp_path, method, "needle", rows, memory=memory, ratio=None, task_params=asked)
    assert {line.label for line in read(tmp_path)} == {"Full", "KIVI 4 bit or KIVI 2 bit"}


def test_every_kept_value_has_its_runs_label() -> None:
    kept = load(DOCS / "results" / "scores.csv.gz")
    found = {(line.place[0], line.place[2]): line.label for line in kept}
    assert all(found.values())
    assert found[SHOWN, "kvzip"] == "KVzip, whole prompt" and found[HIDDEN, "kvzip"] == "KVzip"
    assert found[SHOWN, "retroinfer"] == "RetroInfer (budget in the mean, 79 tokens a cluster)"
    assert (found[SHOWN, "kivi"], found[SHOWN, "keydiff"]) == ("KIVI 2 bit", "KeyDiff (simulated blocks)")


def test_a_finding_of_two_kinds_needs_both_and_the_opposite_of_the_second() -> None:
    finding = next(one for one in FINDINGS if one.is_turned)
    first_of, second_of = LOOKED
    assert (finding.contrast, finding.beside) == (first_of, second_of)
    scope, memory, method = first_of.place

    def asked(key: str, ours: float, theirs: float) -> list[Line]:
        levels = {("", FULL): 1.0, (memory, method): ours, (memory, first_of.against): theirs}
        return [
            Line(key, "m", (scope, share, name), f"{i}", float(i / 60 < level), Costs(1.0))
            for (share, name), level in levels.items()
            for i in range(60)
        ]

    first, same, other = (
        asked(one.asked, *levels)
        for one, levels in ((first_of, (0.9, 0.1)), (second_of, (0.9, 0.1)), (second_of, (0.1, 0.9)))
    )
    assert "Of names" in shown(finding, gathered([*first, *other]))
    assert not shown(finding, gathered([*first, *same])) and not shown(finding, gathered(first))
    alike = replace(finding, is_turned=False)
    assert "Of names" in shown(alike, gathered([*first, *same])) and shown(alike, gathered(first))
    assert "Of names" not in shown(alike, gathered([*first, *other]))


def test_samples_that_were_known_when_a_comparison_was_picked_do_not_test_it() -> None:
    """The known half would show a difference; the other half has none."""
    made = [
        line for line in lines({FULL: (1, 1), "pqcache": (1, 1), "snapkv": (0, 0)}, 2 * N) if line.place[1] != "0.25"
    ]
    made = [replace(line, score=1.0) if int(line.sample) >= N else line for line in made]
    picked = Contrast("docs", (HIDDEN, "0.125", "pqcache"), "snapkv", N)
    (scores,) = gathered(made)
    found = outcomes([scores], [picked])[picked]
    assert (found.paired.n, found.paired.mean, found.p) == (N, 0, 1)
    assert (everything := looked_at(picked, scores)) is not None and everything.sign == 1
    assert not outcomes([scores], [replace(picked, seen=2 * N)]), "nothing is left that could test it"


def test_the_correction_is_over_the_whole_list_whatever_was_asked_so_far() -> None:
    (scores,) = gathered(lines(n=60))
    one, other = (Contrast("docs", (HIDDEN, "0.125", "pqcache"), against, 0) for against in ("snapkv", OTHER_SCOPE))
    unasked = Contrast("sums", (SHOWN, "0.25", "pqcache"), "snapkv", 0)
    few, all_three = outcomes([scores], [one, other]), outcomes([scores], [one, other, unasked])
    assert [*all_three] == [one, other] and all_three[one].family == 3
    assert few[one].p == pytest.approx(2 * few[one].paired.p)
    assert all_three[one].p == pytest.approx(3 * few[one].paired.p)
    assert len({*CONTRASTS, *LOOKED}) == len(CONTRASTS) + len(LOOKED)


def test_the_page_lists_every_fixed_comparison_and_what_came_of_it(tmp_path: Path) -> None:
    text = written(tmp_path, lines(n=100)).split("## What was tested")[1].split("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ") and "comparison" not in line]
    assert len(rows) == len(CONTRASTS)
    (one,) = [row for row in rows if "PQCache against SnapKV, question hidden, 1/8" in row and "documents" in row]
    assert "| 41 | 59 | +" in one and one.endswith("| yes |")
    assert sum(row.endswith("| not yet |") for row in rows) == len(CONTRASTS) - 4


def test_a_budget_that_was_asked_with_the_question_shown_alone_has_its_marks_hollow_beside_one_with_both() -> None:
    made = [line for line in lines() if line.place[0] == SHOWN or line.place[1] != "0.25"]
    (scores,) = gathered(made)
    assert [main_scope(scores, memory) for memory in scores.memories] == [SHOWN, HIDDEN]
    drawn = picture(scores)
    for (ax,), memory in zip(drawn.axes, scores.memories, strict=True):
        marks = [line for line in ax.lines if line.get_marker() not in ("None", "", None)]
        hollow = [line for line in marks if line.get_markerfacecolor() == "none"]
        n = len(named(scores, memory))
        assert (len(marks), len(hollow)) == ((n, n) if memory == "0.25" else (2 * n, n))


def test_needles_of_which_only_the_first_depths_were_asked_say_nothing() -> None:
    made = [replace(line, asked="needle") for line in lines(n=60)]
    (scores,) = gathered(made)
    assert {scores.n(*column) for column in scores.columns} == {60}
    stopped = [line for line in made if line.place != (HIDDEN, "0.125", "kvzip") or int(line.sample) < 19]
    (scores,) = gathered(stopped)
    assert (HIDDEN, "0.125") not in scores.columns and (HIDDEN, "0.25") in scores.columns
