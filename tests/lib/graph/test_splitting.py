"""Products of floats as three or six of bf16: how exact, of what, and by which programs; run untuned, so on any CPU."""

import ml_dtypes
import numpy as np
import pytest
from tvm.relax import op

from lib.contracts.errors import TargetError
from lib.graph import fusion, splitting
from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from lib.graph.subgraphs import extract_subgraphs
from lib.machine import targets
from lib.machine.dots import AMX_BF16
from lib.search import evolution
from lib.search.spaces import contraction
from lib.tir import analysis, prefetch, traces
from lib.tir.workload import load_module
from tests.helpers import run_on
from tests.lib.graph.rules.helpers import const, module, operators, random, run
from tests.lib.tir.test_prefetch import lines, prefetched, reads

NARROW = 2.0**-8  # to which bf16 rounds; sums of three products have 2**-16
TYPICAL = {2: 2.0**-19, 3: 2.0**-21}  # errors over the largest output, by parts of a float
AMX = targets.cpu_target('{"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "sapphirerapids", "num-cores": 2}')
LINE = 32  # elements of bf16


@pytest.fixture
def few(monkeypatch):
    """Six products are made for as few as three are."""
    for limits in (splitting._LEAST, splitting._SHALLOWEST, splitting._SMALLEST):
        monkeypatch.setitem(limits, 3, limits[2])


def product(x, columns=64):
    return op.matmul(x, const(random((64, columns), 1)))


def conv(x, channels=16, columns=64, size=3, groups=1, **attrs):
    """Of so many channels, in each group."""
    weight = const(random((size, size, channels, columns), 1))
    return op.nn.conv2d(x, weight, groups=groups, data_layout="NHWC", kernel_layout="HWIO", **attrs)


def signal(x):
    weight = const(random((5, 24, 64), 1))
    return op.nn.conv1d(x, weight, padding=[2, 1], data_layout="NWC", kernel_layout="WIO")


def volume(x):
    weight = const(random((2, 3, 3, 8, 64), 1))
    return op.nn.conv3d(x, weight, strides=(1, 2, 1), padding=1, data_layout="NDHWC", kernel_layout="DHWIO")


COMPUTED = {
    "a product": (product, (2, 16, 64)),
    "a convolution": (conv, (1, 6, 7, 16)),
    "with a border": (lambda x: conv(x, padding=[1, 0, 1, 1]), (1, 6, 7, 16)),
    "in steps": (lambda x: conv(x, padding=1, strides=2), (1, 9, 16, 16)),
    "of pixels apart": (lambda x: conv(x, padding=2, dilation=2), (1, 6, 7, 16)),
    "of single pixels": (lambda x: conv(x, size=1), (2, 6, 7, 16)),
    "of a signal": (signal, (1, 19, 24)),
    "of a volume": (volume, (1, 3, 6, 7, 8)),
    "of three blocks of channels": (lambda x: conv(x, 80, size=1), (1, 6, 7, 80)),
    "of groups": (lambda x: conv(x, 24, 64, groups=2), (1, 6, 7, 48)),
    "of groups that are merged": (lambda x: conv(x, 4, 32, groups=8), (1, 6, 7, 32)),
    "of groups with zeros": (lambda x: conv(x, 36, 64, groups=2), (1, 6, 7, 72)),
    "of blocks with zeros": (lambda x: conv(x, 116, size=1), (1, 6, 7, 116)),
}


def split(build, shape, parts=2):
    model = fusion.lift_constants(module(build, shape))
    return model, splitting.split(model, AMX_BF16, parts)


