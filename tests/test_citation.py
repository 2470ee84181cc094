"""What others cite: CITATION.cff as GitHub reads it, and the README's BibTeX."""

import re
from datetime import date
from pathlib import Path

import yaml

import kvbench

ROOT = Path(__file__).resolve().parents[1]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_citation_has_what_its_format_requires() -> None:
    """Of the schema of version 1.2.0; the licence by its SPDX name."""
    assert CITATION["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= CITATION.keys()
    assert CITATION["type"] == "software"
    assert CITATION["authors"] and all("name" in one or "family-names" in one for one in CITATION["authors"])
    assert isinstance(CITATION["date-released"], date)
    assert CITATION["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


def test_the_citation_is_of_this_version() -> None:
    assert str(CITATION["version"]) == kvbench.__version__


def test_the_bibtex_of_the_readme_says_the_same() -> None:
    (entry,) = re.findall(r"@software\{.*?\}\}\}", (ROOT / "README.md").read_text(), re.DOTALL)
    fields = dict(re.findall(r"(\w+) = \{+([^{}]*)\}+", entry))
    assert fields["author"] == CITATION["authors"][0]["name"]
    assert fields["title"] == CITATION["title"]
    assert fields["version"] == str(CITATION["version"])
    assert fields["year"] == str(CITATION["date-released"].year)
