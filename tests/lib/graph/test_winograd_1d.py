import ml_dtypes
import numpy as np
import pytest
from tvm import relax, te, topi
from tvm.relax import op
from tvm.target import Target

from lib.graph import fusion, reweight, winograd_1d
from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from lib.graph.fusion import Model
from lib.graph.subgraphs import extract_subgraphs
from lib.graph.winograd_1d import Filter
from lib.search import evolution
from lib.tir import traces
from lib.tir.operators import core_operator, operators
from lib.tir.workload import as_workload, load_module
from tests.helpers import run_on
from tests.lib.search.spaces.test_contraction import sampled
from tests.lib.tir.test_dot import WITH, instructions, needs_it

CHANNELS = (16, 32)


def convolved(data, kernel, axis, distance, before, after):
    """The sum of shifted data times each tap (taps x I x O), in double precision."""
    around = [(before, after) if n == axis else (0, 0) for n in range(data.ndim)]
    whole = np.pad(data.astype(np.float64), around)
    extent = whole.shape[axis] - (len(kernel) - 1) * distance
    shifted = (np.take(whole, range(n * distance, n * distance + extent), axis) for n in range(len(kernel)))
    return sum(part @ tap for part, tap in zip(shifted, kernel.astype(np.float64), strict=True))


def strided(results, axis, stride):
    """Every so many of them."""
    return np.take(results, range(0, results.shape[axis], stride), axis)


def arrays(shape, taps):
    rng = np.random.default_rng(0)
    return [rng.normal(size=each).astype(np.float32) for each in (shape, (taps, *CHANNELS), CHANNELS[1:])]


def workload(shape, axis, chosen, results, before, kind="float32"):
    """A convolution with bias and ReLU, whose kernel may be packed."""
    data = te.placeholder(shape, kind, name="data")
    depth = chosen.stride * CHANNELS[0]
    kernel = te.placeholder((chosen.transforms.window, chosen.pieces, depth, CHANNELS[1]), kind, name="kernel")
    shift = te.placeholder(CHANNELS[1:], name="shift")
    out = topi.nn.relu(topi.add(winograd_1d.convolution(data, kernel, chosen, axis, results, before), shift))
    return as_workload(te.create_prim_func([data, kernel, shift, out]).with_attr("layout_free_buffers", [1]))


def is_in_blocks(program):
    """Whether its tasks go from data to results."""
    return program.script().count("T.parallel(") == 1


CASES = [  # shape, axis, taps, filter, padding before and after; with tiles that end with the data, and that do not
    ((1, 100, 16), 1, 3, Filter(4, 3, 1), (1, 1)),
    ((2, 40, 16), 1, 9, Filter(3, 3, 3), (4, 4)),  # pieces, and what follows one signal is not of the next
    ((1, 361, 16), 1, 11, Filter(4, 4, 3, 5), (25, 25)),  # at a distance
    ((1, 90, 16), 1, 3, Filter(2, 3, 1, 3), (0, 6)),
    ((2, 17, 9, 16), 1, 7, Filter(4, 4, 2), (3, 3)),  # along lines' axis
    ((2, 9, 17, 16), 2, 5, Filter(4, 5, 1), (2, 1)),
    ((1, 5, 120, 16), 2, 5, Filter(3, 3, 2, 2), (4, 4)),
    ((1, 4, 60, 16), 1, 3, Filter(2, 3, 1), (1, 1)),  # as volumes have them: few along the axis, many beside
    ((1, 8, 60, 16), 1, 3, Filter(2, 3, 1, 2), (2, 2)),
    ((1, 97, 16), 1, 9, Filter(5, 5, 2), (4, 4)),
    ((1, 97, 16), 1, 3, Filter(6, 3, 1), (1, 1)),
    ((1, 97, 16), 1, 2, Filter(6, 2, 1), (1, 0)),
    ((2, 101, 16), 1, 17, Filter(4, 5, 1, 1, 4), (8, 8)),  # with a stride, which does not divide the data
    ((1, 60, 5, 16), 1, 3, Filter(4, 2, 1, 1, 2), (1, 1)),
]


