"""The command that puts a method through the suite: what it says of a right one, and of each kind of wrong one."""

from pathlib import Path

import pytest

from kvbench.tests.cheats import CHEATS
from kvbench.tests.conformance import AT_EACH_RATIO, ONCE, main
from kvbench.tests.tiny_run import example_files

HEAD = (
    "import torch\nfrom kvbench.engine.errors import ConfigError\n"
    "from kvbench.engine.placement import Kept, Offloaded\n"
    "from kvbench.methods.base import SelectiveAttention\n"
)
TWICE = """
class Mine(SelectiveAttention):
    title, drops = "Mine", False
    def arrange(self, layer):
        return Offloaded(0, 4)
    def select(self, layer, q):
        idx = torch.arange(self.budget.tokens - 4)
        idx[3] = 2
        return idx.expand(1, self.trace.shape.h_kv, -1)
"""
KEEPS_TWICE = """
class Mine(SelectiveAttention):
    title, drops = "Mine", True
    def arrange(self, layer):
        first = torch.zeros(1, self.trace.shape.h_kv, self.budget.tokens, dtype=torch.int64)
        return Kept(first)
"""
RESIDENT = TWICE.replace("Offloaded(0, 4)", "Offloaded(3, 1)").replace("idx[3] = 2", "pass")
BEYOND = TWICE.replace("idx[3] = 2", "idx[3] = 1000")
OVER = """
class Mine(SelectiveAttention):
    title, drops = "Mine", True
    def arrange(self, layer):
        return Kept(2, n_window=self.budget.tokens)
"""
BESIDE_THE_BOOKS = """
from kvbench.engine.attend import Part
class Mine(SelectiveAttention):
    title, drops = "Mine", True
    def arrange(self, layer):
        return Kept(self.budget.tokens)
    def resident(self, layer, q):
        return [Part(self.trace.keys(layer), self.trace.values(layer)), *super().resident(layer, q)]
"""
IN_THE_CLASS = """
class Mine(SelectiveAttention):
    title, drops = "Mine", False
    chosen = {}
    def arrange(self, layer):
        norms = self.trace.keys(layer)[:, :, :-4].norm(dim=-1)
        self.chosen[layer] = norms.topk(self.budget.tokens - 4).indices
        return Offloaded(0, 4)
    def select(self, layer, q):
        return self.chosen[layer]
"""
FIRST_COMES = """
class Mine(SelectiveAttention):
    title, drops = "Mine", True
    def arrange(self, layer):
        norms = self.trace.keys(layer)[:, :, :-4].norm(dim=-1)
        best = SHARED(layer, lambda: norms.topk(self.budget.tokens - 4).indices)
        return Kept(best, n_window=4)
"""
IN_THE_MODULE = FIRST_COMES.replace("SHARED(layer, ", "found.setdefault(layer, ").replace(", lambda: ", ", ")
IN_THE_TRACE = FIRST_COMES.replace("SHARED(layer, ", 'self.trace.once(("mine", layer), ')
ALTERS = """
class Mine(SelectiveAttention):
    title, drops = "Mine", True
    def arrange(self, layer):
        self.trace.keys(layer).mul_(2)
        return Kept(self.budget.tokens)
"""
AT_RANDOM = """
class Mine(SelectiveAttention):
    title, drops = "Mine", True
    def arrange(self, layer):
        worth = torch.rand(1, self.trace.shape.h_kv, self.trace.s_prompt)
        return Kept(worth.topk(self.budget.tokens).indices)
"""
FORGETS = """
class Mine(SelectiveAttention):
    title, drops = "Mine", True
    def arrange(self, layer):
        return Kept(self.budget.tokens)
    def protected(self, layer):
        return [0, self.trace.s_prompt - 1]
"""
NOT_FULL = """
class Mine(SelectiveAttention):
    title, drops = "Mine", True
    def build(self, layer):
        self.store.place(layer, Kept(self.budget.tokens // 2))
    def arrange(self, layer):
        pass
"""
LEAVES = """
class Mine(SelectiveAttention):
    title, drops = "Mine", True
    def arrange(self, layer):
        raise SystemExit(0)
"""
RAISES = """
class Mine(SelectiveAttention):
    title, drops = "Mine", True
    def arrange(self, layer):
        best = self.trace.keys(layer).norm(dim=-1).topk(self.budget.tokens - 32).indices
        return Kept(best)
"""


def verdicts(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, str]]:
    """The exit code, and of each property what is said of it."""
    code = main([str(path), *words])
    lines = capsys.readouterr().out.splitlines()[1:-1]
    return code, {name: line for line in lines for name in (*ONCE, *AT_EACH_RATIO) if line[8:].startswith(name)}


@pytest.mark.parametrize(
    ("nth", "words"),
    [(0, ["method.n_recent=16", "--ratio", "0.02", "0.1", "0.9"]), (1, []), (1, ["method.page_len=33"])],
    ids=["drops", "fetches", "fetches longer pages"],
)
def test_the_files_of_the_docs_hold_every_property(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nth: int, words: list[str]
) -> None:
    code, said = verdicts(example_files(tmp_path, "smallest_keys", "mean_pages")[nth], capsys, *words)
    assert code == 0
    assert [*said] == [*ONCE, *AT_EACH_RATIO]
    assert all(line.startswith("held") for line in said.values()), said


