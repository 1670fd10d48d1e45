"""Transcendental functions in TIR that LLVM can vectorise, where TVM's own legalisation calls libm.

On the machine where this was measured, a call of `erff` takes 11 ns an element, the rational function of
`topi.fast_erf` 0.12 ns; its absolute error is 3.3e-7 at most (`tanh` 2.4e-7; `exp` has a relative one of 8e-8 for
|x| <= 5, growing to 4.1e-6 towards 88). Vendors' libraries do the same.
"""

import math
from collections.abc import Callable
from functools import partial

import tvm
from tvm import relax, te, tirx, topi
from tvm.relax import transform

from lib.graph.rewrite import dtype

Legalization = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def legalize_ops() -> tvm.transform.Pass:
    """TVM's LegalizeOps with the functions of this module in place of its own."""
    return transform.LegalizeOps({f"relax.{name}": _in_float32(f"relax.{name}", make) for name, make in _MAKE.items()})


def _constant(value: float) -> tirx.FloatImm:
    return tirx.const(value, "float32")


def _gelu(x: te.Tensor) -> te.Tensor:
    half = _constant(0.5)
    return topi.multiply(
        x, topi.add(topi.multiply(topi.fast_erf(topi.multiply(x, _constant(math.sqrt(0.5)))), half), half)
    )


def _gelu_tanh(x: te.Tensor) -> te.Tensor:
    cube = topi.multiply(topi.multiply(x, x), x)
    inner = topi.multiply(topi.add(x, topi.multiply(cube, _constant(0.044715))), _constant(math.sqrt(2 / math.pi)))
    half = _constant(0.5)
    return topi.multiply(x, topi.add(topi.multiply(topi.fast_tanh(inner), half), half))


def _sigmoid(x: te.Tensor) -> te.Tensor:
    return topi.divide(_constant(1), topi.add(topi.fast_exp(topi.negative(x)), _constant(1)))


def _isnan(x: te.Tensor) -> te.Tensor:
    """Compares bits: TVM's own keeps the loops around it from being vectorised, and x != x is simplified to false."""

    def of(*index: tirx.Var) -> tirx.Expr:
        bits = tirx.reinterpret("int32", x(*index)) & tirx.const(0x7FFFFFFF, "int32")
        return bits > tirx.const(0x7F800000, "int32")

    return te.compute(x.shape, of, name="isnan", tag=topi.tag.ELEMWISE)


_Function = Callable[[te.Tensor], te.Tensor]

# Makes the function that computes a call, from its attributes.
_MAKE: dict[str, Callable[[relax.Call], _Function]] = {
    "erf": lambda call: topi.fast_erf,
    "exp": lambda call: topi.fast_exp,
    "tanh": lambda call: topi.fast_tanh,
    "isnan": lambda call: _isnan,
    "sigmoid": lambda call: _sigmoid,
    "nn.silu": lambda call: lambda x: topi.multiply(x, _sigmoid(x)),
    "nn.gelu": lambda call: _gelu,
    "nn.gelu_tanh": lambda call: _gelu_tanh,
    "nn.softmax": lambda call: partial(topi.nn.fast_softmax, axis=int(call.attrs.axis)),
}


def _in_float32(name: str, make: Callable[[relax.Call], _Function]) -> Legalization:
    """Ours for float32, TVM's for all else."""

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if dtype(call.args[0]) != "float32":
            return tvm.ir.Op.get(name).get_attr("FLegalize")(builder, call)
        return builder.call_te(make(call), call.args[0], primfunc_name_hint=name.rpartition(".")[2])

    return legalize
