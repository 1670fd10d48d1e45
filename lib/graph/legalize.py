"""Functions in TIR where TVM's own legalisation calls libm, which LLVM cannot vectorise; and extrema of infinities.

On the machine where this was measured, a call of `erff` takes 11 ns an element, the rational function of
`topi.fast_erf` 0.12 ns; its absolute error is 3.3e-7 at most (`tanh` 2.4e-7; `exp` has a relative one of 8e-8 for
|x| <= 5, growing to 4.1e-6 towards 88; `sin` and `cos` 1e-7; `log` a relative one of 1.8e-7). Vendors' libraries do the
same.
"""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial

import tvm
from tvm import relax, te, tirx, topi
from tvm.relax import transform

from lib.graph import patterns
from lib.graph.rewrite import dtype, static_shape
from lib.tir import lookup

_FLOATS = ("float16", "float32", "float64")
_SINE = [(-1) ** n / math.factorial(2 * n + 1) for n in (4, 3, 2, 1)]  # of powers of a square, after the first term
_COSINE = [(-1) ** n / math.factorial(2 * n) for n in (5, 4, 3, 2, 1)]

_LOGARITHM = [2 / n for n in (11, 9, 7, 5, 3)]  # of powers of a square, after the first term
_MANTISSA_BITS, _TWO_THIRDS, _LEAST_NORMAL = 23, 0x3F2AAAAB, 2.0**-126

Legalization = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def legalize_ops() -> tvm.transform.Pass:
    """TVM's LegalizeOps with the functions of this module in place of its own."""
    ours = {
        f"relax.{name}": _ours(f"relax.{name}", make, _FLOATS if name in ("max", "min") else ("float32",))
        for name, make in _MAKE.items()
    }
    return transform.LegalizeOps({**ours, "relax.take": _take})


def _constant(value: float) -> tirx.FloatImm:
    return tirx.const(value, "float32")


_EIGHTH = _constant(0.8)  # more than an eighth of a circle, which is the most that is left


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


def _sine(x: te.Tensor, quarters: int) -> te.Tensor:
    """sin(x + quarters pi / 2): what is left of x after quarters of a circle, by Taylor's polynomials. Quarters are
    taken away in double precision, so that the absolute error is 1e-7 up to |x| of 1e9. Beyond that neighbouring floats
    are ten circles apart and more, and this is some value of a sine."""

    def of(*index: tirx.Var) -> tirx.Expr:
        wide = x(*index).astype("float64")
        turns = tirx.nearbyint(wide * tirx.const(2 / math.pi, "float64"))
        rest = (wide - turns * tirx.const(math.pi / 2, "float64")).astype("float32")
        rest = tirx.Select(rest > _EIGHTH, _EIGHTH, tirx.Select(rest < -_EIGHTH, -_EIGHTH, rest))
        square, quarter = rest * rest, turns.astype("int32") + quarters
        sine = rest + rest * square * _polynomial(square, _SINE)
        cosine = _constant(1) + square * _polynomial(square, _COSINE)
        found = tirx.Select((quarter & 1) == 1, cosine, sine)
        return tirx.Select((quarter & 2) == 2, -found, found)

    return te.compute(x.shape, of, name="sine", tag=topi.tag.ELEMWISE)


def _logarithm(x: te.Tensor) -> te.Tensor:
    """log(x) = k log 2 + log(m) for x = 2^k m, m in [2/3, 4/3), and log(m) = 2 artanh((m - 1) / (m + 1)) by its series.
    Whether a number is one of those that have none is told by its bits, which TVM does not simplify."""

    def of(*index: tirx.Var) -> tirx.Expr:
        given, integer = x(*index), partial(tirx.const, dtype="int32")
        is_small = given < _constant(_LEAST_NORMAL)
        normal = tirx.Select(is_small, given * _constant(2.0**_MANTISSA_BITS), given)
        bits = tirx.reinterpret("int32", normal)
        power = (bits - integer(_TWO_THIRDS)) >> _MANTISSA_BITS
        mantissa = tirx.reinterpret("float32", bits - (power << _MANTISSA_BITS))
        ratio = (mantissa - _constant(1)) / (mantissa + _constant(1))
        square = ratio * ratio
        of_mantissa = ratio * _constant(2) + ratio * square * _polynomial(square, _LOGARITHM)
        shift = tirx.Select(is_small, integer(_MANTISSA_BITS), integer(0))
        found = (power - shift).astype("float32") * _constant(math.log(2)) + of_mantissa
        sign_and_all = tirx.reinterpret("int32", given)
        found = tirx.Select(sign_and_all < integer(0), tirx.reinterpret("float32", integer(0x7FC00000)), found)
        found = tirx.Select((sign_and_all & integer(0x7FFFFFFF)) == integer(0), _constant(-math.inf), found)
        return tirx.Select(sign_and_all >= integer(0x7F800000), given, found)  # infinity, and what is not a number

    return te.compute(x.shape, of, name="logarithm", tag=topi.tag.ELEMWISE)


