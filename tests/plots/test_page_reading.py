"""Answers of runs as pages keep them: of which set, under which names, and what later runs replace."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvbench.plots.pages.asked import FULL, HIDDEN, SHOWN, At, page
from kvbench.plots.pages.columns import scored
from kvbench.plots.pages.queries import Cost, costs
from kvbench.plots.pages.read import COLUMNS, keep, load, of_runs, renewed, rows_of, typed, whole
from kvbench.results import SampleRow, frame, read_config
from kvbench.results.frame import frame as frame_of_runs
from kvbench.tests.plots import made_runs
from kvbench.tests.plots.made_pages import LEVELS, answers, at, changed, tasks_of

PLACE = {"protocol": HIDDEN, "asked": "memory 1/8", "method": "snapkv"}


def write_run(root: Path, method: str, memory: str | None, rows: list[dict[str, Any]]) -> Path:
    """A run that docs/results.md asks for."""
    asked = page("results").sets["budgets"]
    rows = [row | {"fields": {"dataset": asked.dataset} | row.get("fields", {})} for row in rows]
    folder, _ = made_runs.write(
        root, method, asked.task, rows, memory=memory, ratio=None, comm="0", model=asked.model,
    )  # fmt: skip
    return folder


def same(one: Any, other: Any) -> bool:
    """Whether two frames have the same rows, in whatever order."""
    sides = (whole(side).apply(tuple, axis=1) for side in (one, other))
    a, b = (sorted(side) for side in sides)
    return a == b


# --- from runs -----------------------------------------------------------------------------------


def test_answers_are_kept_by_sample_whether_a_run_ended_or_not(tmp_path: Path) -> None:
    for method, memory, label in (("full", None, ""), ("snapkv", "1/4", "SnapKV (C)")):
        more = {"fields": {"variant": label}} if label else {}
        rows = [{"score": i / 4, "ledger": {"bytes_resident_device": 50.0}} | more for i in range(4)]
        folder = write_run(tmp_path / "runs", method, memory, rows)
    (folder / "result.json").unlink()
    found = of_runs(tmp_path / "runs", "results")
    places = {*zip(found["protocol"], found["asked"], found["method"], strict=True)}
    assert places == {(SHOWN, "", "full"), (SHOWN, "memory 0.25", "snapkv")}
    assert {*found["method_label"]} == {"Full", "SnapKV (C)"}, "as samples say it, or else result.json"
    assert [*found["score"][:4]] == ["0", "0.25", "0.5", "0.75"] and {*found["set"]} == {"budgets"}
    assert not [*rows_of(page("results").sets["budgets"], read_config(folder), [], "")]
    keep(tmp_path / "kept.csv.gz", found)
    assert same(load(tmp_path / "kept.csv.gz"), found)
    before = (tmp_path / "kept.csv.gz").read_bytes()
    keep(tmp_path / "kept.csv.gz", found)
    assert (tmp_path / "kept.csv.gz").read_bytes() == before


def test_columns_are_those_of_a_frame_of_runs(tmp_path: Path) -> None:
    """Of a finished run the two agree, name by name and value by value."""
    for method, memory in (("full", None), ("snapkv", "1/8")):
        rows = [{"score": i / 4, "generated_tokens": 5 + i, "fields": {"variant": method}} for i in range(4)]
        write_run(tmp_path, method, memory, rows)
    ours, theirs = typed(of_runs(tmp_path, "results")), frame_of_runs(tmp_path)
    fixed = {name for name in COLUMNS if not name.startswith("timing.")} - {
        "set",
        "damage",
    }  # a word for the measures of a call
    assert fixed <= {*frame.declared()}
    theirs = theirs.sort_values(["method", "id"], ignore_index=True)
    ours = ours.sort_values(["method", "id"], ignore_index=True)
    for name in ("model", "protocol", "method", "id", "sample", "comm_exact"):
        assert [*ours[name]] == [*theirs[name].astype(str)], name
    for name in ("score", "prompt_tokens", "generated_tokens", "bytes_resident_device"):
        assert [*ours[name]] == [*theirs[name].astype(float)], name
    is_full = theirs["method"] == FULL
    assert [*ours["asked"][~is_full]] == [*theirs["asked"][~is_full]] and {*ours["asked"][is_full]} == {""}


def test_draws_count_with_their_mean(tmp_path: Path) -> None:
    asked = page("register").sets["generating"]
    config = {
        "model": {"name": "m"}, "method": {"name": "rkv"}, "task": {"name": asked.task, "params": {}}, "budget": 96
    }  # fmt: skip
    rows = [
        made_runs.sample(2 * i + draw, score=float(i < 5 or draw), fields={"sample": f"q{i}", "draw": draw})
        for i in range(40) for draw in (0, 1)
    ]  # fmt: skip
    found = typed(pd.DataFrame([*rows_of(asked, config, rows, "R-KV")]))
    assert scored(found).n == 40 and scored(found).mean == pytest.approx((5 + 0.5 * 35) / 40)
    assert {*found["asked"]} == {"96 tokens"}


def test_times_are_kept_of_what_was_timed_alone(tmp_path: Path) -> None:
    asked = page("results").sets["costs"]
    rows = [{"score": 0.7, "fields": {"timing": {"ttft_ratio": 1.1, "tt2t_ratio": 1.2, "tpot_s": 0.1}}}]
    made_runs.write(
        tmp_path, "snapkv", asked.task, rows, memory="1/4", ratio=None, comm="0", model=asked.model, label="SnapKV",
    )  # fmt: skip
    (found,) = costs(page("results"), typed(of_runs(tmp_path, "results"))).items()
    assert found == ("snapkv", Cost(1.1, 1.2, 0.7))


def test_bits_that_a_byte_budget_chose_stand_behind_the_label(tmp_path: Path) -> None:
    """KIVI at a quarter of the bytes has 2 bits, which nobody asked for by name; short prompts may have fewer."""
    names = [*["KIVI 4 bit"] * 3, "KIVI 2 bit"]
    write_run(tmp_path, "pqcache", "1/4", [{"fields": {"variant": name}} for name in names])
    assert {*of_runs(tmp_path, "results")["method_label"]} == {"KIVI 4 bit or KIVI 2 bit"}


@pytest.mark.parametrize("other", [{"comm": "1/64"}, {"model": "tiny"}, {"memory": "4GB"}])
def test_runs_under_another_rule_or_of_another_model_are_no_evidence(other: dict[str, str], tmp_path: Path) -> None:
    asked = page("results").sets["budgets"]
    mine: dict[str, Any] = {"memory": "1/4", "comm": "0", "model": asked.model} | other
    made_runs.write(tmp_path, "quest", asked.task, [{"fields": {"dataset": asked.dataset}}], ratio=None, **mine)
    assert of_runs(tmp_path, "results").empty


def test_a_question_is_of_its_context() -> None:
    def rows(*fields: dict[str, Any]) -> list[SampleRow]:
        return [made_runs.sample(i, score=i / 4, fields=each) for i, each in enumerate(fields)]

    config = {"model": {"name": "m"}, "method": {"name": "full"}}
    asked = page("register").sets["shared"]
    questions = rows(*({"dataset": "docs_qa", "sample": f"docs_qa-3{i // 2}/{i % 2}", "turn": 1} for i in range(4)))
    found = [*rows_of(asked, config | {"task": {"name": asked.task, "params": {}}}, questions, "Full")]
    assert [(row["id"], row["sample"]) for row in found] == [
        (f"sample-{i}", f"docs_qa-3{i // 2}") for i in range(4)
    ] and {row["protocol"] for row in found} == {HIDDEN}  # fmt: skip


def test_answers_without_a_sample_are_refused() -> None:
    frame = answers()
    for without in (frame.drop(columns="sample"), frame.assign(sample="")):
        with pytest.raises(ValueError, match="without a sample"):
            typed(without)


def test_an_empty_name_is_no_missing_value_and_a_missing_number_is_one(tmp_path: Path) -> None:
    row = {"set": "docs", "model": "m", "protocol": SHOWN, "asked": "", "method": FULL, "method_label": "NA"}
    more = {"id": "a-1", "sample": "a", "score": "0.5", "index_share": "", "bytes_resident_device": "1e6"}
    keep(tmp_path / "x.csv.gz", pd.DataFrame([row | more]))
    (found,) = typed(load(tmp_path / "x.csv.gz")).to_dict("records")
    assert (found["asked"], found["method_label"], found["score"]) == ("", "NA", 0.5)
    assert found["bytes_resident_device"] == 1e6 and found["index_share"] != found["index_share"]


# --- later runs ----------------------------------------------------------------------------------


def test_runs_of_one_method_at_one_budget_replace_nothing_else() -> None:
    """Of other methods, scopes, budgets, tasks and models everything stays."""
    every = answers()
    others = pd.concat([answers(key="costs"), every.assign(model="other"), every[~at(every, **PLACE)]])
    mine = every[at(every, **PLACE)]
    again = mine.assign(score="0.5")
    found = renewed(pd.concat([others, mine]), again, "results")
    assert same(found, pd.concat([others, again]))


def test_a_place_of_which_one_sample_is_asked_again_is_of_the_later_runs_alone() -> None:
    every = answers()
    again = every[at(every, **PLACE) & (every["id"].astype(int) >= 20)].assign(score="0.5")
    found = renewed(every, again, "results")
    assert same(found[at(found, **PLACE)], again)
    (task,) = tasks_of(found)
    assert "snapkv" not in task.at(At(HIDDEN, "memory 1/8")).of, "it has too few answers by then"  # type: ignore


def test_samples_that_are_not_kept_are_added_behind_those_that_are() -> None:
    """A run that went on elsewhere: what was known first stays first, whichever half that is."""
    every = answers()
    is_first = every["id"].astype(int) < 10
    for kept, later in ((every[is_first], every[~is_first]), (every[~is_first], every[is_first])):
        found = renewed(kept, later, "results")
        assert same(found, every)
        known = [*kept["id"][at(kept, method=FULL, protocol=SHOWN)]]
        column = tasks_of(found)[0].columns[0]
        assert [one.sample for one in column.full.answers][: len(known)] == known


def test_what_is_kept_does_not_depend_on_how_many_runs_came_at_once() -> None:
    every, by_method = answers(), answers()[:0]
    for method in reversed(LEVELS):
        by_method = renewed(by_method, every[every["method"] == method], "results")
    assert by_method.equals(renewed(every[:0], every, "results")) and by_method.equals(renewed(every, every, "results"))


def test_a_later_answer_takes_the_place_of_the_same_one() -> None:
    every = answers()
    again = changed(every, at(every, **PLACE), score="0.25")
    found = renewed(every, pd.concat([every, again]), "results")
    assert {*found["score"][at(found, **PLACE)]} == {"0.25"} and len(found) == len(every)
