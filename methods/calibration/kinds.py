"""All kinds of calibration, by the name that the command and the files have for them."""

from engine.errors import unknown_name
from methods.calibration.base import Kind
from methods.calibration.channels import Channels
from methods.calibration.heads import Heads
from methods.calibration.pca import Components
from methods.calibration.qfilters import QFilterDirections
from methods.calibration.queries import Queries

KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (Channels(), Components(), Heads(), QFilterDirections(), Queries())
}


def kind_of(name: str) -> Kind:
    if name not in KINDS:
        raise unknown_name("kind of calibration", name, KINDS)
    return KINDS[name]
