"""Instructions for bf16: where they are written, and that they compute what the loops do."""

import itertools
import json

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import te, tirx
from tvm.s_tir import Schedule
from tvm.sym import Analyzer
from tvm.target import Target

from lib.machine import targets
from lib.machine.dots import ARM_SIGNED, BF16, INT7, INT8, INT16
from lib.machine.registers import registers
from lib.search import evolution
from lib.tir import analysis, dot, lowering, prefetch, small_weights, traces
from lib.tir.outline import outline
from lib.tir.workload import as_workload
from tests.helpers import packed, run_on

WITH, WITHOUT = ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu, "num-cores": 2}
                 for mcpu in ("cooperlake", "skylake-avx512"))  # fmt: skip
DOTS = registers(targets.cpu_target().tvm()).dots  # of this CPU
FEATURES = {str(feature) for feature in tvm.target.codegen.llvm_get_cpu_features(targets.cpu_target().tvm())}
needs_it = pytest.mark.skipif(BF16 not in DOTS, reason="needs a CPU with AVX512-BF16")
needs_avx2 = pytest.mark.skipif(INT16.features.isdisjoint(FEATURES), reason="needs an x86 CPU with AVX2")
# What adds products of bytes in 16 bits, in vectors of 256 bits and of 512.
OLD = [
    pytest.param({**WITHOUT, "mcpu": "haswell"}, marks=needs_avx2, id="AVX2"),
    pytest.param(WITHOUT, marks=pytest.mark.skipif("avx512bw" not in FEATURES, reason="needs AVX-512"), id="AVX-512"),
]
needs_vnni = pytest.mark.skipif(INT8 not in DOTS, reason="needs a CPU with AVX512-VNNI")


@pytest.fixture
def cpu(cpu):
    """This CPU without AMX, whose instructions would take the place of these."""
    parts = json.loads(cpu.text)
    return targets.cpu_target(
        json.dumps({**parts, "mattr": [each for each in parts.get("mattr", []) if "amx" not in each]})
    )


def product(rows, columns, depth, dot=BF16):
    """x @ w of the types of an instruction, as `lib.graph.precision` makes it; the weights may be packed."""
    x, w = te.placeholder((rows, depth), dot.data, name="x"), te.placeholder((depth, columns), dot.weights, name="w")
    k = te.reduce_axis((0, depth), "k")
    out = te.compute(
        (rows, columns), lambda i, j: te.sum(x[i, k].astype(dot.sums) * w[k, j].astype(dot.sums), axis=k), name="out"
    )
    return as_workload(te.create_prim_func([x, w, out]).with_attr("layout_free_buffers", [1]))


def convolution(size, channels):
    """3x3 in NHWC, padded, with a result in bf16."""
    image = te.placeholder((1, size, size, channels[0]), "bfloat16", name="image")
    weight = te.placeholder((3, 3, *channels), "bfloat16", name="weight")
    padded = tvm.topi.nn.pad(image, [0, 1, 1, 0], [0, 1, 1, 0])
    a, b, c = (te.reduce_axis((0, n), name) for n, name in ((3, "a"), (3, "b"), (channels[0], "c")))
    sums = te.compute(
        (1, size, size, channels[1]),
        lambda n, y, x, o: te.sum(
            padded[n, y + a, x + b, c].astype("float32") * weight[a, b, c, o].astype("float32"), axis=[a, b, c]
        ),
        name="sums",
    )
    out = te.compute(sums.shape, lambda *index: sums(*index).astype("bfloat16"), name="out")
    return as_workload(te.create_prim_func([image, weight, out]).with_attr("layout_free_buffers", [1]))


