"""`python -m methods.calibrate KIND model=NAME`: measure what methods have to know of a model, once, and keep it.

    python -m methods.calibrate channels model=smollm2-135m
    python -m methods.calibrate pca model=smollm2-135m text=book.txt tokens=8192 out=book.npz

Without `text` it reads the embedded prose and writes where runs with this model look by themselves; they would do the
same at first use. With a text or a length of your own say where to write (`out`), and name the file in
`method.calibration_file`. Besides `model` the command takes `device` and `dtype`.

kinds      channels  Double Sparsity's scores of channels
           pca       Loki's principal components of keys
           heads     DuoAttention's table, as text: conf/heads/MODEL.tsv, or out=FILE
           qfilters  Q-Filters' directions of queries
           queries   TriAttention's means of queries
exit code  0 written, 2 wrong input

Not here: the kinds (`methods/calibration/`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from engine.checks import whole_number
from engine.errors import ConfigError, first_line
from engine.foreign import read_text
from engine.terminal import say
from evals.models import load_model, resolve_hardware
from evals.settings import from_words
from evals.typed import convert, expanded
from methods.calibration import files
from methods.calibration.files import Calibration, place
from methods.calibration.kinds import KINDS, kind_of
from methods.calibration.known import calibrate, last_tokens
from methods.calibration.prose import embedded_prose, prose_name
from methods.dropping.duo_attention import TABLES

OWN = ("text", "tokens", "out")  # keys of this command
OF_A_RUN = ("model", "device", "dtype")


def main(words: Sequence[str]) -> int:
    try:
        say(written(words))
    except ConfigError as error:
        say("calibrate:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def written(words: Sequence[str]) -> Path:
    """Calibrate as the command line says: the file."""
    kinds = [word for word in words if "=" not in word]
    if len(kinds) != 1:
        raise ConfigError(f"give one kind of calibration, such as {' or '.join(KINDS)}, and model=NAME")
    kind = kind_of(kinds[0])
    given = dict(word.split("=", 1) for word in words if "=" in word)
    for key in given:
        if key not in OWN and key.partition(".")[0] not in OF_A_RUN:
            raise ConfigError(f"{key}={given[key]} means nothing here; give {', '.join((*OF_A_RUN, *OWN))}")
    tokens = given.get("tokens", str(kind.n_tokens))
    n_tokens = convert(int(tokens) if tokens.isdecimal() else tokens, int, "tokens")
    whole_number("tokens", n_tokens, 1)
    text, out = given.get("text"), given.get("out")
    if out is None and (text is not None or n_tokens != kind.n_tokens):
        raise ConfigError("a calibration of your own text or length is no default; say where to write it with out=FILE")
    if text is not None and not expanded("text", text).is_file():
        raise ConfigError(f"text={text} is no file; give a text file in UTF-8")
    prose, name = (embedded_prose(), prose_name()) if text is None else (read_text(expanded("text", text)), text)
    model = load_model(resolve_hardware(from_words([f"{key}={x}" for key, x in given.items() if key not in OWN])))
    ids = last_tokens(model, prose, n_tokens)
    if len(ids) < n_tokens:
        raise ConfigError(
            f"{name} has {len(ids)} tokens, and tokens={n_tokens} are asked for; use a longer text or fewer tokens"
        )
    with model.hooked():
        found = calibrate(model, kind.name, ids, name)
    is_table = kind.name == "heads"
    usual = TABLES / f"{model.shape.name}.tsv" if is_table else place(kind.name, model.digest)
    path = usual if out is None else expanded("out", out)
    try:
        (write_table if is_table else files.write)(path, found)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ConfigError(f"{path} cannot be written ({reason}); give another out=FILE") from None
    return path


def write_table(path: Path, found: Calibration) -> None:
    """A table of heads as DuoAttention reads it, with where it comes from."""
    about, shape_layers = found.about, found.about.layers
    facts = {
        "model": about.model,
        "model_digest": about.digest,
        "method": "largest weight of any token while the text is repeated, behind its full cache",
        "text": about.text,
        "tokens": about.n_tokens,
        "made": about.made,
        "command": f"python -m methods.calibrate heads model={about.model}",
    }
    if [*shape_layers] != [*range(len(shape_layers))]:
        raise ConfigError(f"{about.model} has layers without full attention, and a table of heads has a line for each")
    lines = [f"# {key}: {value}" for key, value in facts.items()]
    lines += ["\t".join(f"{x:.6f}" for x in row) for row in found.arrays["heads"]]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
