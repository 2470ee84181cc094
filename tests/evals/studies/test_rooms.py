"""How many variants fit on a GPU that is not here: of every method, from what a run would ask it."""

from fractions import Fraction

import pytest
import yaml

from kvbench.engine.books.width import variant_bytes
from kvbench.engine.budget import token_bytes
from kvbench.engine.checkpoints.load import read_config, shape_of
from kvbench.engine.shapes import ModelShape
from kvbench.evals.overrides import CONF
from kvbench.evals.studies import rooms
from kvbench.results.names import own_methods


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    given = yaml.safe_load((CONF / "architecture" / "llama-3.1-8b.yaml").read_text())
    return shape_of(read_config("llama-3.1-8b", given), "llama-3.1-8b")


@pytest.mark.parametrize("name", own_methods())
def test_a_method_says_what_a_variant_takes(shape: ModelShape, name: str) -> None:
    """No less for a longer prompt, and no more than the whole prompt as float32 beside itself."""
    short, long = (
        variant_bytes(rooms.variant_of(name, shape, s, Fraction(1, 5)), shape, 128, rooms.ELEMENT_BYTES)
        for s in (8192, 32768)
    )
    assert 0 < short <= long < 3 * token_bytes(shape) * len(shape.attention_layers) * 32768, (short, long)


def test_the_table_says_how_many_fit_and_who_waits(capsys: pytest.CaptureFixture[str]) -> None:
    assert rooms.main(["--lengths", "8192", "131072", "--chunk", "8192"]) == 0
    shown = capsys.readouterr().out
    assert f"of {len(rooms.METHODS)}" in shown and all(name in shown for name in rooms.METHODS)
    assert rooms.main(["--model", "nothing"]) == 2
