import numpy as np
import pytest
import tvm
from tvm import te
from tvm.relax import op

from lib.graph import fusion, reweight, strassen, widen
from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from lib.graph.fusion import Model
from lib.graph.subgraphs import extract_subgraphs
from lib.machine.registers import Registers
from lib.search import evolution
from lib.tir import traces
from lib.tir.operators import operators
from lib.tir.workload import as_workload, load_module
from tests.helpers import run_on
from tests.lib.graph.test_widen import in_tvm, model

WIDE, NARROW = Registers(32, 16), Registers(16, 8, spreads=False)  # AVX-512, AVX2


def workload(rows, depth, columns, machine=WIDE):
    """A product of data of some rows, with a shift and a ReLU."""
    axis, pairs = strassen.paired(rows, machine)
    data = te.placeholder((*rows, depth), name="data")
    weight = te.placeholder((7, depth // 2, columns // 2), name="weight")
    shift = te.placeholder((columns,), name="shift")
    product = strassen.product(data, weight, axis, pairs, machine.lanes)
    zero = tvm.tirx.const(0.0, "float32")
    out = te.compute(product.shape, lambda *at: te.max(product(*at) + shift[at[-1]], zero), name="shifted")
    return as_workload(te.create_prim_func([data, weight, shift, out]).with_attr("layout_free_buffers", [1]))


def arrays(rows, depth, columns):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in ((*rows, depth), (depth, columns), (columns,))]


def expected_of(data, weight, shift):
    return np.maximum(data.astype(np.float64) @ weight.astype(np.float64) + shift, 0).astype(np.float32)


SHAPES = [
    (16,),  # even
    (1, 13),  # padded
    (4, 7),  # an axis before the rows has pairs
    (1, 3, 6, 5),
    (1, 2, 3, 10),  # the rows themselves, of an image
    (1, 1, 2),
]


@pytest.mark.parametrize("rows", SHAPES)
@pytest.mark.parametrize("machine", [WIDE, NARROW])
def test_it_is_the_product(cpu, rows, machine):
    data, weight, shift = arrays(rows, 64, 96)
    expected = expected_of(data, weight, shift)
    inputs = [data, strassen.summed(weight, machine.lanes), shift]

    found = run_on(workload(rows, 64, 96, machine), cpu.tvm(), inputs, np.zeros(expected.shape, np.float32))

    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_the_seven_products_are_those_of_the_source():
    """Sums and products of numbers by hand: [[1, 2], [3, 4]] times [[5, 6], [7, 8]] is [[19, 22], [43, 50]]."""
    data, weight = np.array([1, 2, 3, 4]), np.array([5, 6, 7, 8])

    products = (np.array(strassen.DATA) @ data) * (np.array(strassen.WEIGHT) @ weight)

    assert products.tolist() == [65, 35, -2, 8, 24, 22, -30]
    assert (np.array(strassen.RESULT) @ products).tolist() == [19, 22, 43, 50]


def test_columns_are_of_the_left_and_right_quarters_vector_by_vector():
    weight = np.arange(4 * 8, dtype=np.float32).reshape(4, 8)

    sums = strassen.summed(weight, lanes=2)

    assert sums.shape == (7, 2, 4)
    np.testing.assert_array_equal(sums[1], weight[:2, [0, 1, 4, 5]])  # 11
    np.testing.assert_array_equal(sums[4], weight[2:, [2, 3, 6, 7]])  # 22
    np.testing.assert_array_equal(sums[5], weight[:2, [0, 1, 4, 5]] + weight[:2, [2, 3, 6, 7]])  # 11 + 12


def test_its_error_is_a_few_times_that_of_the_definition():
    """In one precision throughout, of the size that transformers have."""
    data, weight, _ = arrays((64,), 768, 768)
    exact = data.astype(np.float64) @ weight.astype(np.float64)
    sums, quarters = strassen.summed(weight, 16), data.reshape(32, 2, 2, 384).transpose(1, 2, 0, 3).reshape(4, 32, 384)
    factors = np.einsum("rq,qmk->rmk", np.array(strassen.DATA, np.float32), quarters)
    results = np.einsum("qr,rmn->qmn", np.array(strassen.RESULT, np.float32), factors @ sums)
    joined = results.reshape(2, 2, 32, 24, 16).transpose(2, 0, 3, 1, 4).reshape(64, 768)

    error, of_definition = (np.sqrt(np.mean((found - exact) ** 2)) for found in (joined, data @ weight))

    assert of_definition < error < 6 * of_definition
    assert error < 1e-6 * np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize(
    ("rows", "pair"),
    [
        ((1, 197), (1, 99)),  # tiles of 9 or of 11 rows
        ((1, 128), (1, 64)),
        ((1, 202), (1, 102)),  # 101 is a prime number: tiles of 6
        ((1, 14, 14), (2, 7)),  # every other pixel of an image's lines
        ((1, 8, 8), (1, 4)),  # the lines: tiles of four pixels would keep no core busy
        ((1, 12, 7), (1, 6)),
        ((1, 8, 8, 7, 7), (2, 4)),
        ((2, 128), (1, 64)),  # samples have nothing to do with one another
        ((4, 49), (0, 2)),
        ((1, 7, 7), (2, 4)),
    ],
)
def test_pairs_leave_rows_that_register_tiles_divide(rows, pair):
    assert strassen.paired(rows, WIDE) == pair


@pytest.mark.parametrize(
    ("rows", "pair"),
    [
        ((1, 197), (1, 100)),  # tiles of 4 or of 5 rows: those of 3 would have six sums, where a core wants eight
        ((1, 128), (1, 64)),
        ((1, 1500), (1, 750)),
        ((1, 28, 28), (1, 14)),
    ],
)
def test_with_fewer_registers_tiles_are_lower(rows, pair):
    assert strassen.paired(rows, NARROW) == pair


@pytest.mark.parametrize(
    ("rows", "is_taken"),
    [
        ((1, 197), True),  # measured on a Zen 3: 1.05 times as fast, and 0.78 with 99 pairs
        ((1, 128), True),  # 1.10
        ((1, 14, 14), False),  # 0.77: two rows of two vectors or of three divide 14 pixels, or seven of one
    ],
)
def test_it_is_not_taken_where_no_good_tile_divides_the_rows(rows, is_taken):
    assert strassen.is_taken(rows, 1024, 512, NARROW) == is_taken
    assert strassen.is_taken(rows, 1024, 512, WIDE)


@pytest.mark.parametrize(("columns", "is_taken"), [(1000, False), (1024, True)])
def test_one_tile_divides_both_rows_and_columns(columns, is_taken):
    """85 pairs of rows are tiles of five, which have two vectors; 1,000 columns are 63 pairs of vectors, in threes."""
    assert strassen.is_taken((1, 169), 1024, columns, NARROW) == is_taken


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "is_faster"),
    [
        (128, 768, 768, True),  # 1.08 times, measured on a Zen 5 as all of these
        (197, 768, 3072, True),  # 1.09
        (1500, 384, 384, True),  # 1.06
        (784, 192, 768, True),  # 1.05
        (196, 256, 1024, True),  # 1.05
        (784, 128, 512, False),  # 1.00
        (3136, 96, 384, False),  # 0.99: sums cost what they save
        (49, 768, 3072, False),  # 1.01: so few rows, and all the weights to read
        (49, 3072, 768, False),  # 0.96
        (1, 4096, 4096, False),
    ],
)
def test_it_pays_where_all_three_sides_are_long(rows, depth, columns, is_faster):
    assert strassen.pays(rows, depth, columns) == is_faster


