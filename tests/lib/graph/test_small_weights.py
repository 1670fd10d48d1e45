from tvm import relax
from tvm.relax import op

from lib.graph.legalize import legalize_ops
from lib.graph.small_weights import marked, noted
from lib.tir import small_weights


def two_products():
    """x @ w and x @ v, of bytes of the same shapes, which are one function in TIR."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "uint8"))
    w, v = (relax.Var(name, relax.TensorType((8, 6), "int8")) for name in ("w", "v"))
    with builder.function("main", [x, w, v]):
        with builder.dataflow():
            sums = [builder.emit(op.matmul(x, weight, out_dtype="int32")) for weight in (w, v)]
            out = builder.emit_output(op.add(*sums))
        builder.emit_func_output(out)
    return builder.get()


def bounds_of_calls(module):
    """Of the functions that read `w` and `v`, what is known of their weights."""
    calls = {}

    def visit(expr):
        if isinstance(expr, relax.Call) and expr.op.name == "relax.call_tir":
            for argument in expr.args[1].fields:
                if isinstance(argument, relax.Var) and str(argument.name) in ("w", "v"):
                    calls[str(argument.name)] = small_weights.bounds(module[expr.args[0]])

    relax.analysis.post_order_visit(module["main"], visit)
    return calls


def test_what_reads_weights_that_were_noted_is_marked_and_the_same_function_of_others_is_not():
    module = legalize_ops()(noted(two_products(), {"w": 2}))

    assert bounds_of_calls(module) == {"w": {}, "v": {}}
    assert bounds_of_calls(marked(module)) == {"w": {1: small_weights.largest(2)}, "v": {}}


def test_each_has_its_own_mark():
    module = legalize_ops()(noted(two_products(), {"w": 2, "v": 1}))

    assert bounds_of_calls(marked(module)) == {"w": {1: small_weights.largest(2)}, "v": {1: small_weights.largest(1)}}


def test_without_a_note_a_module_stays_the_same():
    module = legalize_ops()(two_products())

    assert marked(module) is module
