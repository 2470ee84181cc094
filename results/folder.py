"""`RunFolder`: the only writer of a run's folder, which goes on where an earlier process stopped.

Its promises:

- a sample counts once its line in samples.jsonl ends in a newline, never before and never twice;
- result.json exists only when everything else is in place; a stopped run has none;
- every file but samples.jsonl is written next to its place and renamed: it is whole or absent;
- one process at a time: an exclusive lock is held from `open` to `close`;
- a folder that is not the run's own is refused unchanged, and what others put into it stays.

Not here: how files are written, sealed and told from others' (`results/files.py`), the loop over samples
(`evals/loop.py`).
"""

import json
import os
import re
import socket
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from filelock import FileLock

from kvbench.engine.errors import ConfigError, RunError
from kvbench.results.config import check_config, config_hash
from kvbench.results.files import (
    FILES,
    HOLDER,
    LOCK,
    MARK,
    REMEDY,
    STEM,
    check_place,
    file_stem,
    going_on,
    is_file,
    is_folder,
    naming,
    open_own,
    remove_scratch,
    replacing,
    scratch,
    sealed,
    sync_folder,
    temporary,
    unusable,
    write,
    write_whole,
)
from kvbench.results.ledger import ledger_damage, merge, sample_of, write_part
from kvbench.results.lock import Holder, acquire
from kvbench.results.read import doubt, is_sealed, parse_samples
from kvbench.results.schema import OtherSchemaError, RunResult, SampleRow
from kvbench.results.scores import PART, SCORES, Score, Scores, parse_scores, read_scores, to_text
from kvbench.results.summary import disagreement, of_today, with_scores


