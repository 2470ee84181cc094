"""Who knows `transformers`; the model itself is tested with its sessions (`test_decode.py`, `test_prefill.py`)."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KNOW_TRANSFORMERS = {
    "engine/model.py",
    "engine/caches/through.py",
    "engine/checkpoints/conversion.py",
    "engine/checkpoints/kinds.py",
    "engine/checkpoints/load.py",
    "engine/checkpoints/text.py",
    "engine/checkpoints/trial.py",
    "engine/passes/rotations.py",
}


def test_few_files_of_the_engine_know_transformers_and_no_method_does() -> None:
    files = [file for room in ("kernels", "engine", "methods") for file in (ROOT / room).rglob("*.py")]
    knowing = {
        str(file.relative_to(ROOT))
        for file in files
        if re.search(r"^\s*(from|import) transformers", file.read_text(), re.M)
    }
    assert knowing == KNOW_TRANSFORMERS