def test_rows_that_are_computed_for_nothing_count():
    assert strassen.pays(200, 768, 3072, 200)
    assert not strassen.pays(200, 768, 3072, 216)


def convolution(*, kernel=1, image=14, **attrs):
    def make(x, w):
        return op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO", **attrs)

    return model(make, (kernel, kernel, 256 // attrs.get("groups", 1), 1024), 1, image, image, 256)


def rewritten(made, machine=WIDE):
    return reweight.rewrite(*made, [strassen.replacement(machine)])


@pytest.mark.parametrize(
    "made", [model(op.matmul, (512, 512), 1, 197, 512), model(op.matmul, (512, 512), 4, 49, 512), convolution()]
)
def test_products_and_1x1_convolutions_that_gain_are_replaced(cpu, made):
    module, changed = rewritten(made)
    shape = [int(n) for n in made[0]["main"].params[0].ty.shape.values]
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    expected = in_tvm(cpu, *made[:1], x, made[1]["w"])

    assert changed["w"].shape == (7, made[1]["w"].shape[-2] // 2, made[1]["w"].shape[-1] // 2)
    np.testing.assert_allclose(
        in_tvm(cpu, module, x, changed["w"]), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
    )


@pytest.mark.parametrize(("columns", "computed"), [(2192, 2208), (1000, 1024), (1184, 1216)])
def test_columns_that_make_no_quarters_get_more_that_are_dropped(cpu, columns, computed):
    made = model(op.matmul, (512, columns), 1, 384, 512)
    module, changed = rewritten(made)
    x = np.random.default_rng(1).normal(size=(1, 384, 512)).astype(np.float32)
    expected = np.maximum(x @ made[1]["w"], 0)

    assert changed["w"].shape == (7, 256, computed // 2)
    [subgraph] = extract_subgraphs(fusion.fuse(module, cpu.tvm()))
    assert subgraph.core_operator == "strassen_matmul"
    function = load_module(subgraph.workload)
    for proposal in evolution.sample(function, cpu.tvm(), 3, known=set(), seed=0):
        assert proposal.space == "strassen"
        tuned = traces.apply(function, proposal.trace).mod
        out = run_on(tuned, cpu.tvm(), [x, changed["w"]], np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "made",
    [
        convolution(strides=2),
        convolution(padding=1),
        convolution(groups=2),
        convolution(kernel=3, padding=1),
        model(op.matmul, (520, 512), 1, 197, 520),  # halves of the depth are no whole vectors
        model(
            op.matmul, (1024, 416), 1, 196, 1024
        ),  # half of its columns are 13 vectors, and with another it is slower
        model(op.matmul, (4, 512, 512), 4, 197, 512),  # a product for each
        model(op.matmul, (512, 512), 1, 32, 512),  # too few rows
    ],
)
def test_others_stay(made):
    assert rewritten(made) == (made[0], {})


def test_what_is_no_weight_stays():
    module, _ = model(op.matmul, (512, 512), 1, 197, 512)

    assert rewritten((module, {})) == (module, {})


def test_it_is_an_operator_of_its_own_with_what_follows_it_fused(cpu):
    module, _ = rewritten(model(op.matmul, (512, 512), 1, 197, 512))

    [subgraph] = extract_subgraphs(fusion.fuse(module, cpu.tvm()))

    assert subgraph.core_operator == "strassen_matmul"
    assert subgraph.operators[-1] == "max"
    function = load_module(subgraph.workload)
    assert list(function["main"].attrs["layout_free_buffers"]) == [1]
    [proposal] = evolution.sample(function, cpu.tvm(), 1, known=set(), seed=0)
    assert proposal.space == "strassen"


def test_sums_are_named_in_the_structure():
    assert operators(workload((16,), 64, 96)) == ["chosen_sum", "batch_matmul", "chosen_sum", "reshape", "max"]


@pytest.mark.parametrize(("choice", "operator"), [("auto", "strassen_matmul"), ("never", "matmul")])
def test_whoever_wants_none_gets_none(cpu, choice, operator):
    plain = Model(*model(op.matmul, (512, 512), 1, 197, 512))

    chosen = choose_algorithms(plain, cpu, AlgorithmConfig(strassen=choice))

    [subgraph] = extract_subgraphs(fusion.fuse(chosen.module, cpu.tvm()))
    assert subgraph.core_operator == operator


def test_columns_that_it_cannot_quarter_are_widened_still(cpu):
    made = model(op.matmul, (512, 200), 1, 197, 512)  # of which 56 more would make quarters

    _, changed = reweight.rewrite(*made, [strassen.replacement(WIDE), widen.replacement(WIDE)])

    assert changed["w"].shape == (512, 208)
