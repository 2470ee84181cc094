"""All kinds of calibration, by the name that the command and the files have for them."""

from kvbench.engine.errors import unknown_name
from kvbench.methods.calibration.base import Kind
from kvbench.methods.calibration.channels import Channels
from kvbench.methods.calibration.heads import Heads
from kvbench.methods.calibration.pca import Components
from kvbench.methods.calibration.qfilters import QFilterDirections
from kvbench.methods.calibration.queries import Queries
from kvbench.methods.calibration.reuse import Resemblance

KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (Channels(), Components(), Heads(), QFilterDirections(), Queries(), Resemblance())
}


def kind_of(name: str) -> Kind:
    if name not in KINDS:
        raise unknown_name("kind of calibration", name, KINDS)
    return KINDS[name]
