"""Products with constant matrices along an axis of a tensor, in Relax."""

from collections.abc import Callable

import numpy as np
from tvm import relax

Emit = Callable[[relax.Expr], relax.Var]


def along(
    emit: Emit, x: relax.Expr, axis: int, matrix: np.ndarray, *, complex_in: bool = False, complex_out: bool = False
) -> relax.Expr:
    """A product with a matrix along an axis, and along that of real and imaginary parts, where there is one.

    Args:
        matrix: rows x columns; of complex numbers with an axis of two behind either, as `lib.models.torch_complex` has
            them.
    """
    rank = x.ty.ndim - complex_in
    order = [*(n for n in range(rank) if n != axis), axis, *([rank] if complex_in else [])]
    last = emit(relax.op.permute_dims(x, order)) if order != sorted(order) else x
    if complex_in:
        outer = [int(n) for n in last.ty.shape][: rank - 1]
        last = emit(relax.op.reshape(last, (*outer, 2 * matrix.shape[0])))
    flat = matrix.reshape(int(np.prod(matrix.shape[: 1 + complex_in])), -1)
    made = emit(relax.op.matmul(last, relax.const(flat.astype(np.float32))))
    if complex_out:
        made = emit(relax.op.reshape(made, (*[int(n) for n in made.ty.shape][:-1], matrix.shape[-2], 2)))
    back = [*range(axis), rank - 1, *range(axis, rank - 1), *([rank] if complex_out else [])]
    return emit(relax.op.permute_dims(made, back)) if back != sorted(back) else made
