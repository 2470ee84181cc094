"""Finished runs as records of Every Eval Ever (evalevalai.com), schema 0.3.0: a file a run, and one of its samples.

    FOLDER/data/COLLECTION/DEVELOPER/MODEL/UUID.json            scores, intervals, what was asked and what it cost
    FOLDER/data/COLLECTION/DEVELOPER/MODEL/UUID_samples.jsonl   a line for each answer

Method and budget are details of the model, since a compressed cache makes it another one. A run's folder has no
prompts: `input.raw` is the end of what was asked, and the hash of the prompt's tokens is with it. The same run gives
the same bytes. Where the package every-eval-ever is installed (Python 3.12), each file is checked against its schema.

Not here: the frame of samples (`results/frame.py`).
"""

import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from kvbench.checkout import VERSION
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import one_line
from kvbench.results import METRICS, RunResult, SampleRow
from kvbench.results.files import write
from kvbench.results.frame import found, watched
from kvbench.results.read import Whole, read_whole

SCHEMA = "0.3.0"
BY_HAND = "no developer"  # of a model whose name says none
COSTS = (  # of a run, as details of its score
    *("tokens_attended_mean", "effective_ratio", "bytes_resident_device", "bytes_resident_host", "within_budget"),
    *("bytes_moved_kv_per_step", "bytes_index_read_per_step", "resident_share", "prefill_s", "tpot_s"),
)


def records(to: Path, folders: Sequence[Path], left_out: list[str]) -> int:
    """Write the records of all runs in or below the folders; how many."""
    n, check = 0, checker()
    for folder in watched([*found(folders)]):
        try:
            whole = read_whole(folder)
        except (ValueError, OSError) as error:
            left_out.append(one_line(str(error)))
            continue
        record, lines = record_of(folder, whole)
        place = to / Path(record["detailed_evaluation_results"]["file_path"])
        check("eval.schema.json", record)
        for line in lines:
            check("instance_level_eval.schema.json", line)
        place.parent.mkdir(parents=True, exist_ok=True)
        text = jsonl(lines)
        write(place, text)
        write(place.with_name(place.name.replace("_samples.jsonl", ".json")), json.dumps(record, indent=2) + "\n")
        n += 1
    if not n:
        raise ConfigError(f"no run that can be read below {', '.join(map(str, folders))}")
    return n


def checker() -> Any:
    """Check of a record against the schema of the installed package; without it nothing is checked."""
    if importlib.util.find_spec("every_eval_ever") is None or importlib.util.find_spec("jsonschema") is None:
        return lambda name, record: None
    from importlib.resources import files

    from jsonschema import Draft7Validator  # pyright: ignore[reportMissingModuleSource]

    texts = files("every_eval_ever") / "schemas"
    kinds = ("eval.schema.json", "instance_level_eval.schema.json")
    validators = {name: Draft7Validator(json.loads((texts / name).read_text())) for name in kinds}

    def check(name: str, record: Any) -> None:
        for error in validators[name].iter_errors(record):
            raise ConfigError(f"a record is not as Every Eval Ever's {name} asks: {error.message:.200}")

    return check


