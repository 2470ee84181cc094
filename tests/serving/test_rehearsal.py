"""Which method is served on which rung, and the sentence where it is not: found without vLLM."""

import pytest

from kvbench.engine.errors import ConfigError
from kvbench.serving.order import Order, Unserved
from kvbench.serving.rehearsal import rehearse

QUEST = (
    "method=quest method.comm_mode=native method.page_len=32 method.page_generated=true method.agg=group_mean comm=1/8"
)
SERVED = {
    "visible": ["method=oracle", "method=pqcache", QUEST, "method=clusterkv", "method=sparq comm=1/8", "method=adakv"],
    "pages": [QUEST],
    "dropping": ["method=snapkv", "method=keydiff", "method=knorm method.full_layers=0", "method=chunkkv"],
}
REFUSED = [
    ("dropping", "method=adakv", "heads of a layer keep different counts"),
    ("dropping", "method=pyramidkv", "another number of tokens in each layer"),
    ("dropping", "method=oracle", "retrieves what it needs, so that no page may go"),
    ("dropping", "method=snapkv method.reduce=query_head", "query heads keep tokens of their own"),
    ("pages", "method=oracle", "no whole pages of 32 tokens"),
    ("pages", "method=quest comm=1/16", "query heads choose pages of their own"),
    ("visible", "method=attention_matching", "keys and values of its own making"),
    ("visible", "method=kivi ratio=1", "numbers of its own"),
    ("visible", "method=pyramidinfer", "vLLM's is one for all"),
    ("visible", "method=kvzip", "once it has seen all layers"),
    ("visible", "method=snapkv allocator=global", "once it has seen all layers"),
    ("visible", "method=h2o_decode budget=200", "between steps"),
    ("visible", "method=expected_attention", "to other positions"),
    ("visible", "method=loki comm=1/8", "a calibration has found"),
    ("visible", "method=infinigen", "a layer ahead"),
    ("visible", "method=snapkv compose=kivi", "compose="),
    ("visible", "method=snapkv prefill=minference", "prefill="),
]


@pytest.mark.parametrize(("rung", "words"), [(rung, words) for rung, all in SERVED.items() for words in all])
def test_these_are_served(rung: str, words: str) -> None:
    assert rehearse(Order(tuple(words.split()), rung)).slack is None


@pytest.mark.parametrize("words", ["method=streamingllm", "method=tova"])
def test_a_method_that_holds_its_budget_is_known_to(words: str) -> None:
    """Its requests ask for no block beyond the one in which the current token lies."""
    order = rehearse(Order((words,), "dropping"))
    assert order.slack == 1
    assert order.most_slots(1000, 1000) == order.variant(1000).budget.tokens
    assert order.most_slots(1000, 5000) == order.variant(1000).budget.tokens + 1


def test_pages_are_blocks_of_whatever_size_vllm_has() -> None:
    """A GPU's have 16 tokens unless it is told otherwise."""
    words = tuple(QUEST.replace("32", "16").replace("1/8", "1/4").split())
    assert rehearse(Order(words, "pages"), 16).slack is None
    with pytest.raises(Unserved, match="no whole pages of 32 tokens"):
        rehearse(Order(words, "pages"))


@pytest.mark.parametrize(("rung", "words", "why"), REFUSED)
def test_others_are_refused_in_a_sentence(rung: str, words: str, why: str) -> None:
    with pytest.raises(Unserved, match=why) as refused:
        rehearse(Order(tuple(words.split()), rung))
    assert "\n" not in str(refused.value)


def test_wrong_words_are_refused_as_run_py_refuses_them() -> None:
    with pytest.raises(ConfigError, match="rung=upper is unknown; use visible, pages or dropping"):
        rehearse(Order(("method=snapkv",), "upper"))
    with pytest.raises(ConfigError, match="snapkw"):
        rehearse(Order(("method=snapkw",), "visible"))


def test_an_order_reaches_other_processes_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_SERVING", raising=False)
    assert Order.given() is None
    order = Order(("method=snapkv", "ratio=0.2"), "dropping", 1, 1)
    order.give()
    assert Order.given() == order
    Order.take_back()
    assert Order.given() is None
