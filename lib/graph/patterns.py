"""What FuseOps may do with TIR functions that this project writes: a mark on each, turned into TVM's `op_pattern`.

AnnotateTIROpPattern classifies functions by their blocks, and gets these wrong: it takes a shifted write for more than
element-wise, and a function of several blocks for opaque. It leaves an `op_pattern` that it finds, but for the value 0
(element-wise), so that marks of our own have to wait until it is through.
"""

import tvm
from tvm import tirx

# relax.OpPatternKind: what an epilogue is; what is joined with its like; what takes an epilogue; none of these.
ELEMENTWISE, INJECTIVE, OUT_ELEMENTWISE, OPAQUE = 0, 2, 4, 8
_MARK = "fusion_pattern"


def marks(pattern: int) -> dict[str, tirx.IntImm]:
    """Attributes of a function that FuseOps is to take for a pattern."""
    return {_MARK: tirx.IntImm("int32", pattern)}


def marked(function: tirx.PrimFunc) -> int | None:
    """The pattern that a function was marked with; None if it was not."""
    pattern = (function.attrs or {}).get(_MARK)
    return None if pattern is None else int(pattern)


def apply_marks(module: tvm.IRModule) -> tvm.IRModule:
    """Have FuseOps see the marks, and drop them; after AnnotateTIROpPattern."""
    functions = dict(module.functions_items())
    for gvar, function in module.functions_items():
        pattern = marked(function) if isinstance(function, tirx.PrimFunc) else None
        if pattern is not None:
            functions[gvar] = function.without_attr(_MARK).with_attr("op_pattern", pattern)
    return tvm.IRModule(functions, attrs=module.attrs)
