"""A few rows times the weights of an exported program in halves or bf16: they are read as they were."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax

from lib.graph import few_bits


def converters(program: Any, lanes: int) -> dict[str, Callable[[Any, Any], relax.Expr]]:
    """Of linear layers of a program that was widened.

    Args:
        lanes: Of a vector of the target.
    """

    def linear(node: Any, importer: Any) -> relax.Expr:
        x, weight, *bias = node.args
        matrix = _narrow(program, x, weight)
        if matrix is None:
            return importer._linear(node)
        emit = importer.block_builder.emit
        found = emit(few_bits.emit_halves(importer.block_builder, importer.env[x], matrix, lanes))
        return emit(relax.op.add(found, importer.env[bias[0]])) if bias and bias[0] is not None else found

    return {"linear.default": linear}


def _narrow(program: Any, x: Any, weight: Any) -> np.ndarray | None:
    """A layer's weights, (k, n), as they were; None where they are not to be read so."""
    name = program.graph_signature.inputs_to_parameters.get(weight.name)
    if name is None:
        return None
    short = few_bits.in_halves(program.state_dict[name].numpy(force=True), math.prod(x.meta["val"].shape[:-1]))
    return None if short is None else np.ascontiguousarray(short.T)