@pytest.mark.parametrize(
    ("body", "name", "says"),
    [
        (TWICE, "chosen once", "ratio 0.1, step 1, layer 0: query head 0 selects position 2 twice"),
        (KEEPS_TWICE, "chosen once", "ratio 0.1, step 1, layer 0: KV head 0 keeps position 0 twice"),
        (RESIDENT, "chosen once", "query head 0 fetches positions 0, 1, 2 beside what is resident"),
        (BEYOND, "chosen once", "layer 0: fetch got position 1000, and positions are 0 to 240"),
        (BESIDE_THE_BOOKS, "chosen once", "step 1, layer 0: attention reads 1632 tokens, and the store knows of 192"),
        (OVER, "exceeds the budget", "a query head attends to 34.0 tokens, mean over layers, and the budget allows 32"),
        (IN_THE_CLASS, "alone and beside", "so it reads what another variant or sample left; keep what belongs"),
        ("found = {}\n" + IN_THE_MODULE, "alone and beside", "so it reads what another variant or sample left"),
        (IN_THE_TRACE, "alone and beside", "give trace.once a key that holds all that the result depends on"),
        (ALTERS, "trace stays", "at ratio 0.2, the keys of layer 0 of the trace are altered"),
        (AT_RANDOM, "the next time", "draw random numbers from a torch.Generator with a seed"),
        (FORGETS, "protected", "position 239 is protected, and query head 0 does not attend to it"),
        (NOT_FULL, "full attention", "at the whole budget the answer is ["),
        (LEAVES, "exceeds the budget", "SystemExit at line 9 of mine.py: 0"),
        (RAISES, "exceeds the budget", "RuntimeError at line 9 of mine.py: selected index k out of range"),
    ],
)
def test_what_a_method_breaks_is_said_in_words(
    body: str, name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + body)
    code, said = verdicts(path, capsys, "--ratio", "0.1")
    assert code == 1
    (line,) = [line for what, line in said.items() if name in what]
    assert line.startswith("BROKEN")
    assert says in (line if not line.endswith("as above") else "".join(said.values())), line


READS, HOLDS = "a step depends on nothing that", "what it holds beside"


@pytest.mark.parametrize(
    ("cheat", "name", "says"),
    [
        ("PSEUDO_TOKENS", "chosen once", "attention reads 1182 pseudo-tokens, and the books count 0"),
        ("COUNTED_PSEUDO_TOKENS", "chosen once", "K and V of 1224 pseudo-tokens are 13056 bytes, and moved_meta_bytes"),
        ("TOKENS_BESIDE", "chosen once", "attention reads 1446 tokens, and the store knows of 264"),
        ("ATTENDS_LATER", READS, "the output changes with values of tokens that the step does not attend to"),
        ("ATTENDS_LATER_TO_COPIES", HOLDS, "hold 46176 bytes, far more than it counts"),
        ("SEARCHES_ALL_KEYS", READS, "bytes of keys of tokens that it does not attend to, and counts 0 as read"),
        ("SEARCHES_A_COPY", HOLDS, "hold 46080 bytes, far more than it counts"),
        ("COUNTS_A_BYTE", READS, "bytes of keys of tokens that it does not attend to, and counts 1 as read"),
        ("SKIPS_EVERYTHING", "some layer", "whole_layers() of Mine names all 3 layers"),
        ("SKIPS_AFTERWARDS", "exceeds the budget", "the other layers, or all where there is none, exceed the budget"),
    ],
)
def test_a_method_that_hides_what_it_does_is_caught(
    cheat: str, name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(CHEATS[cheat])
    code, said = verdicts(path, capsys, "--ratio", "0.15")
    assert code == 1
    (line,) = [line for what, line in said.items() if name in what]
    assert line.startswith("BROKEN") and says in line, line


def test_every_cheat_is_put_through_the_suite() -> None:
    (marks,) = test_a_method_that_hides_what_it_does_is_caught.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks.args[1]} == set(CHEATS)


def test_a_search_that_counts_what_it_reads_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    idx = "scores.topk(self.budget.tokens - 4).indices.unsqueeze(0)"
    counted = f"Selection({idx}, Cost(searched_bytes=2 * keys.numel()))"
    path = tmp_path / "mine.py"
    path.write_text(CHEATS["SEARCHES_ALL_KEYS"].replace(idx, counted))
    code, said = verdicts(path, capsys, "--ratio", "0.15")
    assert code == 0, said


def test_a_budget_that_is_refused_breaks_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    refuses = """    @classmethod
    def plan_for(cls, params, budget, shape):
        if budget.tokens < 40:
            raise ConfigError(f"a budget of {budget.tokens} is too small")
"""
    path.write_text(HEAD + OVER.replace("2, n_window=", "") + refuses)
    code, said = verdicts(path, capsys, "--ratio", "0.1", "0.3")
    assert code == 0
    assert all(line.startswith("held") for line in said.values())
    assert "refuses ratio 0.1: a budget of 31 is too small" in said["each token is chosen once and counted once"]
    assert verdicts(path, capsys, "--ratio", "0.1")[1]["no step exceeds the budget"].startswith("refused")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing.py"], "cannot be read"),
        (["snapkw"], "did you mean 'snapkv'"),
        (["snapkv", "method.windw=3"], "did you mean 'window'?"),
        (["snapkv", "--ratio", "2"], "ratio=2 is out of range"),
        (["snapkv", "--ratio", "x"], "--ratio=x is not a number"),
    ],
)
def test_wrong_input_is_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err
