"""A true submission of a tiny model's runs, and what somebody who knows its files can change in it.

Whatever is changed is sealed again: only what does not follow is left to find.
"""

import json
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from kvbench.evals.submission.manifest import RUN_FILES
from kvbench.results import RunFacts, RunResult, SampleRow, config_hash, read_samples, summarise
from kvbench.results.files import sealed, unsealed
from kvbench.results.ledger import pyarrow

Row = dict[str, Any]


class Forge:
    """A copy of a submission that is being changed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, method: str) -> Path:
        """The run of a method."""
        (found,) = [path for path in (self.root / "runs").iterdir() if f"-{method}-" in path.name]
        return found

    def result(self, method: str, /, **changes: Any) -> None:
        """Change keys of result.json, whatever lines say."""
        path = self.run(method) / "result.json"
        data = json.loads(unsealed(path.read_text())) | changes
        path.write_text(sealed(json.dumps(data, indent=2) + "\n"))

    def rows(self, method: str, change: Callable[[list[Row]], list[Row] | None], sums: bool = True) -> None:
        """Change lines; with `sums` result.json is made of the new ones."""
        folder = self.run(method)
        rows = [json.loads(unsealed(line)) for line in (folder / "samples.jsonl").read_text().splitlines()]
        changed = change(rows)
        rows = rows if changed is None else changed
        text = "".join(sealed(json.dumps(row)) + "\n" for row in rows)
        (folder / "samples.jsonl").write_text(text)
        self.result(method, samples_crc32=f"{zlib.crc32(text.encode()):08x}")
        if sums:
            self.sums(method)

    def sums(self, method: str) -> None:
        folder = self.run(method)
        old = RunResult.from_json((folder / "result.json").read_text())
        rows = [SampleRow.from_json(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        facts = RunFacts(**{spec.name: getattr(old, spec.name) for spec in fields(RunFacts)})
        new = summarise(rows, facts, read_samples(self.run("full")) if method != "full" else rows)
        new = replace(new, ledger_crc32=old.ledger_crc32, samples_crc32=old.samples_crc32)
        (folder / "result.json").write_text(sealed(new.to_json()))

    def config(self, method: str, change: Callable[[Row], None], /, **facts: Any) -> None:
        """Change the configuration, its hash, and what result.json repeats of it."""
        path = self.run(method) / "config.yaml"
        config = yaml.safe_load(path.read_text())
        change(config)
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        self.result(method, config_hash=config_hash(config), **facts)

    def ledger(self, method: str, change: Callable[[dict[str, list[Any]]], None], **options: Any) -> None:
        """Change the columns of ledger.parquet."""
        pa, pq = pyarrow()
        path = self.run(method) / "ledger.parquet"
        columns = pq.read_table(path, partitioning=None).to_pydict()
        change(columns)
        pq.write_table(pa.table(columns), path, compression="zstd", write_page_checksum=True, **options)
        self.result(method, ledger_crc32=f"{zlib.crc32(path.read_bytes()):08x}")

    def add(self, method: str, name: str) -> Path:
        """A second copy of a run's folder."""
        folder = self.root / "runs" / name
        folder.mkdir()
        for file in RUN_FILES:
            if (self.run(method) / file).exists():
                (folder / file).write_bytes((self.run(method) / file).read_bytes())
        return folder
