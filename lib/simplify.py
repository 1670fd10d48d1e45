"""Clean up an imported graph before it is cut into subgraphs: what a vendor's graph optimiser would remove."""

import tvm
from tvm.relax import transform

from lib.rewrite import rewrite
from lib.rules import arithmetic, attention, constants, convolution, movement, normalization

RULES = [
    *constants.RULES,
    *arithmetic.RULES,
    *attention.RULES,  # before movement, which would rewrite what they look for
    *movement.RULES,
    *normalization.RULES,
    *convolution.RULES,
]


def simplify(module: tvm.IRModule) -> tvm.IRModule:
    """A module that computes the same with fewer operators; weights must be constants of `main`."""
    return rewrite(module, RULES)


def channels_last(module: tvm.IRModule) -> tvm.IRModule:
    """Convolutions in NHWC with HWIO weights; the transposed weights are folded.

    Simplify before: TVM 0.27's ConvertLayout crashes on what an unfolded batch norm leaves (`var + eps`).
    """
    module = simplify(transform.ConvertLayout({"relax.nn.conv2d": ["NHWC", "HWIO"]})(module))
    return simplify(attention.merge_projections(module))