@pytest.mark.parametrize(("shape", "axis", "taps", "chosen", "ends"), CASES)
def test_every_program_computes_the_convolution(cpu, shape, axis, taps, chosen, ends):
    data, kernel, shift = arrays(shape, taps)
    convolution = strided(convolved(data, kernel, axis, chosen.distance, *ends), axis, chosen.stride)
    expected = np.maximum(convolution + shift, 0)
    inputs = [data, winograd_1d.transformed(kernel, chosen), shift]
    given = workload(shape, axis, chosen, expected.shape[axis], ends[0])

    programs = [given, *(schedule.mod for schedule in sampled(given, cpu, 6))]

    for program in programs:
        found = run_on(program, cpu.tvm(), inputs, np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert {each.space for each in evolution.sample(given, cpu.tvm(), 6, known=set(), seed=0)} == {"winograd_1d"}


def test_tasks_have_a_step_each_or_some_tiles_from_data_to_results(cpu):
    programs = [each.mod for each in sampled(workload((1, 400, 16), 1, Filter(4, 3, 1), 400, 1), cpu, 24)]

    texts = [program.script() for program in programs]
    assert any(is_in_blocks(program) for program in programs)
    assert {text.count("T.parallel(") for text in texts} == {1, 4}  # padding, data, products, results


@pytest.mark.parametrize(("chosen", "has_some"), [(Filter(4, 3, 1), True), (Filter(4, 4, 2), False)])
def test_where_few_tiles_are_along_the_axis_a_task_may_have_some_beside_one_another(cpu, chosen, has_some):
    """Unless they need what others along the axis do."""
    given = workload((1, 8, 1568, 16), 1, chosen, 8, 1)

    programs = [each.mod for each in sampled(given, cpu, 16)]

    assert any(map(is_in_blocks, programs)) == has_some


def test_of_few_tiles_no_task_has_some(cpu):
    programs = [each.mod for each in sampled(workload((1, 24, 16), 1, Filter(4, 3, 1), 24, 1), cpu, 8)]

    assert not any(map(is_in_blocks, programs))


@needs_it
def test_programs_in_bf16_have_the_instruction_and_round_what_they_multiply_once(cpu):
    chosen, shape = Filter(3, 3, 3), (1, 200, 16)
    data, kernel, shift = arrays(shape, 9)
    data = data.astype(ml_dtypes.bfloat16)
    transformed = winograd_1d.transformed(kernel, chosen, "bfloat16")
    expected = np.maximum(convolved(data, kernel, 1, 1, 4, 4) + shift, 0)
    narrow = workload(shape, 1, chosen, 200, 4, "bfloat16")

    proposals = evolution.sample(narrow, cpu.tvm(), 12, known=set(), seed=0)

    assert core_operator(operators(narrow)) == "winograd_conv1d_bf16"
    assert {proposal.space for proposal in proposals} == {"winograd_1d"}
    assert {is_in_blocks(traces.apply(narrow, each.trace).mod) for each in proposals} == {True, False}
    results = []
    for proposal in proposals:
        program = traces.program(narrow, proposal.trace, cpu.tvm())
        assert instructions(program, cpu.tvm())
        results.append(run_on(program, cpu.tvm(), [data, transformed, shift], np.zeros(expected.shape, np.float32)))
    for found in results:
        assert np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)) < 2**-7
        np.testing.assert_allclose(found, results[0], rtol=1e-4, atol=1e-4)  # sums in another order


def test_a_kernel_in_pieces_by_hand():
    """Four taps in pieces of two: F(2, 2) is (g0, g0 + g1, g1) but for signs and order, here (g0, g0 + g1, g1)."""
    kernel = np.array([1, 2, 4, 8], np.float32).reshape(4, 1, 1)

    found = winograd_1d.transformed(kernel, Filter(2, 2, 2))[..., 0, 0]

    np.testing.assert_array_equal(found, [[1, 4], [3, 12], [2, 8]])


