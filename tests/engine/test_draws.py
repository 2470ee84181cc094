import re

import pytest
import torch

from kvbench.engine.declared import build
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.prefill import prefill
from kvbench.engine.sampling.cues import Cue
from kvbench.engine.sampling.draws import N_SORTED, drawn
from kvbench.engine.sampling.spec import Sampling, draw_id, draw_seed
from kvbench.methods.decoding.full_stopped import stopping_length
from kvbench.methods.decoding.schedule import Schedule
from kvbench.methods.full import full_attention
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.vectors import built

CPU = torch.device("cpu")


def logits(n: int, size: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(n, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("top_p", "top_k"), [(1.0, None), (0.9, None), (0.5, None), (1.0, 5), (0.8, 10)], ids=lambda x: str(x)
)
def test_tokens_come_as_often_as_the_nucleus_says(top_p: float, top_k: int | None) -> None:
    row, sampling = logits(1, 40), Sampling(0.7, top_p, top_k)
    n = 20_000
    numbers = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    found = drawn(row.expand(n, -1), numbers, sampling).bincount(minlength=40) / n
    shares = (row[0].double() / 0.7).softmax(-1)
    best = shares.argsort(descending=True)
    kept = best[: top_k or 40]
    inside = shares[kept] / shares[kept].sum()
    if top_p < 1:
        kept = kept[: int((inside.cumsum(0) - inside < top_p).sum())]
    expected = torch.zeros(40, dtype=torch.float64).scatter(0, kept, shares[kept] / shares[kept].sum())
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("flat", [False, True])
def test_sorting_few_tokens_draws_what_sorting_all_does(flat: bool) -> None:
    size = 4 * N_SORTED
    x = logits(6, size) * (0.01 if flat else 3)
    numbers, sampling = torch.rand(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64), Sampling(1, 0.9)
    shares = x.softmax(-1)
    order = shares.sort(-1, descending=True)
    until = order.values.double().cumsum(-1)
    for i, token in enumerate(drawn(x, numbers, sampling).tolist()):
        n_in = int((until[i] - order.values[i] < 0.9).sum())
        place = int((until[i] <= numbers[i] * until[i, n_in - 1]).sum())
        assert token == order.indices[i, min(place, n_in - 1)]


def test_a_draw_depends_on_run_seed_prompt_and_number_alone() -> None:
    assert draw_seed(0, "a", 1) == draw_seed(0, "a", 1) < 2**63
    assert len({draw_seed(s, i, j) for s in (0, 1) for i in ("a", "b", "a\n1") for j in (0, 1, 11)}) == 18
    assert draw_id("a", None) == "a" and draw_id("a", 2) == "a#2"


def test_rows_draw_the_same_alone_and_beside_others() -> None:
    model, sampling = tiny(), Sampling(1.0, 0.95, n_answers=3)
    seeds = [draw_seed(0, "x", j) for j in range(3)]

    def answers(chosen: list[int]) -> list[list[int]]:
        with model.hooked():
            trace = prefill(model, prompt(40))
            variant = full_attention(model.shape, 40)
            rows = [built(variant.row(trace, 30)) for _ in chosen]
            own = [seeds[i] for i in chosen]
            done = decode(model, trace, rows, max_new_tokens=30, sampling=sampling, seeds=own)
            return [answer.ids for answer in done.answers]

    together = answers([0, 1, 2])
    assert len({tuple(ids) for ids in together}) == 3
    assert [answers([i])[0] for i in range(3)] == together
    assert answers([2, 0]) == [together[2], together[0]]


def test_an_answer_is_interrupted_unless_it_has_said_the_marker() -> None:
    model = tiny()
    with model.hooked():
        trace = prefill(model, prompt(40))
        variant = full_attention(model.shape, 40)

        def answer(cue: Cue | None) -> list[int]:
            rows = [built(variant.row(trace, 20))]
            return decode(model, trace, rows, max_new_tokens=20, cues={} if cue is None else {0: cue}).answers[0].ids

        own = answer(None)
        made = answer(Cue(6, [3, 4, 5], marker=[1, 1, 1]))
        assert made[:6] == own[:6] and made[6:9] == [3, 4, 5] and len(made) == 20 and made[9:] != own[9:]
        assert answer(Cue(6, [3, 4, 5], marker=own[2:4])) == own
        assert answer(Cue(6, [3, 4, 5], marker=own[5:7])) == made  # said half of it


def test_full_attention_stops_where_it_has_cost_as_much() -> None:
    """The page's schedule: 200 tokens, B = 512, an answer of 3,000 with 1,680,833 entries."""
    n = stopping_length(Schedule(512, 128), 200, 3000)
    entries = 200 * 201 / 2 + sum(200 + t for t in range(1, n + 1))
    assert entries <= 1_680_833 < entries + 200 + n + 1
    assert stopping_length(Schedule(4000, 128), 200, 3000) == 3000


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 is out of range"),
        (
            {"temperature": 1e-320},
            "temperature=1e-320 is out of range; it is 0 (the likeliest token) or at least 0.01",
        ),
        ({"temperature": float("nan")}, "temperature=nan is not a finite number"),
        ({"temperature": 1, "top_p": 0}, "top_p=0 is out of range; it is a probability above 0 and at most 1"),
        ({"temperature": 1, "top_p": 1.5}, "top_p=1.5 is out of range"),
        ({"temperature": 1, "top_k": 0}, "top_k=0 is out of range"),
        ({"temperature": 1, "n_answers": 0}, "n_answers=0 is out of range"),
        ({"n_answers": 4}, "n_answers=4 means nothing with temperature=0"),
        ({"top_p": 0.9}, "top_p=0.9 means nothing with temperature=0"),
        ({"top_k": 3}, "top_k=3 means nothing with temperature=0"),
    ],
)
def test_what_sampling_refuses(given: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        build(Sampling, vars(Sampling()) | given, "")
