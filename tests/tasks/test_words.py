"""Words that generated samples are drawn from: whoever changes one makes other prompts, and other scores."""

import importlib
import pkgutil
from typing import Any
from zlib import crc32

import kvbench.tasks

LEAST = 20  # words of a list; shorter ones are choices of settings
WORDS = {
    "babilong.task.DATASETS": 0xE3DA4BE3,
    "helmet.task.COMMON": 0xFCA34D7D,
    "longbench.datasets.NAMES": 0x8E28347C,
    "longbench.facts.FIRST_NAMES": 0x6B3FFCCA,
    "longbench.facts.LAST_NAMES": 0xA93F8EC6,
    "longbench.task.NAMES": 0x8E28347C,
    "longmemeval.made.FIRST_NAMES": 0x6B3FFCCA,
    "longmemeval.made.LAST_NAMES": 0xA93F8EC6,
    "needle.task.CITIES": 0x76CAF687,
    "needle.task.FIRST_NAMES": 0x023F02F8,
    "needle.task.LAST_NAMES": 0x68CB67E1,
    "reasoning.rkv_extract.UNITS": 0x3DEA9D45,
    "ruler.synthetic.ADJECTIVES": 0x4A46AA8E,
    "ruler.synthetic.CITIES": 0x76CAF687,
    "ruler.synthetic.FIRST_NAMES": 0x023F02F8,
    "ruler.synthetic.LAST_NAMES": 0x68CB67E1,
    "ruler.synthetic.NOUNS": 0xD3697DF0,
    "ruler.synthetic.SINGLE": 0x44B4D54E,
    "tool_calls.task.FIRST_NAMES": 0x6B3FFCCA,
    "tool_calls.task.LAST_NAMES": 0xA93F8EC6,
}


def lists_of(module: Any) -> dict[str, int]:
    """Checksums of a module's own lists of words."""
    found = {}
    for name, value in vars(module).items():
        words = value if isinstance(value, tuple | list) and name.isupper() else ()
        if len(words) >= LEAST and all(isinstance(word, str) for word in words):
            found[name] = crc32("\n".join(words).encode())
    return found


def test_words_of_generated_samples_stay() -> None:
    found = {}
    for info in pkgutil.walk_packages(kvbench.tasks.__path__, "kvbench.tasks."):
        if not info.ispkg:
            module = importlib.import_module(info.name)
            found |= {f"{info.name.removeprefix('kvbench.tasks.')}.{k}": v for k, v in lists_of(module).items()}
    assert found == WORDS