@pytest.mark.parametrize(
    ("taps", "rows", "channels", "kind", "chosen"),
    [
        (9, (1, 200), (256, 1024), "float32", (5, 5, 2)),
        (7, (1, 200), (256, 1024), "float32", (4, 4, 2)),
        (3, (1, 4096), (64, 64), "float32", (6, 3, 1)),
        (3, (1, 3000), (80, 384), "bfloat16", (3, 3, 1)),
        (3, (1, 8192), (32, 32), "bfloat16", None),  # transforms of few channels cost what their products save
        (3, (1, 16), (1024, 1024), "float32", None),  # kernels from memory
        (2, (1, 3000), (256, 256), "bfloat16", (4, 2, 1)),
    ],
)
def test_the_filter_is_a_matter_of_taps_and_channels(taps, rows, channels, kind, chosen):
    found = winograd_1d.best_filter(winograd_1d.filters(taps, kind), taps, rows, 1, channels, kind)

    assert found == (Filter(*chosen) if chosen else None)


@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("taps", [5, 6, 7, 9, 11, 17])
def test_a_filter_has_all_taps_whole_or_in_pieces_one_tile_apart(taps, stride):
    found = winograd_1d.filters(taps, stride=stride)

    assert found
    assert all(each.pieces * each.taps * stride >= taps for each in found)
    assert all(each.pieces == 1 or each.tile == each.taps for each in found)


def test_there_is_none_for_taps_whose_tiles_would_be_hundreds_of_lines_of_code():
    assert winograd_1d.filters(3, distance=16)
    assert not winograd_1d.filters(3, distance=17)
    assert winograd_1d.best_filter([], 3, (1, 6144), 1, (64, 128)) is None


