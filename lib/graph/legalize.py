"""Functions in TIR where TVM's own legalisation calls libm, which LLVM cannot vectorise; and extrema of infinities.

On the machine where this was measured, a call of `erff` takes 11 ns an element, the rational function of
`topi.fast_erf` 0.12 ns; its absolute error is 3.3e-7 at most (`tanh` 2.4e-7; `exp` has a relative one of 8e-8 for
|x| <= 5, growing to 4.1e-6 towards 88; `sin` and `cos` 1e-7). Vendors' libraries do the same.
Logarithms stay calls until loops are vectors (`lib.tir.logarithm`). TVM's log softmax calls libm for exponentials, too.
"""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial

import tvm
import tvm_ffi
from tvm import relax, te, tirx, topi
from tvm.relax import transform
from tvm.s_tir import SBlock

from lib.graph import patterns
from lib.graph.rewrite import dtype, static_shape
from lib.tir import analysis, extrema, lookup

_FLOATS = ("float16", "float32", "float64")
_SINE = [(-1) ** n / math.factorial(2 * n + 1) for n in (4, 3, 2, 1)]  # of powers of a square, after the first term
_COSINE = [(-1) ** n / math.factorial(2 * n) for n in (5, 4, 3, 2, 1)]

_ENDS = ("red", "red_temp", "sum", "mean", "var_sum")  # of TOPI's names of blocks, after a tensor's name

Legalization = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def legalize_ops() -> tvm.transform.Pass:
    """TVM's LegalizeOps with the functions of this module in place of its own."""
    ours = {
        f"relax.{name}": _ours(f"relax.{name}", make, _FLOATS if name in ("max", "min") else ("float32",))
        for name, make in _MAKE.items()
    }
    named = tvm.transform.module_pass(lambda module, _: _named_by_place(module), opt_level=0, name="named_by_place")
    return tvm.transform.Sequential([transform.LegalizeOps({**ours, "relax.take": _take}), named])


def _named_by_place(module: tvm.IRModule) -> tvm.IRModule:
    """TOPI names the blocks of reductions and norms after the tensor that they read, which has a number of the model's
    variables: `lv23_red`. The same mean of another model would be another workload, since traces name blocks. Here
    they say which parameter of the function it is: `x0_red`."""
    functions = {
        gvar: _by_place(function) if isinstance(function, tirx.PrimFunc) else function
        for gvar, function in module.functions_items()
    }
    return tvm.IRModule(functions, attrs=module.attrs)


def _by_place(function: tirx.PrimFunc) -> tirx.PrimFunc:
    places = {f"{param.name}_{end}": f"x{n}_{end}" for n, param in enumerate(function.params) for end in _ENDS}

    def named(block: SBlock) -> SBlock:
        name = str(block.name_hint)
        return analysis.block_with(block, name_hint=places[name]) if name in places else block

    body = tvm_ffi.structural_map(function.body, (SBlock, named))
    return tirx.PrimFunc(function.params, body, function.ret_type, attrs=function.attrs)


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


def _extremum(call: relax.Call, reducer: Callable[..., tirx.Expr]) -> "_Function":
    """Largest or smallest along axes, of infinities as well (`lib.tir.extrema`)."""

    def of(x: te.Tensor) -> te.Tensor:
        given = range(x.ndim) if call.attrs.axis is None else call.attrs.axis
        axes = {int(axis) % x.ndim for axis in given}
        turns = {axis: te.reduce_axis((0, x.shape[axis]), name=f"k{axis}") for axis in sorted(axes)}
        kept = [axis for axis in range(x.ndim) if call.attrs.keepdims or axis not in axes]

        def at(*index: tirx.Var) -> tirx.Expr:
            place = dict(zip(kept, index, strict=True)) | turns
            return reducer(x(*(place[axis] for axis in range(x.ndim))), axis=list(turns.values()))

        shape = [1 if axis in axes else x.shape[axis] for axis in kept]
        marks = {extrema.MARK: 1}
        return te.compute(shape, at, name=f"{x.op.name}_red", tag=topi.tag.COMM_REDUCE, attrs=marks)

    return of


def _log_softmax(x: te.Tensor, axis: int) -> te.Tensor:
    """x - log(sum(exp(x))) along an axis, as the softmax is computed: less the largest first, with exponentials in
    vectors; and one logarithm for each sum."""
    axis %= x.ndim
    kept = [extent for n, extent in enumerate(x.shape) if n != axis]

    def without(at: Sequence[tirx.Var]) -> list[tirx.Var]:
        return [*at[:axis], *at[axis + 1 :]]

    def reduced(of: Callable[..., tirx.Expr], values: te.Tensor, name: str) -> te.Tensor:
        turn = te.reduce_axis((0, x.shape[axis]), name="k")
        return te.compute(kept, lambda *at: of(values(*at[:axis], turn, *at[axis:]), axis=turn), name=name)

    largest = reduced(te.max, x, "log_softmax_max")
    less = te.compute(x.shape, lambda *at: x(*at) - largest(*without(at)), name="log_softmax_less")
    total = reduced(te.sum, topi.fast_exp(less), "log_softmax_sum")
    logarithm = te.compute(kept, lambda *at: tirx.log(total(*at)), name="log_softmax_log")
    return te.compute(x.shape, lambda *at: less(*at) - logarithm(*without(at)), name="log_softmax")


_Function = Callable[[te.Tensor], te.Tensor]

# Makes the function that computes a call, from its attributes.
_MAKE: dict[str, Callable[[relax.Call], _Function]] = {
    "erf": lambda call: topi.fast_erf,
    "exp": lambda call: topi.fast_exp,
    "tanh": lambda call: topi.fast_tanh,
    "isnan": lambda call: _isnan,
    "sin": lambda call: partial(_sine, quarters=0),
    "cos": lambda call: partial(_sine, quarters=1),
    "sigmoid": lambda call: _sigmoid,
    "nn.silu": lambda call: lambda x: topi.multiply(x, _sigmoid(x)),
    "nn.gelu": lambda call: _gelu,
    "nn.gelu_tanh": lambda call: _gelu_tanh,
    "max": lambda call: _extremum(call, te.max),
    "min": lambda call: _extremum(call, te.min),
    "nn.softmax": lambda call: partial(topi.nn.fast_softmax, axis=int(call.attrs.axis)),
    "nn.log_softmax": lambda call: partial(_log_softmax, axis=int(call.attrs.axis)),
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
