"""The process that compiles a whole model, or packs its weights, started by `building`."""

import json

from tvm.target import Target

from lib import deploy, packing
from lib.measure.connection import Connection
from lib.measure.protocol import BuildModel, Done, PackWeights
from lib.tir import lowering
from lib.tir.workload import load_module


class Builder:
    """Compiles for one target."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def build(self, request: BuildModel) -> Done:
        """See `BuildModel`."""
        module = load_module(request.module.read_text())
        if request.in_plain_loops:
            module = lowering.reference(module, self._target)
        traces = json.loads(request.traces.read_text()) if request.traces else {}
        deploy.build(module, traces, self._target, request.library, request.packing)
        return Done()

    def pack(self, request: PackWeights) -> Done:
        """See `PackWeights`."""
        packing.write(request.out, request.packings, request.weights, self._target, request.listed)
        return Done()


def main(descriptor: int, target_text: str) -> None:
    """Answer requests until the parent closes the socket."""
    connection, builder = Connection(descriptor), Builder(Target(target_text))
    connection.serve({BuildModel: builder.build, PackWeights: builder.pack})