@pytest.mark.parametrize(("results", "distance"), [(17, 1), (100, 1), (361, 5), (4096, 3), (2, 16)])
def test_there_are_tiles_for_all_results_and_few_more(results, distance):
    found = winograd_1d.tiles(results, Filter(4, 3, 1, distance))

    needed = -(-results // (4 * distance))
    assert found % distance == 0
    assert needed <= found // distance <= needed * 1.05


def model(data, taps, outputs=64, **attrs):
    """relu(conv(x, w)) of a signal or an image; the kernel is a weight."""
    groups = attrs.get("groups", 1)
    x = relax.Var("x", relax.TensorType(data, "float32"))
    w = relax.Var("w", relax.TensorType((*taps, data[-1] // groups, outputs), "float32"))
    conv, axes = (op.nn.conv1d, "W") if len(taps) == 1 else (op.nn.conv2d, "HW")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            attrs = {"padding": [n // 2 for n in taps] * 2, **attrs}
            made = builder.emit(conv(x, w, data_layout=f"N{axes}C", kernel_layout=f"{axes}IO", **attrs))
            out = builder.emit_output(builder.emit(op.nn.relu(made)))
        builder.emit_func_output(out)
    rng = np.random.default_rng(0)
    return builder.get(), {"w": rng.normal(size=[int(n) for n in w.ty.shape.values]).astype(np.float32)}


@pytest.mark.parametrize(
    ("data", "taps", "attrs", "axis"),
    [
        ((1, 300, 64), (3,), {}, 1),
        ((1, 300, 64), (11,), {"dilation": 3, "padding": 15}, 1),
        ((1, 300, 64), (9,), {"padding": 0}, 1),
        ((1, 300, 12), (17,), {}, 1),
        ((1, 24, 20, 64), (7, 1), {}, 1),
        ((1, 24, 20, 64), (1, 7), {}, 2),
        ((1, 24, 20, 64), (1, 3), {"dilation": [1, 2], "padding": [0, 2, 0, 2]}, 2),
        ((1, 1201, 64), (8,), {"strides": 4, "padding": 2}, 1),
        ((1, 24, 120, 64), (1, 9), {"strides": [1, 3], "padding": [0, 4, 0, 4]}, 2),
    ],
)
def test_a_convolution_along_one_axis_is_replaced_with_what_follows_it_fused(cpu, data, taps, attrs, axis):
    module, weights = model(data, taps, **attrs)
    x = np.random.default_rng(1).normal(size=data).astype(np.float32)
    padding = attrs.get("padding", [n // 2 for n in taps] * 2)
    before = padding if isinstance(padding, int) else padding[axis - 1]
    distance = attrs.get("dilation", 1)
    distance = distance if isinstance(distance, int) else distance[axis - 1]
    kernel = weights["w"].reshape(-1, *weights["w"].shape[-2:])
    strides = attrs.get("strides", 1)
    stride = strides if isinstance(strides, int) else strides[axis - 1]
    expected = np.maximum(strided(convolved(x, kernel, axis, distance, before, before), axis, stride), 0)

    module, kernels = reweight.rewrite(module, weights, [winograd_1d.replacement()])
    [subgraph] = extract_subgraphs(fusion.fuse(module, cpu.tvm()))
    fused = load_module(subgraph.workload)
    found = run_on(fused, cpu.tvm(), [x, kernels["w"]], np.zeros(expected.shape, np.float32))

    assert subgraph.core_operator == "winograd_conv1d"
    assert subgraph.operators[-1] == "max"
    assert list(fused["main"].attrs["layout_free_buffers"]) == [1]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("data", "taps", "attrs"),
    [
        ((1, 300, 64), (3,), {"strides": 3}),
        ((1, 300, 64), (9,), {"strides": 2, "dilation": 2}),
        ((1, 300, 24), (9,), {"strides": 3}),  # no whole vectors side by side
        ((1, 300, 64), (3,), {"groups": 2}),
        ((1, 300, 64), (1,), {}),
        ((1, 300, 62), (3,), {}),  # no vectors
        ((1, 24, 20, 64), (3, 3), {}),
        ((1, 24, 20, 64), (1, 7), {"padding": [1, 3, 1, 3]}),  # around the other axis as well
        ((1, 1, 64), (3,), {}),
    ],
)
def test_other_convolutions_stay(data, taps, attrs):
    module, weights = model(data, taps, **attrs)

    assert reweight.rewrite(module, weights, [winograd_1d.replacement()]) == (module, {})


def test_whoever_wants_no_winograd_gets_none_along_one_axis_either(cpu):
    plain = Model(*model((1, 300, 64), (5,)))

    taken, left = (choose_algorithms(plain, cpu, AlgorithmConfig(winograd=choice)) for choice in ("auto", "never"))

    assert taken.weights["w"].shape == (9, 1, 64, 64)
    assert left.weights["w"].shape == (5, 64, 64)


@pytest.mark.parametrize(("outputs", "wider"), [(196, 208), (200, 208), (64, 64)])
def test_output_channels_are_padded_to_whole_vectors_for_the_products_alone(cpu, outputs, wider):
    module, weights = model((1, 300, 64), (5,), outputs=outputs)
    x = np.random.default_rng(1).normal(size=(1, 300, 64)).astype(np.float32)
    expected = np.maximum(convolved(x, weights["w"], 1, 1, 2, 2), 0)

    module, kernels = reweight.rewrite(module, weights, [winograd_1d.replacement(lanes=16)])
    [subgraph] = extract_subgraphs(fusion.fuse(module, cpu.tvm()))
    fused = load_module(subgraph.workload)
    proposals = evolution.sample(fused, cpu.tvm(), 6, known=set(), seed=0)

    assert kernels["w"].shape[-1] == wider
    assert {proposal.space for proposal in proposals} == {"winograd_1d"}
    for program in (fused, *(traces.program(fused, each.trace, cpu.tvm()) for each in proposals)):
        found = run_on(program, cpu.tvm(), [x, kernels["w"]], np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@needs_it
def test_in_bf16_a_kernel_of_half_the_bytes_is_padded_to_whole_vectors():
    module, weights = model((1, 300, 64), (3,), outputs=40)

    module, kernels = reweight.rewrite(module, weights, [winograd_1d.replacement(16, is_narrow=True)])
    names = {each.core_operator for each in extract_subgraphs(fusion.fuse(module, Target(WITH)))}

    assert kernels["w"].shape == (5, 1, 64, 48)
    assert kernels["w"].dtype == ml_dtypes.bfloat16
    assert "winograd_conv1d_bf16" in names