def in_groups(size, groups, channels, dot):
    """3x3 in NHWC without padding, of so many groups of (in, out) channels, as `precision` and TVM make it."""
    (into, out), sums = channels, dot.sums
    image = te.placeholder((1, size, size, groups * into), dot.data, name="image")
    weight = te.placeholder((3, 3, into, groups * out), dot.weights, name="weight")
    a, b, c = (te.reduce_axis((0, n), name) for n, name in ((3, "a"), (3, "b"), (into, "c")))
    found = te.compute(
        (1, size - 2, size - 2, groups * out),
        lambda n, y, x, o: te.sum(
            image[n, y + a, x + b, o // out * into + c].astype(sums) * weight[a, b, c, o].astype(sums), axis=[a, b, c]
        ),
        name="sums",
    )
    return as_workload(te.create_prim_func([image, weight, found]).with_attr("layout_free_buffers", [1]))


def programs(workload, target, n=6):
    """Up to n of them: small workloads have fewer."""
    found = evolution.sample(workload, target, n, known=set(), seed=0)
    assert found
    assert {proposal.space for proposal in found} == {"contraction"}
    return [proposal.trace for proposal in found]


def instructions(module, target, name=BF16.name):
    return lowering.build(module, target).inspect_source("s").count(name)


def random(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("workload", [product(16, 64, 32), convolution(7, (32, 32))], ids=["product", "convolution"])
def test_every_program_of_the_space_has_the_instruction_where_the_machine_has_it(workload):
    target = Target(WITH)

    for trace in programs(workload, target):
        assert instructions(packed(workload, trace, target), target)


def test_every_program_of_bytes_has_its_instruction_where_the_machine_has_it():
    workload, target = product(16, 64, 32, INT8), Target(WITH)

    for trace in programs(workload, target):
        assert instructions(packed(workload, trace, target), target, INT8.name)


def test_avx_vnni_has_it_in_half_the_width():
    target = Target({**WITH, "mcpu": "alderlake"})
    workload = product(16, 64, 32, INT8)

    assert registers(target).lanes == 8
    assert BF16 not in registers(target).dots
    for trace in programs(workload, target, 3):
        assert instructions(packed(workload, trace, target), target, INT8.name)


@pytest.mark.parametrize(
    ("workload", "name"),
    [(product(16, 64, 32), "bfdot"), (product(16, 64, 32, INT8), "usdot"), (product(16, 64, 32, ARM_SIGNED), "sdot")],
    ids=["bf16", "bytes", "signed bytes"],
)
def test_arm_has_its_own_where_it_has_any(workload, name):
    arm = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "num-cores": 2}
    new, old = Target({**arm, "mcpu": "neoverse-v1"}), Target({**arm, "mcpu": "cortex-a72"})

    for trace in programs(workload, new, 3):
        assert instructions(packed(workload, trace, new), new, f"\t{name}\t")
    for trace in programs(workload, old, 2):
        assert not instructions(packed(workload, trace, old), old, f"\t{name}\t")


@pytest.mark.parametrize("of_group", [2, 4, 8])
def test_groups_that_fill_a_part_of_a_vector_share_one_with_the_instruction(of_group):
    target, workload = Target(WITH), in_groups(9, 32 // of_group, (of_group, of_group), BF16)

    for trace in programs(workload, target, 4):
        program = traces.program(workload, trace, target)
        text = lowering.build(program, target).inspect_source("s")
        dots = [line for line in text.splitlines() if BF16.name in line]
        assert dots
        assert all("zmm" in line for line in dots)  # of sixteen lanes each


@pytest.mark.parametrize(
    ("dot", "groups", "channels"),
    [
        pytest.param(BF16, 3, (8, 32), marks=needs_it, id="bf16"),
        pytest.param(INT8, 3, (8, 32), marks=needs_vnni, id="bytes"),
        pytest.param(BF16, 16, (2, 2), marks=needs_it, id="bf16 in twos"),
        pytest.param(BF16, 8, (4, 4), marks=needs_it, id="bf16 in fours"),
        pytest.param(BF16, 4, (8, 8), marks=needs_it, id="bf16 in eights"),
    ],
)
def test_convolutions_in_groups_have_it_and_are_numpys(cpu, dot, groups, channels):
    rng, (into, out) = np.random.default_rng(0), channels
    shapes = (1, 9, 9, groups * into), (3, 3, into, groups * out)
    if dot is BF16:
        image, weight = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes)
    else:
        image, weight = (
            rng.integers(0, 256, shapes[0]).astype(np.uint8),
            rng.integers(-128, 128, shapes[1]).astype(np.int8),
        )
    windows = np.lib.stride_tricks.sliding_window_view(image.astype(np.float64), (3, 3), axis=(1, 2))
    parts = [
        np.einsum("nyxcab,abco->nyxo", windows[:, :, :, n * into : (n + 1) * into],
                  weight[..., n * out : (n + 1) * out].astype(np.float64))
        for n in range(groups)
    ]  # fmt: skip
    expected = np.concatenate(parts, -1).astype(dot.sums)
    workload = in_groups(9, groups, (into, out), dot)

    for trace in programs(workload, cpu.tvm(), 4):
        program = traces.program(workload, trace, cpu.tvm())
        assert instructions(program, cpu.tvm(), dot.name)
        found = run_on(program, cpu.tvm(), [image, weight], np.zeros(expected.shape, dot.sums))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=0 if dot is INT8 else 1e-4)


