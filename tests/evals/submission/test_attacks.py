"""Every value that a submission has, changed and sealed again: it is found, or it is one that nobody can give again."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.evals.submission.check import Check, Checked
from kvbench.results import config_hash
from kvbench.results.files import unsealed
from kvbench.tests.evals.submission.forge import Forge

RUN = "snapkv"
# What only answering again shows, and what a run's machine alone knows; the site says so.
BELIEVED_OF_LINES = {
    *("prefill_s", "decode_s", "tpot_s", "batch_rows", "ledger", "variant", "attended_bins", "method_report", "error"),
    *("prediction", "generated_tokens", "cut_off", "original_prompt_tokens"),
}
BELIEVED_OF_RESULTS = {
    *("notes", "versions", "git_sha", "peak_rss_bytes", "samples_crc32", "ledger_crc32"),  # older ones have no CRC
    "footprint_vs_full",  # null where full attention was asked by another command
}
WITHOUT_EFFECT = {
    *("cache.block_len", "cache.k_cache", "cache.policy"),  # of a cache of no tokens
    "limit",  # to more samples than there are
    "data_dir",  # of a benchmark whose data are embedded
    "method_version",  # until it is asked again
}
WRONG: list[Any] = [None, [], {}, "x", "x" * 3000, -1, 10**30, 1e308, True, [[[]]], {"a": {"b": 1}}, "\x1b[2J\u202e"]


def judged(forge: Forge, registry: Path) -> Checked:
    runs = {method: f"runs/{forge.run(method).name}" for method in ("full", RUN)}
    return Check(forge.root, runs[RUN], runs["full"], registry).all()


def paths(tree: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the leaves of a tree are; of a list its first one."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from paths(value, (*at, key))
    elif isinstance(tree, list) and tree:
        yield from paths(tree[0], (*at, 0))
    else:
        yield at


def name_of(at: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in at if not isinstance(part, int))


def changed(value: Any) -> Any:
    """Another value of the same type, near it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if value >= 1 else (value + 1) / 2
    return f"{value}x" if isinstance(value, str) else "x"


def put(tree: Any, at: tuple[str | int, ...], value: Any) -> None:
    for part in at[:-1]:
        tree = tree[part]
    tree[at[-1]] = value


def get(tree: Any, at: tuple[str | int, ...]) -> Any:
    for part in at:
        tree = tree[part]
    return tree


@pytest.fixture
def forge(true: Path, tmp_path: Path) -> Forge:
    for method in ("full", RUN):
        source = Forge(true).run(method)
        target = tmp_path / "runs" / source.name
        target.mkdir(parents=True)
        for file in source.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
    return Forge(tmp_path)


def attack_lines(forge: Forge, registry: Path, values: dict[str, list[Any]]) -> tuple[int, set[str]]:
    """How many changes of a line were tried, and the keys that were changed unseen."""
    folder = forge.run(RUN)
    before = {name: (folder / name).read_bytes() for name in ("samples.jsonl", "result.json")}
    row = json.loads(unsealed(before["samples.jsonl"].decode().splitlines()[0]))
    n, unseen = 0, set[str]()
    for at in paths(row):
        for value in values.get("") or [changed(get(row, at))]:
            n += 1

            def change(rows: list[dict[str, Any]], at: Any = at, value: Any = value) -> None:
                put(rows[0], at, value)

            try:
                forge.rows(RUN, change)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                pass  # no result can be made of such lines; the old one stays beside them
            if not judged(forge, registry).findings and value != get(row, at):
                unseen.add(str(at[0]))
            for name, content in before.items():
                (folder / name).write_bytes(content)
    return n, unseen


def test_every_value_of_a_line_is_found_where_it_can_be(forge: Forge, registry: Path) -> None:
    assert judged(forge, registry).level == 1
    n, unseen = attack_lines(forge, registry, {})
    assert n > 40 and unseen <= BELIEVED_OF_LINES, unseen


def test_values_of_any_type_end_in_a_finding_and_nothing_else(forge: Forge, registry: Path) -> None:
    n, unseen = attack_lines(forge, registry, {"": WRONG})
    assert n > 400 and unseen <= BELIEVED_OF_LINES, unseen


def test_every_value_of_a_result_is_found_where_it_can_be(forge: Forge, registry: Path) -> None:
    folder, unseen, n = forge.run(RUN), set[str](), 0
    before = (folder / "result.json").read_bytes()
    data = json.loads(unsealed(before.decode()))
    for at in paths(data):
        for value in [changed(get(data, at)), *WRONG]:
            new = copy.deepcopy(data)
            put(new, at, value)
            forge.result(RUN, **new)
            n += 1
            if not judged(forge, registry).findings and value != get(data, at):
                unseen.add(str(at[0]))
            (folder / "result.json").write_bytes(before)
    assert n > 500 and unseen <= BELIEVED_OF_RESULTS, unseen


def test_every_value_of_a_configuration_is_found_or_makes_it_another_benchmark(forge: Forge, registry: Path) -> None:
    folder, unseen, n = forge.run(RUN), set[str](), 0
    before = {name: (folder / name).read_bytes() for name in ("config.yaml", "result.json")}
    config = yaml.safe_load(before["config.yaml"])
    for at in paths(config):
        for value in [changed(get(config, at)), *WRONG]:
            new = copy.deepcopy(config)
            put(new, at, value)
            if new == config:
                continue
            (folder / "config.yaml").write_text(yaml.safe_dump(new, sort_keys=False))
            forge.result(RUN, config_hash=config_hash(new))
            n += 1
            found = judged(forge, registry)
            if not found.findings and found.level == 1:
                unseen.add(name_of(at))
            for name, content in before.items():
                (folder / name).write_bytes(content)
    assert n > 400 and unseen <= WITHOUT_EFFECT, unseen


def test_cut_and_flipped_files_end_in_a_finding(forge: Forge, registry: Path) -> None:
    """What is left of each file is its own seal."""
    folder, n = forge.run(RUN), 0
    for name in ("config.yaml", "samples.jsonl", "result.json"):
        before = (folder / name).read_bytes()
        for i in range(1, 40):
            at = len(before) * i // 40
            for content in (before[:at], before[:at] + bytes([before[at] ^ 1 << i % 7]) + before[at + 1 :]):
                (folder / name).write_bytes(content)
                n += 1
                found = judged(forge, registry)
                assert found.findings or found.level == 0, f"{name} at {at}"
        (folder / name).write_bytes(before)
    assert n == 3 * 39 * 2
