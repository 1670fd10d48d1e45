"""One shape of a model among several: what is built of it, and its library brought to compute what it should."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import building, deploy, probing
from lib.contracts import tables
from lib.contracts.errors import CompilationError, VerificationError
from lib.contracts.files import ModelFiles
from lib.contracts.schemas import FAMILIES, MODELS, SHARED, SUBGRAPHS
from lib.machine.targets import AnyTarget
from lib.measure.protocol import BuildModel
from lib.measure.runner import Pool
from lib.tir.workload import load_module
from lib.tuning import agreement, planning
from lib.tuning.history import History
from lib.tuning.members import groups_of, joint_members
from lib.verification import Built, CompileConfig, Estimate, Peer, is_quantized, verify
from lib.winners import Choice, without_wrong

_UNKNOWN = Estimate(0.0, is_complete=False)  # of the untuned model, which is not run in each shape


@dataclass(frozen=True, slots=True)
class Shape:
    """A model in one of its shapes."""

    files: ModelFiles
    extents: Mapping[str, int]
    is_measured: bool = True  # else its programs were adapted from those of other shapes

    @property
    def name(self) -> str:
        return "x".join(map(str, self.extents.values()))


def agreed_of(joint: ModelFiles, families: Path, so_far: History) -> tuple[dict[str, str], History]:
    """How each subgraph of all shapes packs its weights, and what was measured as if only programs with that had been:
    see `agreement.agreed`.

    Args:
        joint: Has the SUBGRAPHS of all shapes, the MODELS and SHARED tables; `families`: their FAMILIES.
    """
    shared = tables.read(joint.shared, SHARED)
    members = joint_members(
        tables.read(joint.subgraphs, SUBGRAPHS), tables.read(families, FAMILIES), tables.read(joint.models, MODELS),
        so_far, shared,
    )  # fmt: skip
    return agreement.agreed(planning.sharing(members), groups_of(shared), so_far)


def built_of(shape: Shape, work: Path, precision: str) -> Built:
    """What is built of a shape, in a folder of its own there."""
    folder = work / shape.name
    folder.mkdir()
    interface = deploy.interface(load_module(shape.files.module.read_text()))
    operators = tables.read(shape.files.subgraphs, SUBGRAPHS)["core_operator"].to_pylist()
    has_bytes = is_quantized(operators, shape.files)
    return Built(folder, shape.files, interface, precision, has_bytes)


def order_of(shape: Shape, built: Built, choices: Sequence[Choice]) -> BuildModel:
    """How its library is compiled."""
    trace_of = {choice.subgraph_id: choice.trace for choice in choices}
    traces = {
        name: trace_of[row["subgraph_id"]]
        for row in tables.read(shape.files.subgraphs, SUBGRAPHS).select(["subgraph_id", "functions"]).to_pylist()
        if trace_of[row["subgraph_id"]]
        for name in row["functions"]
    }
    chosen = built.folder / "traces.json"
    chosen.write_text(json.dumps(traces))
    return built.order(chosen)


class Righted:
    """One shape's library, brought to compute what it should: what nobody checked gives way where it is wrong."""

    def __init__(
        self,
        shape: Shape,
        built: Built,
        subgraphs: Sequence[Mapping[str, Any]],
        so_far: History,
        config: CompileConfig,
        pool: Pool,
        target: AnyTarget,
    ) -> None:
        own = set(tables.read(shape.files.subgraphs, SUBGRAPHS)["subgraph_id"].to_pylist())
        self._shape, self._built, self._so_far = shape, built, so_far
        self._own = [row for row in subgraphs if row["subgraph_id"] in own]
        self._config, self._pool, self._target = config, pool, target

    def verified(
        self, choices: Sequence[Choice], peer: Peer, failure: str = ""
    ) -> tuple[dict[str, Any], Sequence[Choice]]:
        """Facts of it (see `verification.verify`; the untuned model is not run beside it), and the choices of all
        subgraphs with which they hold.

        Args:
            failure: Why it could not be built, if so.

        Raises:
            CompilationError, VerificationError: It does not work with checked programs either.
        """
        try:
            self._require_built(failure)
            return self._verify(peer), choices
        except (CompilationError, VerificationError):
            of = {choice.subgraph_id: choice for choice in choices}
            before = [of[row["subgraph_id"]] for row in self._own]
            right = without_wrong(before, self._own, self._so_far, self._config, self._pool)
            if [each.trace for each in right] == [each.trace for each in before]:
                raise
        of |= {choice.subgraph_id: choice for choice in right}
        choices = [of[choice.subgraph_id] for choice in choices]
        self._build(order_of(self._shape, self._built, choices))
        self._built.shared.unlink(missing_ok=True)  # it is of the library before
        limits = self._config
        building.pack(self._built.order_to_pack(), memory_share=limits.memory_share, timeout_s=limits.build_timeout_s)
        return self._verify(peer), choices

    def _verify(self, peer: Peer) -> dict[str, Any]:
        def check(library: Path) -> None:
            if not library.exists():
                self._build(self._built.in_plain_loops(library))

        peer.infer(self._built.inputs, self._built.peer_outputs)
        try:
            return verify(self._built, _UNKNOWN, self._config, self._pool, peer, None, check)
        except VerificationError as error:
            raise VerificationError(f"With {probing.told(self._shape.extents)}: {error}") from error

    def _build(self, order: BuildModel) -> None:
        limits = self._config
        failed = building.build_all(
            [order], self._target, memory_share=limits.memory_share, timeout_s=limits.build_timeout_s
        )
        self._require_built(failed.get(order.library, ""))

    def _require_built(self, failure: str) -> None:
        if failure:
            raise building.failure(f"The model could not be compiled for {self._shape.name}", failure)