@pytest.mark.parametrize(("offset", "has_it"), [(0, True), (4, True), (2, False), (3, False)])
def test_groups_that_begin_within_a_word_of_others_are_left_to_loops(cpu, offset, has_it):
    """Groups of four columns and as many channels, of data that begin at some channel."""
    x, w = te.placeholder((6, 24), "bfloat16", name="x"), te.placeholder((4, 16), "bfloat16", name="w")
    k = te.reduce_axis((0, 4), "k")
    out = te.compute((6, 16), lambda i, j: te.sum(
        x[i, offset + j // 4 * 4 + k].astype("float32") * w[k, j].astype("float32"), axis=k), name="out")  # fmt: skip
    schedule = Schedule(as_workload(te.create_prim_func([x, w, out])))
    packed = schedule.cache_read(schedule.get_sblock("out"), 1, "global")
    schedule.transform_layout(packed, ("write", 0), lambda k, j: (k // 2, j, k % 2))
    block = schedule.get_sblock("out")
    i, lane, k = schedule.get_loops(block)
    step, pair = schedule.split(k, [None, 2])
    schedule.reorder(i, step, lane, pair)
    schedule.unroll(step)
    schedule.annotate(lane, dot.MARK, BF16.name)
    schedule.decompose_reduction(block, step)
    inputs = [random((6, 24), 0), random((4, 16), 1)]
    data, weights = (each.astype(np.float32) for each in inputs)
    parts = [data[:, offset + 4 * n : offset + 4 * n + 4] @ weights[:, 4 * n : 4 * n + 4] for n in range(4)]

    found = run_on(schedule.mod, cpu.tvm(), inputs, np.zeros((6, 16), np.float32))

    assert (instructions(schedule.mod, Target(WITH)) > 0) == has_it
    np.testing.assert_allclose(found, np.concatenate(parts, -1), rtol=1e-5, atol=1e-5)


@needs_vnni
@pytest.mark.parametrize("depth", [32, 12, 7], ids=["quads", "few quads", "no quads"])
def test_products_of_bytes_are_numpys_to_the_last_bit(cpu, depth):
    workload, rng = product(13, 48, depth, INT8), np.random.default_rng(0)
    x, w = rng.integers(0, 256, (13, depth)).astype(np.uint8), rng.integers(-128, 128, (depth, 48)).astype(np.int8)
    expected = x.astype(np.int32) @ w.astype(np.int32)

    for trace in programs(workload, cpu.tvm(), 3):
        program = traces.program(workload, trace, cpu.tvm())
        np.testing.assert_array_equal(run_on(program, cpu.tvm(), [x, w], np.zeros((13, 48), np.int32)), expected)
        assert bool(instructions(program, cpu.tvm(), INT8.name)) == (depth % 4 == 0)


@needs_avx2
@pytest.mark.parametrize(
    ("shape", "has_it"),
    [((13, 48, 32), True), ((16, 24, 10), True), ((8, 12, 6), True), ((13, 48, 7), False)],
    ids=["a prime number of rows", "few pairs", "vectors of half the width", "no pairs"],
)
def test_products_of_pairs_are_numpys_to_the_last_bit(shape, has_it):
    (rows, columns, depth), old = shape, Target({**WITHOUT, "mcpu": "haswell"})
    workload, rng = product(rows, columns, depth, INT16), np.random.default_rng(0)
    x = rng.choice([0, 1, 254, 255], (rows, depth)).astype(np.int16)  # sums of two do not fit 16 bits
    w = rng.choice([-128, -127, 126, 127], (depth, columns)).astype(np.int16)
    expected = x.astype(np.int32) @ w.astype(np.int32)

    for trace in programs(workload, old, 4):
        program = traces.program(workload, trace, old)
        np.testing.assert_array_equal(run_on(program, old, [x, w], np.zeros(expected.shape, np.int32)), expected)
        assert bool(instructions(packed(workload, trace, old), old, INT16.name)) == has_it


@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize(
    ("shape", "at_once"),
    [((13, 48, 32), 2), ((16, 24, 12), 1), ((8, 12, 8), 2), ((13, 48, 6), 0)],
    ids=["a prime number of rows", "an odd number of words", "vectors of half the width", "no words"],
)
def test_products_with_small_weights_are_numpys_to_the_last_bit(shape, at_once, words, old):
    (rows, columns, depth), old = shape, Target(old)
    plain, rng = product(rows, columns, depth, INT7), np.random.default_rng(0)
    workload = tvm.IRModule({"main": small_weights.marked(plain["main"], words)})
    x = rng.choice([0, 1, 254, 255], (rows, depth)).astype(np.uint8)  # the largest sums that there are
    largest = small_weights.largest(words)
    w = rng.choice([-largest, 1 - largest, largest - 1, largest], (depth, columns)).astype(np.int8)
    w[:, 0], w[:, 1], x[0] = largest, -largest, 255
    expected = x.astype(np.int32) @ w.astype(np.int32)

    for trace in programs(workload, old, 4):
        program = traces.program(workload, trace, old)
        np.testing.assert_array_equal(run_on(program, old, [x, w], np.zeros(expected.shape, np.int32)), expected)
        found = packed(workload, trace, old)
        assert bool(instructions(found, old, INT7.name)) == (at_once > 0)
        assert bool(instructions(found, old, "vpaddw")) == (min(at_once, words) == 2)


@needs_avx2
def test_products_whose_weights_nobody_knows_have_no_sums_of_16_bits():
    workload, old, rng = product(8, 32, 16, INT7), Target({**WITHOUT, "mcpu": "haswell"}), np.random.default_rng(0)
    x, w = np.full((8, 16), 255, np.uint8), rng.choice([-128, 127], (16, 32)).astype(np.int8)

    for trace in programs(workload, old, 3):
        program = traces.program(workload, trace, old)
        assert not instructions(program, old, INT7.name)
        found = run_on(program, old, [x, w], np.zeros((8, 32), np.int32))
        np.testing.assert_array_equal(found, x.astype(np.int32) @ w.astype(np.int32))


@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize("words", [1, 2])
def test_convolutions_in_groups_with_small_weights_are_numpys(words, old):
    groups, (into, out), old, rng = 3, (8, 16), Target(old), np.random.default_rng(0)
    image = rng.choice([0, 1, 254, 255], (1, 9, 9, groups * into)).astype(np.uint8)
    weight = rng.choice([-1, 1], (3, 3, into, groups * out)).astype(np.int8) * np.int8(small_weights.largest(words))
    windows = np.lib.stride_tricks.sliding_window_view(image.astype(np.int32), (3, 3), axis=(1, 2))
    expected = np.concatenate([
        np.einsum("nyxcab,abco->nyxo", windows[:, :, :, n * into : (n + 1) * into],
                  weight[..., n * out : (n + 1) * out].astype(np.int32))
        for n in range(groups)
    ], -1).astype(np.int32)  # fmt: skip
    plain = in_groups(9, groups, (into, out), INT7)
    workload = tvm.IRModule({"main": small_weights.marked(plain["main"], words)})

    for trace in programs(workload, old, 4):
        program = traces.program(workload, trace, old)
        assert bool(instructions(program, old, "vpaddw")) == (words == 2)
        np.testing.assert_array_equal(run_on(program, old, [image, weight], np.zeros_like(expected)), expected)


@needs_avx2
def test_a_trace_for_smaller_weights_leaves_the_loops_of_larger_ones_and_computes_the_same():
    old, plain = Target({**WITHOUT, "mcpu": "haswell"}), product(8, 32, 16, INT7)
    by_words = {n: tvm.IRModule({"main": small_weights.marked(plain["main"], n)}) for n in (1, 2)} | {0: plain}
    x, w = np.full((8, 16), 255, np.uint8), {0: np.full((16, 32), 127), 1: np.full((16, 32), -64)}

    for trace in programs(by_words[2], old, 3):
        for words, weights in w.items():
            program = traces.program(by_words[words], trace, old)
            assert not instructions(program, old, "vpaddw")
            assert bool(instructions(program, old, INT7.name)) == (words == 1)
            found = run_on(program, old, [x, weights.astype(np.int8)], np.zeros((8, 32), np.int32))
            np.testing.assert_array_equal(found, x.astype(np.int32) @ weights)


@pytest.mark.parametrize("words", [1, 2])
def test_with_avx_512_small_weights_are_multiplied_in_its_vectors(words):
    old = Target(WITHOUT)
    workload = tvm.IRModule({"main": small_weights.marked(product(12, 64, 64, INT7)["main"], words)})

    for trace in programs(workload, old, 3):
        text = lowering.build(packed(workload, trace, old), old).inspect_source("s")
        found = [line for line in text.splitlines() if INT7.name in line]
        assert found
        assert all("%zmm" in line for line in found)


@needs_avx2
@pytest.mark.parametrize("words", [1, 2])
def test_a_trace_for_vectors_of_512_bits_computes_the_same_where_there_are_none(words):
    workload = tvm.IRModule({"main": small_weights.marked(product(12, 64, 64, INT7)["main"], words)})
    haswell, rng = Target({**WITHOUT, "mcpu": "haswell"}), np.random.default_rng(0)
    x = rng.integers(0, 256, (12, 64)).astype(np.uint8)
    w = rng.integers(-32, 33, (64, 64)).astype(np.int8)

    for trace in programs(workload, Target(WITHOUT), 3):
        program = traces.program(workload, trace, haswell)
        found = run_on(program, haswell, [x, w], np.zeros((12, 64), np.int32))
        np.testing.assert_array_equal(found, x.astype(np.int32) @ w.astype(np.int32))


def test_tiles_of_pairs_leave_a_register_to_what_is_added():
    """AVX2 has sixteen: twelve sums in a tile of floats, three vectors of weights, and one of data."""
    old, k = Target({**WITHOUT, "mcpu": "haswell"}), te.reduce_axis((0, 32), "k")
    x, w = te.placeholder((12, 32), name="x"), te.placeholder((32, 48), name="w")
    out = te.compute((12, 48), lambda i, j: te.sum(x[i, k] * w[k, j], axis=k), name="out")
    floats = as_workload(te.create_prim_func([x, w, out]).with_attr("layout_free_buffers", [1]))

    def tiles(workload):
        return {outline(traces.apply(workload, trace).mod).tile for trace in programs(workload, old, 40)}

    assert "4 x 3 x 8 lanes" in tiles(floats)
    assert "4 x 2 x 8 lanes" in tiles(product(12, 48, 32, INT16))
    assert "4 x 3 x 8 lanes" not in tiles(product(12, 48, 32, INT16))


def test_with_avx_512_integers_of_16_bits_are_not_faster_than_floats():
    assert INT16 not in registers(Target(WITHOUT)).dots


@pytest.mark.parametrize("mcpu", ["haswell", "skylake-avx512"])
def test_without_an_instruction_for_bytes_programs_compute_the_same(mcpu, cpu):
    target = Target({**WITHOUT, "mcpu": mcpu})
    workload, rng = product(8, 32, 16, INT8), np.random.default_rng(0)
    x, w = rng.integers(0, 256, (8, 16)).astype(np.uint8), rng.integers(-128, 128, (16, 32)).astype(np.int8)
    for trace in programs(workload, target, 2):
        program = traces.program(workload, trace, target)
        assert not instructions(program, target, INT8.name)
        found = run_on(program, cpu.tvm(), [x, w], np.zeros((8, 32), np.int32))  # on this CPU, whichever it is
        np.testing.assert_array_equal(found, x.astype(np.int32) @ w.astype(np.int32))


def test_without_the_instruction_programs_are_plain_arithmetic():
    workload, target = product(16, 64, 32), Target(WITHOUT)

    for trace in programs(workload, target, 2):
        module = traces.program(workload, trace, target)
        assert not any(dot.MARK in loop.annotations for loop in analysis.walk(module["main"].body, tirx.For))
        assert not instructions(module, target)


@needs_it
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [(16, 64, 32), (13, 64, 6), (7, 24, 10)],
    ids=["whole tiles", "a prime number of rows", "vectors of half the width"],
)
def test_products_are_those_of_numpy(cpu, rows, columns, depth):
    workload, inputs = product(rows, columns, depth), [random((rows, depth), 0), random((depth, columns), 1)]
    expected = inputs[0].astype(np.float64) @ inputs[1].astype(np.float64)

    for trace in programs(workload, cpu.tvm(), 3):
        program = traces.program(workload, trace, cpu.tvm())
        arguments = [tvm.runtime.tensor(array) for array in (*inputs, np.zeros(expected.shape, np.float32))]
        lowering.build(program, cpu.tvm())["main"](*arguments)
        np.testing.assert_allclose(arguments[-1].numpy(), expected, atol=1e-5 * depth)
        assert instructions(program, cpu.tvm())


@needs_it
def test_a_deep_product_has_it_in_slabs_of_its_reduction_and_without(cpu):
    workload, inputs = product(32, 32, 8192), [random((32, 8192), 0), random((8192, 32), 1)]
    expected = inputs[0].astype(np.float64) @ inputs[1].astype(np.float64)
    found = programs(workload, cpu.tvm(), 8)

    assert {'"RFactor"' in trace for trace in found} == {True, False}
    for trace in found:
        program = traces.program(workload, trace, cpu.tvm())
        arguments = [tvm.runtime.tensor(array) for array in (*inputs, np.full(expected.shape, np.nan, np.float32))]
        lowering.build(program, cpu.tvm())["main"](*arguments)
        assert np.abs(arguments[-1].numpy() - expected).max() < 1e-5 * np.abs(expected).max()
        assert instructions(program, cpu.tvm())


@needs_it
def test_convolutions_round_their_result_to_the_nearest_even_bf16(cpu):
    workload, inputs = convolution(7, (16, 32)), [random((1, 7, 7, 16), 0), random((3, 3, 16, 32), 1)]
    padded = np.pad(inputs[0].astype(np.float32), ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    sums = np.einsum("nyxcab,abco->nyxo", windows, inputs[1].astype(np.float32))
    expected = sums.astype(ml_dtypes.bfloat16).astype(np.float64)

    for trace in programs(workload, cpu.tvm(), 3):
        arguments = [tvm.runtime.tensor(a) for a in (*inputs, np.zeros(expected.shape, ml_dtypes.bfloat16))]
        lowering.build(traces.program(workload, trace, cpu.tvm()), cpu.tvm())["main"](*arguments)
        found = arguments[-1].numpy().astype(np.float64)
        # Sums in another order may lie on the other side of the middle between two bf16.
        assert np.all(np.abs(found - expected) <= 2.0**-7 * np.abs(expected) + 1e-4)
        assert np.mean(found == expected) > 0.95


def test_loops_that_the_instruction_does_not_fit_stay_and_compute_the_same(cpu):
    workload, inputs = product(4, 5, 6), [random((4, 6), 0), random((6, 5), 1)]
    schedule = Schedule(workload)
    block = schedule.get_sblock("out")
    i, lane, k = schedule.get_loops(block)
    outer, pair = schedule.split(k, [None, 2])
    schedule.reorder(i, outer, lane, pair)
    schedule.annotate(lane, dot.MARK, BF16.name)  # of five lanes
    schedule.decompose_reduction(block, outer)

    out = run_on(schedule.mod, cpu.tvm(), inputs, np.zeros((4, 5), np.float32))

    np.testing.assert_allclose(out, inputs[0].astype(np.float32) @ inputs[1].astype(np.float32), rtol=1e-5, atol=1e-5)


def test_weights_in_bf16_are_prefetched_a_cache_line_at_a_time():
    workload, target = product(16, 128, 8), Target(WITH)
    found = []
    for trace in programs(workload, target):
        function = prefetch.insert(packed(workload, trace, target)["main"])
        calls = [call for call in analysis.walk(function.body, tvm.ir.Call) if call.op.name == "tirx.prefetch"]
        addresses = [call.args[0].args[0].indices[-1] for call in calls]
        found += [Analyzer().simplify(b - a) for a, b in itertools.pairwise(addresses)]

    assert {int(distance) for distance in found} == {32}