def _polynomial(x: tirx.Expr, coefficients: Sequence[float]) -> tirx.Expr:
    first, *others = map(_constant, coefficients)
    for each in others:
        first = first * x + each
    return first


def _isnan(x: te.Tensor) -> te.Tensor:
    """Compares bits: TVM's own keeps the loops around it from being vectorised, and x != x is simplified to false."""

    def of(*index: tirx.Var) -> tirx.Expr:
        bits = tirx.reinterpret("int32", x(*index)) & tirx.const(0x7FFFFFFF, "int32")
        return bits > tirx.const(0x7F800000, "int32")

    return te.compute(x.shape, of, name="isnan", tag=topi.tag.ELEMWISE)


def _extremum(call: relax.Call, combine: Callable[[tirx.Expr, tirx.Expr], tirx.Expr], start: float) -> "_Function":
    """Largest or smallest along axes. TVM's own begins with the largest finite number: of nothing but infinities, as
    masks of attention have them, it makes that. The price: `rfactor` knows no other beginning, so a maximum over rows
    is not split into vectors.
    """
    reducer = te.comm_reducer(combine, lambda dtype: tirx.const(start, dtype), name=call.op.name.rpartition(".")[2])

    def of(x: te.Tensor) -> te.Tensor:
        given = range(x.ndim) if call.attrs.axis is None else call.attrs.axis
        axes = {int(axis) % x.ndim for axis in given}
        turns = {axis: te.reduce_axis((0, x.shape[axis]), name=f"k{axis}") for axis in sorted(axes)}
        kept = [axis for axis in range(x.ndim) if call.attrs.keepdims or axis not in axes]

        def at(*index: tirx.Var) -> tirx.Expr:
            place = dict(zip(kept, index, strict=True)) | turns
            return reducer(x(*(place[axis] for axis in range(x.ndim))), axis=list(turns.values()))

        shape = [1 if axis in axes else x.shape[axis] for axis in kept]
        return te.compute(shape, at, name=f"{x.op.name}_red", tag=topi.tag.COMM_REDUCE)

    return of


_Function = Callable[[te.Tensor], te.Tensor]

# Makes the function that computes a call, from its attributes.
_MAKE: dict[str, Callable[[relax.Call], _Function]] = {
    "erf": lambda call: topi.fast_erf,
    "exp": lambda call: topi.fast_exp,
    "tanh": lambda call: topi.fast_tanh,
    "log": lambda call: _logarithm,
    "isnan": lambda call: _isnan,
    "sin": lambda call: partial(_sine, quarters=0),
    "cos": lambda call: partial(_sine, quarters=1),
    "sigmoid": lambda call: _sigmoid,
    "nn.silu": lambda call: lambda x: topi.multiply(x, _sigmoid(x)),
    "nn.gelu": lambda call: _gelu,
    "nn.gelu_tanh": lambda call: _gelu_tanh,
    "max": lambda call: _extremum(call, lambda a, b: tirx.Max(a, b), -math.inf),
    "min": lambda call: _extremum(call, lambda a, b: tirx.Min(a, b), math.inf),
    "nn.softmax": lambda call: partial(topi.nn.fast_softmax, axis=int(call.attrs.axis)),
}


def _ours(name: str, make: Callable[[relax.Call], _Function], dtypes: Collection[str]) -> Legalization:
    """Ours for these types of elements, TVM's for all others."""

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if dtype(call.args[0]) not in dtypes:
            return tvm.ir.Op.get(name).get_attr("FLegalize")(builder, call)
        return builder.call_te(make(call), call.args[0], primfunc_name_hint=name.rpartition(".")[2])

    return legalize


def _take(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """From tables of all bytes (`lib.graph.lookups`) by each byte, which may be the end of another kernel."""
    table, at = call.args
    if dtype(table) != "uint8" or static_shape(table) != (lookup.VALUES,) or dtype(at) != "uint8":
        return tvm.ir.Op.get("relax.take").get_attr("FLegalize")(builder, call)
    attrs = patterns.marks(patterns.ELEMENTWISE)
    return builder.call_te(lookup.looked_up, table, at, primfunc_name_hint=lookup.FUNCTION, primfunc_attrs=attrs)