class RunFolder:
    """One run's folder, held exclusively from `open` to `close`; a context manager.

    `append` each sample as it ends, then `finish`. After `open`, `rows` are the samples that were completed earlier,
    `finished` is the result if nothing is left to do, and `notes` say what was found damaged and mended (for the log).
    """

    def __init__(self, path: Path, config: Mapping[str, Any], lock: FileLock) -> None:
        self.path = path
        self.config = config
        self.config_hash = config_hash(config)
        self.notes: list[str] = []
        self._lock = lock
        self._n_bytes = 0  # of samples.jsonl
        self._crc = 0  # of the same
        self._rows: dict[str, SampleRow] = {}  # as in samples.jsonl
        self._scores: Scores | None = None  # of all answers among them
        self._finished: RunResult | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        config: Mapping[str, Any],
        config_yaml: str,
        *,
        wait: bool = True,
        on_wait: Callable[[Holder], None] | None = None,
        retry_oom: bool = False,
    ) -> Self:
        """Check that the folder is new or of `config`, lock it, repair what a killed process left.

        One that is refused is left as it was. `path` may be a link to a folder; inside, none is
        followed. `config_yaml` is `config` as YAML. `retry_oom` forgets samples that ran out of memory.
        Whoever needs several folders opens them in sorted order: two processes with two orders
        would wait for each other for ever.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            check_place(path, lambda file: check_config(file, config))
            lock = acquire(path, wait, on_wait)
        except OSError as error:
            raise unusable(path, error) from None
        folder = cls(path, config, lock)
        try:
            # Once more, as another process may have begun or gone on since.
            has_config = check_place(path, lambda file: check_config(file, config))
            with open_own(path / HOLDER, os.O_TRUNC) as file:
                file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
            folder._prepare(None if has_config else config_yaml, retry_oom)
        except BaseException as error:
            folder.close()
            if isinstance(error, OSError):
                raise unusable(path, error) from None
            raise
        return folder

    @staticmethod
    def refuse(path: Path, config: Mapping[str, Any], prompts: Mapping[str, str]) -> None:
        """Raise what `open` and `check_prompt` would for this configuration and these prompts; nothing is touched."""
        if not path.is_dir():
            return
        try:
            check_place(path, lambda file: check_config(file, config))
            samples = path / "samples.jsonl"
            rows = parse_samples(samples, samples.read_bytes())[0] if is_file(samples) and prompts else {}
        except OSError as error:
            raise unusable(path, error) from None
        for id in rows.keys() & prompts.keys():
            refuse_other_prompt(path, rows[id], prompts[id])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, ConfigError):  # what is refused before it answered anything leaves nothing
            self.discard()
        self.close()

    def close(self) -> None:
        """Let the next process in. The lock file stays: two processes could lock two of them."""
        self._lock.release()

    def discard(self) -> None:
        """Leave nothing of a run that completed no sample; what others put into the folder stays."""
        if not self._rows and self._finished is None:
            with suppress(OSError):  # another process may have come in
                self._remove_files(with_parent=False)

    @property
    def rows(self) -> list[SampleRow]:
        """The completed samples, in the order of their lines, with the scores that count."""
        rows = list(self._rows.values())
        return rows if self._scores is None else self._scores.lay_over(rows)

    @property
    def finished(self) -> RunResult | None:
        """The result, if there is one and the lines that it counted are still there."""
        return self._finished

    def has(self, id: str) -> bool:
        """Whether a sample is completed."""
        return id in self._rows

    def check_prompt(self, id: str, sha256: str) -> None:
        """Refuse to go on if a completed sample was asked with another prompt than now."""
        if id in self._rows:
            refuse_other_prompt(self.path, self._rows[id], sha256)

    def append(self, row: SampleRow, ledger: Mapping[str, Sequence[float]] | None = None) -> None:
        """Complete one sample: first its ledger (columns of equal length), then its line.

        Killed between the two, a ledger without a line is left, which the sample's next attempt
        replaces. The other order could leave a completed sample without its ledger. Killed within the line, the
        newline is missing and the next `open` cuts it off. Either way the sample runs again.
        """
        assert self._finished is None, f"{self.path} is finished"
        with going_on(self.path):
            if ledger is not None:
                write_part(self._part(row.id), row.id, ledger)
            else:  # of an attempt that was killed before its line
                self._part(row.id).unlink(missing_ok=True)
            self._append_line(row)

    def _append_line(self, row: SampleRow) -> None:
        assert row.id not in self._rows, f"sample {row.id!r} is already in {self.path}"
        line = sealed(row.to_json()).encode() + b"\n"
        path = self.path / "samples.jsonl"
        with naming(path), open_own(path, os.O_APPEND) as file:
            size = os.fstat(file.fileno()).st_size
            if size != self._n_bytes:
                raise RunError(
                    f"{path} has {size} bytes where this run left {self._n_bytes}: somebody else changed it; give "
                    "the same command again, which goes on with what it holds"
                )
            try:
                write_whole(file, line)
                os.fsync(file.fileno())
            except BaseException:  # a caller that goes on must not append to half a line
                file.truncate(size)
                raise
        if size == 0:
            sync_folder(self.path)
        self._n_bytes += len(line)
        self._crc = zlib.crc32(line, self._crc)
        self._rows[row.id] = row
        self._check_scores([row])

    @contextmanager
    def placing(self) -> Generator[Path]:
        """A folder for files that belong with the result; they are put there when all are whole."""
        with going_on(self.path), scratch(self.path) as folder:
            yield folder

    def finish(self, result: RunResult, env: Mapping[str, Any]) -> None:
        """Write ledger.parquet, env.json and, when both are in place, result.json.

        Killed before result.json, all of it is done again: the parts that ledger.parquet is made
        of are removed last. Killed while they are removed, the next `open` removes the others.
        """
        assert result.config_hash == self.config_hash, f"{result.config_hash} {self.config_hash}"
        if self._scores is not None:
            result = with_scores(result, self.rows, self._scores)
        difference = disagreement(result, self.rows)
        assert difference is None, f"the result says {difference}"
        with going_on(self.path):
            target = self.path / "ledger.parquet"
            crc, n_lost = merge(target, self._rows, self._part)
            if n_lost:
                self.notes.append(f"{target} has no rows of {n_lost} of {len(self._rows)} samples")
            write(self.path / "env.json", json.dumps(env, indent=2) + "\n")
            self._write_result(replace(result, ledger_crc32=crc))
            self._remove_parts()

    # Scores that are given later: see results/scores.py.

    def scores_so_far(self) -> dict[str, Score]:
        """The scores that a scorer gave before it was killed."""
        path = self.path / PART
        if not path.exists():
            return {}
        content = path.read_bytes()
        scores, n_bytes = parse_scores(content)
        if n_bytes < len(content):
            with going_on(self.path), open_own(path, 0) as file:
                file.truncate(n_bytes)
        return {score.id: score for score in scores}

    def keep_score(self, score: Score) -> None:
        """Keep one score for `scores_so_far` until all are given."""
        path = self.path / PART
        with going_on(self.path), naming(path), open_own(path, os.O_APPEND) as file:
            write_whole(file, score.to_line().encode())

    def put_scores(self, scores: Sequence[Score]) -> RunResult:
        """Let these scores of all answers count: first scores.jsonl is replaced, then result.json.

        Killed between the two, readers make the new result for themselves, and the next `open` writes it.
        """
        assert self._finished is not None, f"{self.path} is not finished"
        new = Scores.of(scores)
        rows = new.lay_over(self._rows.values())
        result = with_scores(self._finished, rows, new)
        with going_on(self.path):
            write(self.path / SCORES, to_text(scores))
            self._scores = new
            result = self._write_result(result)
            (self.path / PART).unlink(missing_ok=True)
        return result

    def _write_result(self, result: RunResult) -> RunResult:
        """Let this result count, sealed, and the samples that it was made of with it."""
        self._finished = replace(result, samples_crc32=f"{self._crc:08x}")
        write(self.path / "result.json", sealed(self._finished.to_json()))
        return self._finished

    def _check_scores(self, rows: Sequence[SampleRow]) -> None:
        """Check scores: where an answer has none, no score counts; all are kept for `scores_so_far`."""
        try:
            if self._scores is not None:
                self._scores.lay_over(rows)
        except ValueError as error:
            self._scores = None
            (self.path / SCORES).replace(self.path / PART)
            sync_folder(self.path)
            self.notes.append(
                f"{self.path / SCORES} does not count any more ({error}); score the run again with "
                "`python -m kvbench.evals.rescore --write`"
            )

    # Samples that other processes answer, in folders of their own below this one.

    def shards(self) -> list[Path]:
        """Folders in which other processes answered samples of this run, and which were not taken over yet."""
        folder = self.path / "shards"
        if self._finished or not is_folder(folder):
            return []
        shards: list[Path] = []
        for path in sorted(filter(is_folder, folder.iterdir())):
            try:
                check_place(path, lambda file: check_config(file, self.config))
            except ConfigError as error:
                self.notes.append(f"{path} is no shard of this run and stays as it is: {error}")
                continue
            if any(path.iterdir()):
                shards.append(path)
        return shards

    def take(self, shard: Path, on_wait: Callable[[Holder], None] | None = None) -> None:
        """Take over what another process completed in `shard`, once it has ended, and remove its files there.

        Killed on the way, what is left is taken the next time.
        """
        with going_on(shard):
            lock = acquire(shard, True, on_wait)
            try:
                check_place(shard, lambda file: check_config(file, self.config))
                other = type(self)(shard, self.config, lock)
                other._prepare_samples()
                for row in other.rows:
                    if not self.has(row.id):
                        self._take_sample(row, other._part(row.id))
                for file in sorted(shard.iterdir()):
                    if re.fullmatch(rf"(trace|accesses)-{STEM}\.(json|npz)", file.name):
                        file.replace(self.path / file.name)
                other._remove_files()
            finally:
                lock.release()

    def _take_sample(self, row: SampleRow, part: Path) -> None:
        if is_file(part):
            self._part(row.id).parent.mkdir(exist_ok=True)
            with replacing(self._part(row.id)) as file:
                file.write(part.read_bytes())
        else:
            self._part(row.id).unlink(missing_ok=True)
        self._append_line(row)

    def _remove_files(self, with_parent: bool = True) -> None:
        """Remove all that runs write, and the folder with it unless somebody else put something there."""
        self._remove_parts()
        remove_scratch(self.path)
        for name in FILES:
            temporary(self.path / name).unlink(missing_ok=True)
        (self.path / "samples.jsonl").unlink(missing_ok=True)
        # config.yaml says whose the folder is, as long as there is one.
        names = ("config.yaml", HOLDER, LOCK)
        if {path.name for path in self.path.iterdir()} <= set(names):
            for name in names:
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()
            if with_parent and not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()

    def sort(self, ids: Sequence[str]) -> None:
        """Put the lines into this order, which is the task's, whoever answered first."""
        rows = {id: self._rows[id] for id in ids if id in self._rows}
        rows |= self._rows  # those of samples that are no longer asked stay, after the others
        if list(rows) != list(self._rows):
            with going_on(self.path):
                self._rewrite(rows)

    def _rewrite(self, rows: dict[str, SampleRow]) -> None:
        """samples.jsonl with these lines."""
        text = "".join(sealed(row.to_json()) + "\n" for row in rows.values())
        write(self.path / "samples.jsonl", text)
        self._rows, self._n_bytes, self._crc = rows, len(text.encode()), zlib.crc32(text.encode())

    # Opening: each step leaves a folder that can be opened again, so a kill changes nothing.

    def _prepare(self, config_yaml: str | None, retry_oom: bool) -> None:
        """Repair; `config_yaml` is None where the folder has its config.yaml."""
        self._check_schema()
        for name in FILES:
            temporary(self.path / name).unlink(missing_ok=True)
        remove_scratch(self.path)
        if config_yaml is not None:
            assert config_hash(yaml.safe_load(config_yaml)) == self.config_hash, "another config_yaml"
            write(self.path / "config.yaml", config_yaml)
        self._prepare_samples()
        self._seal_older_lines()
        self._prepare_scores()
        if retry_oom and any(row.status == "oom" for row in self._rows.values()):
            # First the result: it must not stand next to fewer lines than it counted.
            (self.path / "result.json").unlink(missing_ok=True)
            self._rewrite({id: row for id, row in self._rows.items() if row.status != "oom"})
        self._prepare_result()
        if self._finished:
            self._remove_parts()

    def _check_schema(self) -> None:
        """Refuse a result of another version before anything is changed."""
        path = self.path / "result.json"
        try:
            RunResult.from_json(path.read_bytes().decode())
        except OtherSchemaError as error:
            raise ConfigError(f"{path}: {error}; use the code that wrote it, or {REMEDY}") from None
        except (ValueError, FileNotFoundError):  # made again, or made for the first time
            return

    def _prepare_samples(self) -> None:
        path = self.path / "samples.jsonl"
        if not path.exists():
            return
        content = path.read_bytes()
        self._rows, n_bytes = parse_samples(path, content)
        self._n_bytes, self._crc = n_bytes, zlib.crc32(content[:n_bytes])
        if n_bytes < len(content):
            with open_own(path, 0) as file:
                file.truncate(n_bytes)
                os.fsync(file.fileno())
            self.notes.append(f"{path} ended within a line, which is cut off and run again")

    def _seal_older_lines(self) -> None:
        """Let lines from before seals have one where the run goes on: a file has them all, or none."""
        samples = self.path / "samples.jsonl"
        if not self._rows or is_sealed(samples.read_bytes()):
            return
        if why := doubt(self.path):
            raise ConfigError(f"{samples} cannot be believed: {why}; delete what somebody changed, or {REMEDY}")
        if not (self.path / "result.json").exists():
            self._rewrite(self._rows)
            self.notes.append(f"{samples} is from before lines had a crc32; they are believed, and have one now")

    def _prepare_scores(self) -> None:
        try:
            self._scores = read_scores(self.path)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._check_scores(list(self._rows.values()))

    def _prepare_result(self) -> None:
        """Read result.json; one that is damaged is moved aside, to be made again from samples."""
        path = self.path / "result.json"
        if not path.exists():
            return
        try:
            result = RunResult.from_json(path.read_bytes().decode())
            if result.config_hash != self.config_hash:
                raise ValueError(f"it says config_hash {result.config_hash}")
            is_old = result.scores_crc32 != (None if self._scores is None else self._scores.crc32)
            if is_old:  # `put_scores` was killed, or scores.jsonl was removed
                result = with_scores(result, self.rows, self._scores)
            if difference := disagreement(result, self.rows):
                raise ValueError(f"it says {difference}")
            if self._rows and (why := doubt(self.path)):
                raise ValueError(f"of samples.jsonl it says that {why}")
        except ValueError as error:
            path.replace(path.with_name("result.json.corrupt"))
            sync_folder(self.path)
            self.notes.append(f"{path} was damaged ({error}) and is made again")
            return
        result = of_today(result, self.rows)
        if is_old:
            result = self._write_result(result)
            self.notes.append(f"{path} was of other scores than {SCORES} and is made again")
        self._finished = result
        if damage := ledger_damage(self.path / "ledger.parquet", result):
            self.notes.append(f"{self.path / 'ledger.parquet'} is {damage} and is not used; only a new run can make it")

    # Ledgers: a part per sample while the run goes on, one file when it has finished.

    def _part(self, id: str) -> Path:
        """A sample's part, named by the id alone, since lines before it may be dropped."""
        return self.path / "ledger" / f"{file_stem(id)}.parquet"

    def _remove_parts(self) -> None:
        """The parts of completed samples, and of those that an earlier process was at when it was killed."""
        folder = self.path / "ledger"
        if not folder.is_dir():
            return
        for id in self._rows:
            self._part(id).unlink(missing_ok=True)
        for path in sorted(folder.iterdir()):
            if (path.name.endswith(MARK) and is_file(path)) or self._is_part(path):
                path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()

    def _is_part(self, path: Path) -> bool:
        """Whether somebody's file in ledger/ is of a sample: what it is called follows from what it holds."""
        if not re.fullmatch(rf"{STEM}\.parquet", path.name) or not is_file(path):
            return False
        id = sample_of(path)
        return id is not None and self._part(id).name == path.name


def refuse_other_prompt(path: Path, row: SampleRow, sha256: str) -> None:
    if row.prompt_sha256 != sha256:
        raise ConfigError(
            f"sample {row.id!r} has another prompt now than when {path} was begun (the data, the tokenizer or Python's "
            "version changed); choose another folder with out=DIR or delete this one"
        )