@pytest.mark.parametrize("parts", TYPICAL)
@pytest.mark.parametrize(("build", "shape"), COMPUTED.values(), ids=COMPUTED)
def test_results_are_those_of_floats_but_for_the_products_of_rests(build, shape, parts, few, cpu):
    x = random(shape)
    [expected] = run(module(build, shape), x)
    _, found = split(build, shape, parts)

    [y] = run(fusion.fuse(found.module, cpu.tvm()), x, *found.weights.values())

    assert {value.dtype for value in found.weights.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert np.abs(y - expected).max() < NARROW**2 * np.abs(expected).max()
    assert np.sqrt(np.square(y - expected).mean()) < TYPICAL[parts] * np.abs(expected).max()


def test_results_of_one_product_of_bf16_are_not_that_exact():
    x, w = random((32, 64)), random((64, 64), 1)
    rounded = [each.astype(ml_dtypes.bfloat16).astype(np.float32) for each in (x, w)]

    assert np.abs(np.matmul(*rounded) - x @ w).max() > 50 * NARROW**2 * np.abs(x @ w).max()


@pytest.mark.parametrize(("parts", "more"), [(2, 1), (3, 1.5)])
def test_weights_take_as_many_bytes_as_before_or_half_as_many_more(parts, more, few):
    before, found = split(lambda x: conv(x, 64), (1, 6, 7, 64), parts)

    assert [w.nbytes for w in found.weights.values()] == [more * w.nbytes for w in before.weights.values()]


@pytest.mark.parametrize(
    ("build", "shape", "why"),
    [
        (lambda x: conv(x, 8, 48, groups=2), (1, 6, 7, 16), "24 columns of a group are a vector and a half"),
        (lambda x: conv(x, 4, 32, size=1, groups=8), (1, 6, 7, 32), "nor are groups merged for 16 products"),
        (lambda x: conv(x, 1, 16, groups=16), (1, 6, 7, 16), "a depthwise convolution"),
        (lambda x: conv(x, columns=72), (1, 6, 7, 16), "72 columns are four vectors and a half"),
        (lambda x: conv(x, columns=32, size=1), (1, 6, 7, 16), "splitting takes longer than is gained in 32 products"),
        (lambda x: conv(x, size=2, columns=64, strides=4), (1, 16, 20, 16), "and in 16"),
        (lambda x: conv(x, 6), (1, 6, 7, 6), "no vectors of channels"),
        (product, (1, 3, 64), "tiles of three rows"),
        (product, (4, 2, 64), "and of two"),
        (lambda x: op.matmul(x, op.permute_dims(x, [0, 2, 1])), (1, 64, 64), "a product of activations"),
        (
            lambda x: op.matmul(op.astype(x, "float16"), const(random((64, 64)).astype("float16"))),
            (1, 64, 64),
            "halves",
        ),
        (lambda x: op.nn.conv2d(x, const(random((64, 16, 3, 3)))), (1, 16, 6, 7), "channels first"),
    ],
)
def test_others_stay(build, shape, why):
    model, found = split(build, shape)

    assert found is model, why


@pytest.mark.parametrize(
    ("channels", "columns", "rows", "is_split", "why"),
    [
        (96, 192, 820, True, "15.1 million products, 192 of each number, 96 in each sum"),
        (96, 192, 810, False, "14.9 million"),
        (96, 176, 1000, False, "176 of each number"),
        (88, 192, 1000, False, "88 in each sum"),
    ],
)
def test_in_six_of_fewer_products_stay(channels, columns, rows, is_split, why):
    weight = random((channels, columns), 1)

    model, found = split(lambda x: op.matmul(x, const(weight)), (1, rows, channels), parts=3)

    assert (found is not model) == is_split, why


def programs(build, shape, parts=2, count=6):
    """Those of its subgraph, as a CPU with AMX has them."""
    _, found = split(build, shape, parts)
    [subgraph] = extract_subgraphs(fusion.fuse(found.module, AMX.tvm()))
    workload = load_module(subgraph.workload)
    assert contraction.fits(workload, AMX.tvm())
    made = evolution.sample(workload, AMX.tvm(), count, known=set(), seed=0)
    return subgraph, workload, [traces.program(workload, each.trace, AMX.tvm()) for each in made]


@pytest.mark.parametrize("parts", TYPICAL)
def test_programs_are_those_of_bf16_with_data_split_in_tasks_or_at_once(parts, few):
    def build(x):
        return op.nn.relu(op.add(conv(x, 64, padding=1), const(random((64,), 2))))

    subgraph, workload, made = programs(build, (1, 14, 14, 64), parts)

    assert subgraph.core_operator == "conv2d_bf16"
    assert made
    [weight] = [p for p in workload["main"].params if str(p.ty.dtype) == "bfloat16"]
    in_tasks = set()
    for program in made:
        text = program.script()
        assert 'annotations={"matrix": "tdpbf16ps"' in text
        assert [int(n) for n in weight.ty.shape] in [[int(n) for n in p.ty.shape] for p in program["main"].params]
        in_tasks.add(text.count("T.parallel") == 1)
    assert in_tasks == {True, False}


@pytest.mark.parametrize("parts", TYPICAL)
def test_what_several_products_read_is_prefetched_once_with_the_rest_of_the_next_panel(parts, few):
    _, _, made = programs(lambda x: product(x, 64), (1, 32, 64), parts)
    found = [(program["main"], prefetched(prefetch.insert(program["main"]))) for program in made]
    found = [(function, calls) for function, calls in found if calls][:2]

    assert found
    for function, calls in found:
        [nest] = [nest for nest in analysis.nests(function.body) if prefetch.MARK in nest[-1].annotations]
        [weight] = [param for param in function.params if str(param.ty.dtype) == "bfloat16"]
        loads = reads(nest, weight)
        of_panel = [loop for loop in nest[2:] if loop.loop_var in analysis.variables(loads[0].indices)]  # by lines
        panel, there = lines(loads, of_panel, LINE), lines(calls, nest[2:-1], LINE)

        assert panel == set(range(len(panel)))
        assert there >= {line + min(there) for line in panel}
        assert len(there) < 2 * len(panel)


def in_slabs(parts=3, rows=64, count=3):
    """A product whose data do not stay in L2 beside its weights, and some of its programs that go through the reduction
    in parts."""

    def build(x):
        return op.nn.relu(op.matmul(x, const(random((4096, 384), 1))))

    _, workload, made = programs(build, (1, rows, 4096), parts, count=24)
    return build, workload, [program for program in made if "rf_local" in program.script()][:count]


def test_products_that_leave_l2_may_go_through_their_reduction_in_slabs(cpu):
    build, _, made = in_slabs()
    x = random((1, 64, 4096))
    [expected] = run(module(build, x.shape), x)
    _, found = split(build, x.shape, 3)

    assert len(made) == 3
    for program in made:
        y = run_on(program, cpu.tvm(), [x, *found.weights.values()], np.zeros_like(expected))
        assert np.abs(y - expected).max() < NARROW**2 * np.abs(expected).max()
        text = program.script()
        assert text.index("_init") < text.index("T.axis.reduce")  # once, before all slabs


def test_data_that_stay_in_l2_have_no_slabs():
    assert in_slabs(rows=32)[2] == []


def test_a_slab_prefetches_its_own_part_of_the_next_panel():
    n_found = 0
    for program in in_slabs(count=24)[2]:
        function, calls = program["main"], prefetched(prefetch.insert(program["main"]))
        [nest] = [nest for nest in analysis.nests(function.body) if prefetch.MARK in nest[-1].annotations]
        [weight] = [param for param in function.params if str(param.ty.dtype) == "bfloat16"]
        _task, _slab, columns, rows, *of_tile = nest
        if not calls or int(rows.extent) == 1 or int(columns.extent) == 1:
            continue
        panel, there = lines(reads(nest, weight), of_tile, LINE), lines(calls, [rows, *of_tile[:-1]], LINE)
        ahead = min(lines(reads(nest, weight), [columns], LINE) - {0})

        assert there >= {line + ahead for line in panel}
        assert len(there) < 2 * len(panel)
        n_found += 1
    assert n_found


@pytest.mark.parametrize("precision", ["bf16x3", "bf16x6"])
def test_a_cpu_without_matrices_is_refused_with_what_to_do(precision):
    old = targets.cpu_target('{"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver4"}')
    model = fusion.lift_constants(module(product, (2, 16, 64)))

    with pytest.raises(TargetError, match=rf"--precision {precision}: llvm-znver4.* \(AMX\).*Leave the option out"):
        choose_algorithms(model, old, AlgorithmConfig(precision=precision))


@pytest.mark.parametrize(("precision", "name"), [("bf16x3", "conv2d_in_three"), ("bf16x6", "conv2d_in_six")])
def test_with_amx_a_model_has_them_in_place_of_winograds_convolutions(precision, name):
    model = fusion.lift_constants(module(lambda x: conv(x, 64, 72, padding=1), (1, 19, 19, 64)))

    found = choose_algorithms(model, AMX, AlgorithmConfig(precision=precision))

    assert operators(found.module) == [name, "cut"]  # 72 columns are 80 of which 8 are dropped


def test_where_six_products_do_not_pay_winograds_convolution_does():
    model = fusion.lift_constants(module(lambda x: conv(x, 32, 32, padding=1), (1, 14, 14, 32)))

    found = [choose_algorithms(model, AMX, AlgorithmConfig(precision=each)) for each in ("bf16x6", "model")]

    assert [operators(each.module) for each in found] == [["conv2d_winograd"]] * 2