def jsonl(lines: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def record_of(folder: Path, whole: Whole) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run's record, and the lines of its samples."""
    result, rows, config = whole
    model = model_id(config)
    ended = moment(folder)
    name = f"{slug(result.task)}/{slug(model)}/{result.config_hash}/{ended}"
    uuid = UUID(hashlib.sha256(f"{name} {result.samples_crc32}".encode()).hexdigest()[:32], version=4)
    place = (
        f"data/{slug(result.shown_task)}/{slug(model.rpartition('/')[0] or BY_HAND)}/{slug(model.rpartition('/')[2])}"
    )
    file = f"{place}/{uuid}_samples.jsonl"
    datasets = list(dict.fromkeys(str(row.fields.get("dataset", result.dataset)) for row in rows))
    lines = [line_of(row, name, model, f"{name}#{result.task}", result.shown_task) for row in rows]
    record = {
        "schema_version": SCHEMA,
        "evaluation_id": name,
        "evaluation_timestamp": ended,
        "retrieved_timestamp": ended,
        "source_metadata": {
            "source_name": "KVBench", "source_type": "evaluation_run", "source_organization_name": "KVBench's user",
            "evaluator_relationship": "third_party",
        },
        "eval_library": {"name": "kvbench", "version": VERSION, "additional_details": {"commit": str(result.git_sha)}},
        "model_info": {
            "name": result.model, "id": model, "developer": model.rpartition("/")[0] or BY_HAND,
            "inference_engine": {"name": "kvbench", "version": VERSION},
            "additional_details": {
                "deployment_type": "self_deployed", "model_availability": "open_weights", "method": result.method_label,
                "budget": result.asked, "comm": result.shown_comm, "dtype": result.dtype, "device": result.device,
                "prefill": result.prefill, "compression_scope": result.protocol,
                "checkpoint": str(config.get("model_digest") or ""),
            },
        },
        "evaluation_results": [result_of(result, name, datasets)],
        "detailed_evaluation_results": {
            "format": "jsonl", "file_path": file, "hash_algorithm": "sha256",
            "checksum": hashlib.sha256(jsonl(lines).encode()).hexdigest(), "total_rows": len(lines),
        },
    }  # fmt: skip
    return record, lines


def result_of(result: RunResult, name: str, datasets: Sequence[str]) -> dict[str, Any]:
    metric = METRICS[result.metric or "score"]
    low, high = result.score_ci95 or (None, None)
    spread = {"confidence_interval": {"lower": low, "upper": high, "confidence_level": 0.95, "method": "Gaffke's"}}
    return {
        "evaluation_result_id": f"{name}#{result.task}",
        "evaluation_name": result.shown_task,
        "source_data": {
            "dataset_name": ", ".join(datasets)[:200], "source_type": "other",
            "additional_details": {"data_source": result.data_source, "task_version": str(result.task_version)},
        },
        "metric_config": {
            "metric_id": result.metric or "score", "metric_name": result.metric or "score",
            "lower_is_better": metric.better == "lower", "score_type": "continuous", "min_score": metric.lowest,
            "max_score": "Infinity" if metric.highest is None else metric.highest,
        },
        "score_details": {
            "score": result.score,
            "details": {key: str(value) for key in COSTS if (value := getattr(result, key)) is not None},
            "uncertainty": {"num_samples": result.n_samples} | ({} if low is None else spread),
        },
        "generation_config": {
            "additional_details": {f"method.{key}": str(value) for key, value in result.params.items()}
        },
    }  # fmt: skip


def line_of(row: SampleRow, name: str, model: str, of: str, task: str) -> dict[str, Any]:
    end = row.fields.get("prompt_end")
    asked = str(end.get("question") or end.get("context") or "") if isinstance(end, Mapping) else ""
    score = 0.0 if row.score is None else row.score
    seconds = {"generation_time_ms": row.decode_s, "time_to_first_token_ms": row.prefill_s}
    return {
        "schema_version": SCHEMA,
        "evaluation_id": name,
        "model_id": model,
        "evaluation_name": task,
        "evaluation_result_id": of,
        "sample_id": row.id,
        "sample_hash": row.prompt_sha256,
        "interaction_type": "single_turn",
        "input": {"raw": plain(asked), "reference": [plain(text) for text in row.references]},
        "output": {"raw": [plain(row.prediction)]},
        "answer_attribution": [{
            "turn_idx": 0, "source": "output.raw", "extracted_value": plain(row.prediction),
            "extraction_method": "custom", "is_terminal": True,
        }],
        "evaluation": {"score": score, "is_correct": score == 1},
        "token_usage": {
            "input_tokens": row.prompt_tokens, "output_tokens": row.generated_tokens,
            "total_tokens": row.prompt_tokens + row.generated_tokens,
        },
        "performance": {key: 1e3 * value for key, value in seconds.items() if value is not None},
        "error": row.error,
        "metadata": {"sample": row.sample_id, "status": row.status} | {
            key: str(value) for key, value in row.fields.items() if isinstance(value, str | int | float)
        },
    }  # fmt: skip


def plain(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def model_id(config: Mapping[str, Any]) -> str:
    """The model as its hub names it; one that lies in a folder by its name."""
    model = config["model"]
    known = str(model.get("id") or "")
    return known if re.fullmatch(r"[\w.-]+/[\w.-]+", known) and not known.startswith((".", "/")) else str(model["name"])


def slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text).strip("._")[:100] or "unnamed"


def moment(folder: Path) -> str:
    """Seconds since 1970 at which a run ended; "0" where nothing says so."""
    try:
        ended = json.loads((folder / "env.json").read_text(encoding="utf-8"))["ended"]
        return f"{datetime.fromisoformat(str(ended)).timestamp():.0f}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "0"
