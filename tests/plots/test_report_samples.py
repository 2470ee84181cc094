"""What the report holds of samples, and where it says that runs come from."""

import random
from pathlib import Path
from typing import Any

import pytest
from hydra import compose

from kvbench.evals.composing import composing
from kvbench.evals.overrides import CONF, check_overrides
from kvbench.evals.settings import settings
from kvbench.plots.read import Run, load
from kvbench.plots.site.origin import provenance, words
from kvbench.plots.site.samples import DETAILS, Packed, iter_pieces, pack, pack_samples, prompt_end, strip, unpacked
from kvbench.tests.plots.report_runs import write_run
from kvbench.tests.results.made_rows import ok_row

END = {"context": "… the end of the context", "question": "What is it?", "cue": "Answer:"}


def runs_of(tmp_path: Path, **more: Any) -> list[Run]:
    write_run(tmp_path, "full", [1.0, 0.5, 0.0], **more)
    write_run(tmp_path, "quest", [1.0, 0.0, 0.0], **more)
    return load(tmp_path)


def answers(found: Packed, i: int) -> dict[str, Any]:
    """The columns of a run."""
    start = max(start for start in found.starts if start <= i)
    return unpacked(found.pieces[found.starts.index(start)])[i - start]


def test_each_prompt_stands_once_with_the_end_of_what_was_asked(tmp_path: Path) -> None:
    found = pack_samples(runs_of(tmp_path, fields={"prompt_end": END, "attended_bins": [1.0, 0.0, 0.003]}))
    prompts = unpacked(found.asked)
    assert [(prompt["id"], prompt["end"]) for prompt in prompts] == [(f"sample-{i}", END) for i in range(3)]
    quest = answers(found, 1)
    assert quest["at"] == [0, 1, 2] and quest["score"] == [100.0, 0.0, 0.0]
    assert quest["strip"] == ["o01"] * 3  # all, nothing, and hardly anything, which is not nothing
    assert quest["report"][2] == {"pages": [1, 2, 2]}
    assert quest["fields"][0] == {"length": 500, "depth": 0.0}, "what has a place of its own stands once"
    assert found.cut == ""


def test_the_needle_is_shown_however_little_of_a_text_is() -> None:
    needle = "The number of the office in Rome is 4123082."
    line = f"… {'a' * 150} {needle} {'b' * 150} …"
    row = ok_row(fields={"prompt_end": END | {"evidence": f"{line}\n{line}"}})
    for detail in DETAILS:
        shown = prompt_end(row, detail.characters)["evidence"]
        assert needle in shown and len(shown) <= 2 * len(line) + 1


def test_a_run_of_earlier_code_has_neither_and_is_shown(tmp_path: Path) -> None:
    found = pack_samples(runs_of(tmp_path))
    assert all("end" not in prompt for prompt in unpacked(found.asked))
    assert "strip" not in answers(found, 0)


@pytest.mark.parametrize("bins", [None, [], "1.0", [2.0], [0.1, "x"], {"a": 1}, [0.5] * 2000, [None]])
def test_shares_that_are_none_are_no_picture(bins: Any) -> None:
    assert strip(bins, 100) is None


def test_a_picture_of_fewer_parts_has_their_means() -> None:
    assert strip([1.0, 0.0, 1.0, 1.0, 0.5], 3) == strip([0.5, 1.0, 0.5], 100)


def test_texts_are_cut_to_what_fits_and_the_page_says_so(tmp_path: Path) -> None:
    draw = random.Random(0)
    long = ["".join(draw.choices("abcdefghij klmnop", k=5000)) for _ in range(3)]
    runs = runs_of(tmp_path, predictions=long)
    sizes = [pack(runs, detail).size for detail in DETAILS]
    assert sizes == sorted(sizes, reverse=True)
    largest = sizes[2]
    found = pack_samples(runs, largest)
    assert found.size <= largest and found.cut.startswith("So many runs would make a page of more than 20 MB")
    assert f"after {DETAILS[2].characters} characters" in found.cut
    text = answers(found, 0)["prediction"][0]
    assert text == f"{long[0][: DETAILS[2].characters]} … ({5000 - DETAILS[2].characters} more characters)"
    assert pack_samples(runs, 10).cut.endswith("The runs' folders hold all."), "something is shown whatever the size"


def test_many_runs_are_packed_in_pieces_that_hold_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(9):
        write_run(tmp_path, "quest", [i / 10], ratio=f"1/{i + 2}")
    runs = load(tmp_path)
    found = pack_samples(runs, piece=1000)
    assert len(found.pieces) > 2 and found.starts[0] == 0
    assert [answers(found, i)["score"][0] for i in range(9)] == pytest.approx(
        [100 * (run.rows[0].score or 0) for run in runs]
    )
    assert [name for name, _ in iter_pieces(found)][1:] == [f"data-samples-{start}" for start in found.starts]


# --- commands ---


def resolved(given: list[str]) -> dict[str, Any]:
    """What identifies a run, by its command line."""
    checked = check_overrides(given)
    with composing(CONF):
        cfg = compose("config", checked, return_hydra_config=True)
    return settings(cfg, cfg.hydra.runtime.choices).resolved()


COMMANDS = [
    ["method=h2o_pqcache", "task=pg19"],
    ["method=snapkv_paper", "method.window=16", "task=longbench", "task.datasets=[qasper,hotpotqa]", "limit=5"],
    ["method=pqcache", "method.m=4", "budget=256", "comm=1/128", "task=gsm8k", "seed=3", "cache.tokens=4096"],
    ["method=full", "task=fidelity", "task.skip_layers=[0,1]", "prefill=minference", "compensate=false"],
    ["method=oracle", "task=needle", "model=llama-3.1-8b-instruct", "model.system_prompt='Be brief, it is (late)'"],
    ["method=oracle", "task=ruler", "model=org/some-name", "compression_scope=context_only"],
    ["method=quest", "task=latency", "weights=random", "data_dir='a folder/with blanks'", "ratio=1/3"],
    ["method=quest", "task=needle", "memory=1/8", "offset=4"],
    ["method=quest", "task=needle", "memory=1/8", "ratio=1/4", "comm=1/64", "n_answers=2", "temperature=0.5"],
    ["method=snapkv", "task=needle", "compose=kivi", "memory=1/8", "positions=contiguous", "allocator=pyramid"],
    ["method=sparq", "task=needle", "ratio=0.2", "comm=null"],
]


@pytest.mark.parametrize("given", COMMANDS, ids=" ".join)
def test_the_command_of_a_run_makes_the_same_run(given: list[str]) -> None:
    config = resolved([*given, "dtype=float32", "device=cpu"])
    assert resolved([*words(config)]) == config
    assert len([*words(config)]) <= len(given) + 7, "defaults are left out"


def test_a_method_from_a_file_is_named_as_one(tmp_path: Path) -> None:
    config = {"method": {"name": "mine", "params": {"k": 3}, "digest": "0" * 64}, "task": {"name": "needle"}}
    assert [*words(config)][:2] == ["method=mine.py", "method.k=3"]


def test_provenance_names_the_runs_that_are_the_same(tmp_path: Path) -> None:
    run = runs_of(tmp_path)[0]
    found = provenance(run, [tmp_path / "another"])
    assert found["same_as"] == ["another"] and found["files"].keys() == {
        "config.yaml", "samples.jsonl", "ledger.parquet", "result.json",
    }  # fmt: skip
    assert found["command"].startswith("python run.py method=full ")
