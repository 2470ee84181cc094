"""The papers that cards name, as BibTeX."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.methods.cite import CONF, card, file_of, main, paper_of

NAMES = sorted(file.stem for file in CONF.glob("*.yaml"))


def test_every_card_names_its_paper_or_says_that_there_is_none() -> None:
    for name in NAMES:
        paper = paper_of(name)
        if paper is None:
            assert card(file_of(name)).startswith("none: "), name
        else:
            assert re.fullmatch(r"[^,]+, [^,;]+", paper.author) and 2020 < int(paper.year) < 2030, name
            assert int(paper.arxiv[:2]) == int(paper.year) - 2000, f"{name}: arXiv counts by year"


def test_entries_stand_once_for_methods_of_one_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapkv_paper,snapkv,adakv", "ada_pyramid", "full"]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"@misc{(\w+),", said) == ["snapkv", "adakv"]
    assert "eprint = {2404.14469}" in said and "url = {https://arxiv.org/abs/2407.11550}" in said
    assert "% full: none: full attention" in said
    assert said.count("{") == said.count("}")


def test_a_file_of_ones_own_is_cited_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    paper = "Paper     arXiv:2601.00001, 2026; Doe, Jo; A Title\n          of Two Lines"
    file.write_text(f'"""Mine.\n\n{paper}\nFails     never.\n"""\n')
    assert main([str(file)]) == 0
    assert "title = {{A Title of Two Lines}}" in capsys.readouterr().out


def test_a_wrong_name_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["snapvk"]) == 2 and main([str(tmp_path / "none.py")]) == 2
    said = capsys.readouterr()
    assert "did you mean 'snapkv'?" in said.err and said.err.count("\n") == 2 and not said.out


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from kvbench.methods import cite; assert cite.main(['quest']) == 0 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_reader_who_leaves_ends_it_without_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as closed:
        done = subprocess.run(
            [sys.executable, "-m", "kvbench.methods.cite"], stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
