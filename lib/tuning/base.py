"""Base models: what measurements of many models taught, for a run to begin with; a family's model learns on from there.

There is one for each core operator and class of targets, made by `benchmarks/pool/train_base.py` from recorded
measurements and kept in `lib/tuning/base_models/<class>/`: the models, and a card that says what they were trained on
and how well each foretells models that it has not seen. Those of `<class>_metaschedule` learned from programs of
MetaSchedule's space, for runs in which all subgraphs are tuned there.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from lib.contracts.schemas import FEATURE_VERSION
from lib.tuning.cost_model import FamilyModel
from lib.tuning.members import join

FOLDER = Path(__file__).parent / "base_models"
CARD = "card.json"
# Elements narrower than floats: where matrices of them are multiplied, programs are others.
_NARROW = ("_bf16", "_int8", "_int16")
_SIGNALS_AND_VOLUMES = re.compile("conv[13]d")  # their loops are those of images with one line, or with more axes
# Whose models a class takes where it has none of its own, the first that has one, but for operators with these ends. Of
# programs in 32 registers of 128 bits, which NEON has, those of AVX2 order more pairs right than those of AVX-512
# (benchmarks/notes/learning.md, "What ARM starts from"). AMX's CPUs compute floats as those of `avx512x2` do; those
# that multiply one vector a cycle take from them what they lack: theirs order 0.53 to 0.61 of those CPUs' pairs, none
# half. What only those of AVX2 know (convolutions band by band) is taken over with AVX-512; nobody measured its
# worth there.
_LIKE: dict[str, dict[str, tuple[str, ...]]] = {
    "avx2": {"avx512x2": _NARROW},
    "neon": {"avx2": (), "avx512x2": _NARROW},
    "avx512": {"avx512x2": _NARROW, "avx2": _NARROW},
    "avx512x2": {"amx": _NARROW, "avx512": (), "avx2": _NARROW},
    "amx": {"avx512x2": _NARROW, "avx512": _NARROW, "avx2": _NARROW},
}


@dataclass(frozen=True, slots=True)
class Base:
    """The base model of one core operator."""

    operator: str
    path: Path
    regrets: tuple[float, ...]  # on unseen models, of the best of its first 1, 2, ... programs, against the best of all

    def model(self) -> FamilyModel:
        """Read it.

        Raises:
            MissingInput, ContractError: See `FamilyModel.load`.
        """
        return FamilyModel.load(self.path)


class BaseModels:
    """Those for one class of targets; empty where this project has none."""

    def __init__(self, folder: Path | None, like: Mapping[Path, tuple[str, ...]] | None = None) -> None:
        """Those of a folder, and of operators that it lacks those of other classes.

        Args:
            like: Folders of other classes, the first one counts; with ends of the names of operators of which nothing
                is taken from there.
        """
        self._found = _bases(folder)
        for other, unlike in (like or {}).items():
            taken = {operator: base for operator, base in _bases(other).items() if not operator.endswith(unlike)}
            self._found = taken | self._found

    def of(self, operator: str) -> Base | None:
        """That of a core operator, if there is one; convolutions of signals and volumes have those of images."""
        return self._found.get(operator) or self._found.get(_SIGNALS_AND_VOLUMES.sub("conv2d", operator))


def base_models(target_class: str, use: bool = True) -> BaseModels:
    """Those that this project has for a class of targets (`CpuTarget.instructions`), or for those most like it; none
    if not to be used."""
    if not use or not target_class:
        return NONE
    like = {FOLDER / other: unlike for other, unlike in _LIKE.get(target_class, {}).items()}
    return BaseModels(FOLDER / target_class, like)


def stock_base_models(target_class: str, use: bool = True) -> BaseModels:
    """Those that know MetaSchedule's space, on a class of targets; none if this project has none, or not to be used."""
    return BaseModels(FOLDER / f"{target_class}_metaschedule") if use and target_class else NONE


def bases_of(subgraphs: pa.Table, families: pa.Table, bases: BaseModels) -> dict[str, Base | None]:
    """By family: the base model of the core operator that all of it have; None if there is none, or several operators.

    Args:
        subgraphs: A SUBGRAPHS table; `families`: the FAMILIES table made from it.
    """
    operators: dict[str, set[str]] = {}
    for row in join(subgraphs.select(["subgraph_id", "core_operator"]), families):
        if row["family_id"]:
            operators.setdefault(row["family_id"], set()).add(row["core_operator"])
    return {family_id: bases.of(min(found)) if len(found) == 1 else None for family_id, found in operators.items()}


@cache
def _bases(folder: Path | None) -> dict[str, Base]:
    """By operator; empty if there are none, or they were trained on other features."""
    if folder is None or not (folder / CARD).exists():
        return {}
    card: dict[str, Any] = json.loads((folder / CARD).read_text(encoding="utf-8"))
    if card["features"] != FEATURE_VERSION:
        return {}
    return {
        operator: Base(operator, folder / facts["file"], tuple(facts["regrets"]))
        for operator, facts in card["operators"].items()
    }


NONE = BaseModels(None)
