import tvm
from tvm import relax, te
from tvm.relax import op

from lib.graph import fusion, patterns
from lib.tir.workload import as_workload


def halved(name, **attrs):
    """matmul(x, w), of which a function by that name takes half of the columns, in stretches of four, and ReLU."""
    x, w = (relax.Var(name, relax.TensorType((16, 16), "float32")) for name in "xw")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            wide = builder.emit(op.matmul(x, w))
            half = builder.call_te(
                lambda wide: te.compute((16, 8), lambda i, j: wide[i, j // 4 * 8 + j % 4]),
                wide,
                primfunc_name_hint=name,
                **attrs,
            )
            out = builder.emit_output(op.nn.relu(builder.emit(half)))
        builder.emit_func_output(out)
    return builder.get()


def kernels(module, cpu):
    fused = fusion.fuse(module, cpu.tvm())
    return {str(gvar.name_hint): f for gvar, f in fused.functions_items() if isinstance(f, tvm.tirx.PrimFunc)}


def test_a_mark_decides_what_is_fused_and_is_gone_afterwards(cpu):
    marks = patterns.marks(patterns.ELEMENTWISE)

    found = kernels(halved("anything", primfunc_attrs=marks), cpu)

    assert len(found) == 1
    assert all(patterns.marked(function) is None for function in found.values())


def test_a_functions_name_decides_nothing(cpu):
    for name in ("cut", "place", "alone_place", "join_placed", "conv2d_winograd"):
        assert len(kernels(halved(name), cpu)) == len(kernels(halved("anything"), cpu)) == 2, name


def test_a_function_that_is_marked_opaque_stays_alone(cpu):
    marks = patterns.marks(patterns.OPAQUE)

    assert len(kernels(halved("anything", primfunc_attrs=marks), cpu)) == 3


def test_a_mark_is_read_back():
    function = as_workload(te.create_prim_func([x := te.placeholder((4,)), te.compute((4,), lambda i: x[i] + 1)]))[
        "main"
    ]

    assert patterns.marked(function) is None
    assert patterns.marked(function.with_attrs(patterns.marks(patterns.OUT_ELEMENTWISE))) == patterns.OUT_ELEMENTWISE
