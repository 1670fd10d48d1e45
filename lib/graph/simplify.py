"""Graph optimisations of an imported model, before it is partitioned into subgraphs."""

import tvm
from tvm import relax
from tvm.relax import transform

from lib.graph import unread
from lib.graph.rewrite import CHANNELS_LAST, is_call, rewrite
from lib.graph.rules import (
    arithmetic,
    attention,
    branches,
    constants,
    convolution,
    formulas,
    joins,
    layouts,
    modulation,
    movement,
    normalization,
    pooling,
    products,
    quantization,
    resizing,
    shuffling,
    sums,
    transposed,
    volumes,
)

RULES = [
    *constants.RULES,
    *formulas.RULES,
    *arithmetic.RULES,
    *products.RULES,
    *attention.RULES,  # before movement, which would rewrite the patterns that they match
    *movement.RULES,
    *normalization.RULES,
    *transposed.RULES,
    *modulation.RULES,
    *convolution.RULES,
    *sums.RULES,
    *branches.RULES,
    *volumes.RULES,
    *pooling.RULES,
    *joins.RULES,
    *resizing.RULES,
]


def simplify(module: tvm.IRModule) -> tvm.IRModule:
    """A module that computes the same with fewer operators, of tensors without what nobody reads; weights must be
    constants of `main`."""
    simpler = rewrite(module, RULES)
    narrower = unread.left_out(simpler)
    return simpler if narrower is simpler else rewrite(narrower, RULES)


def in_integers(module: tvm.IRModule) -> tvm.IRModule:
    """What stands between `dequantize` and `quantize` in integers, where it can be; before `simplify`."""
    if not _calls(module, "relax.dequantize"):
        return module
    for rules in (quantization.INTEGERS, quantization.BETWEEN, quantization.PLAIN):
        module = rewrite(module, rules)
    return module


def _calls(module: tvm.IRModule, operator: str) -> bool:
    found = []
    for _, function in module.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, lambda expr: found.append(is_call(expr, operator)))
    return any(found)


def channels_last(module: tvm.IRModule) -> tvm.IRModule:
    """Convolutions in NHWC with HWIO weights, NWC with WIO, or NDHWC with DHWIO; the transposed weights are folded.

    Simplify before: TVM 0.27's ConvertLayout crashes on what an unfolded batch norm leaves (`var + eps`). It also fails
    on operators that have nothing to do with convolutions, so models without any are spared.
    """
    wanted = {name: [*layouts] for name, layouts in CHANNELS_LAST.items() if _calls(module, name)}
    if wanted:
        module = transform.ConvertLayout(wanted)(rewrite(module, layouts.BEFORE))
        module = rewrite(module, [*layouts.AFTER, *RULES])
    else:
        module = rewrite(simplify(module), [layouts.sample_channels_last, *RULES])
    module = rewrite(module, [*layouts.LAST, *(shuffling.RULES if wanted else [])])
    return simplify(attention.merge_projections(module))
