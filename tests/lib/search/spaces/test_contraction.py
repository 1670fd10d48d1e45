import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi

from lib.graph import experts
from lib.machine.registers import registers
from lib.search import evolution
from lib.search.spaces import contraction
from lib.tir import analysis, traces
from lib.tir.workload import as_workload
from tests.helpers import matmul, run_on


def convolution(size=14, channels=(8, 32), kernel=3, stride=1, bias=True):
    """An image (1, size, size, channels[0]) through a convolution, with bias and ReLU."""
    image = te.placeholder((1, size, size, channels[0]), name="image")
    weight = te.placeholder((kernel, kernel, *channels), name="weight")
    shift = te.placeholder((channels[1],), name="shift")
    out = topi.nn.conv2d_nhwc(image, weight, stride, kernel // 2, 1)
    if not bias:
        return as_workload(te.create_prim_func([image, weight, out]))
    out = topi.nn.relu(topi.add(out, shift))
    return as_workload(te.create_prim_func([image, weight, shift, out]))


def convolved(image, weight, stride):
    """The same in NumPy, in double precision."""
    around = weight.shape[0] // 2
    padded = np.pad(image, ((0, 0), (around, around), (around, around), (0, 0))).astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, weight.shape[:2], axis=(1, 2))
    return np.einsum("nyxcij,ijco->nyxo", windows[:, ::stride, ::stride], weight)


def attention(heads=4, tokens=32, width=16):
    """Scores of queries and transposed keys, with a mask that all heads share."""
    query, key = te.placeholder((heads, tokens, width), name="q"), te.placeholder((heads, width, tokens), name="k")
    mask = te.placeholder((1, tokens, tokens), "bool", name="mask")
    hidden = te.compute((1, tokens, tokens), lambda n, i, j: tvm.tirx.Select(mask[n, i, j], 0.0, -9.0), name="hidden")
    scores = topi.add(topi.nn.batch_matmul(query, key, transpose_b=False), hidden)
    return as_workload(te.create_prim_func([query, key, mask, scores]))


def sampled(workload, cpu, n=12):
    """Random programs of a workload, at least one."""
    found = evolution.sample(workload, cpu.tvm(), n, known=set(), seed=3)
    assert found
    return [traces.apply(workload, proposal.trace) for proposal in found]


def is_tiled(schedule):
    """Whether the sums stand in a buffer of their own that is filled with vectors."""
    text = schedule.mod.script()
    return 'scope="local"' in text and "T.vectorized(" in text and "T.parallel(" in text


def assert_tiled_and_right(schedules, cpu, arrays, expected):
    for schedule in schedules:
        assert is_tiled(schedule)
        found = run_on(schedule.mod, cpu.tvm(), arrays, np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (3, 2), (5, 1)])
def test_every_program_of_a_convolution_computes_it(cpu, kernel, stride):
    workload = convolution(kernel=kernel, stride=stride)
    rng = np.random.default_rng(0)
    image, weight = (rng.normal(size=s).astype(np.float32) for s in ((1, 14, 14, 8), (kernel, kernel, 8, 32)))
    shift = rng.normal(size=32).astype(np.float32)
    expected = np.maximum(convolved(image, weight, stride) + shift, 0)

    schedules = sampled(workload, cpu)

    assert len(schedules) > 6
    assert_tiled_and_right(schedules, cpu, [image, weight, shift], expected)


def test_weights_that_a_table_chooses_are_multiplied_in_register_tiles(cpu):
    """Of experts: tiles of four rows, each with weights of its own, in blocks of columns."""
    rng = np.random.default_rng(0)
    rows, weight = (rng.normal(size=s).astype(np.float32) for s in ((6, 4, 40), (3, 2, 40, 48)))
    expert = np.array([0, 0, 2, 2, 2, 1])
    x, w, e = (te.placeholder(a.shape, str(a.dtype), name) for name, a in (("x", rows), ("w", weight), ("e", expert)))
    workload = as_workload(te.create_prim_func([x, w, e, experts.products(x, w, e)]))
    expected = np.einsum("tik,tbkc->tibc", rows.astype(np.float64), weight[expert])

    schedules = sampled(workload, cpu)

    assert len(schedules) > 6
    assert_tiled_and_right(schedules, cpu, [rows, weight, expert], expected)


def test_a_signal_is_shared_out_by_its_elements(cpu):
    """Its one line was what tasks shared, so that there were as many as there are columns of tiles: one."""
    lanes = registers(cpu.tvm()).lanes
    rng = np.random.default_rng(0)
    signal, weight = (rng.normal(size=s).astype(np.float32) for s in ((1, 98, 8), (3, 8, lanes)))
    data, kernel = te.placeholder(signal.shape, name="signal"), te.placeholder(weight.shape, name="weight")
    out = topi.nn.conv1d(data, kernel, 1, 0, 1, data_layout="NWC", kernel_layout="WIO")
    workload = as_workload(te.create_prim_func([data, kernel, out]))
    expected = sum(signal[:, tap : tap + 96].astype(np.float64) @ weight[tap] for tap in range(3))

    schedules = sampled(workload, cpu)

    tasks = {int(loop.extent) for schedule in schedules for loop in analysis.walk(schedule.mod["main"].body, tirx.For)
             if loop.kind == tirx.ForKind.PARALLEL}  # fmt: skip
    assert max(tasks) > 2
    for schedule in schedules:
        found = run_on(schedule.mod, cpu.tvm(), [signal, weight], np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_windows_of_one_line_are_searched_whatever_part_of_an_image_a_task_has(cpu):
    image, weight = te.placeholder((1, 14, 14, 8), name="image"), te.placeholder((1, 7, 8, 32), name="weight")
    out = topi.nn.conv2d_nhwc(image, weight, 1, [0, 3], 1)
    workload = as_workload(te.create_prim_func([image, weight, out]))

    assert len(sampled(workload, cpu, 24)) == 24


def grouped(groups=2, channels=(16, 32), size=14):
    """A 3x3 convolution in groups, with ReLU."""
    image = te.placeholder((1, size, size, channels[0]), name="image")
    weight = te.placeholder((3, 3, channels[0] // groups, channels[1]), name="weight")
    out = topi.nn.relu(topi.nn.group_conv2d_nhwc(image, weight, 1, 1, 1, groups))
    return as_workload(te.create_prim_func([image, weight, out]))


def in_groups(groups, channels, size=14):
    """Data, weights and results of `grouped`."""
    rng, ins, outs = np.random.default_rng(0), channels[0] // groups, channels[1] // groups
    image = rng.normal(size=(1, size, size, channels[0])).astype(np.float32)
    weight = rng.normal(size=(3, 3, ins, channels[1])).astype(np.float32)
    parts = [
        convolved(image[..., ins * n : ins * (n + 1)], weight[..., outs * n : outs * (n + 1)], 1) for n in range(groups)
    ]
    return image, weight, np.maximum(np.concatenate(parts, axis=-1), 0)


def test_every_program_of_a_convolution_in_groups_computes_it(cpu):
    image, weight, expected = in_groups(2, (16, 32))

    schedules = sampled(grouped(), cpu)

    assert contraction.fits(grouped(), cpu.tvm())
    assert len(schedules) > 6
    for schedule in schedules:
        assert is_tiled(schedule)
        found = run_on(schedule.mod, cpu.tvm(), [image, weight], np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", [2, 4, 8])
def test_groups_that_fill_a_part_of_a_vector_share_it(cpu, share):
    lanes = registers(cpu.tvm()).lanes
    of_group = lanes // share
    if of_group < 2:
        pytest.skip("vectors of this CPU are too short")
    groups, channels = 2 * share, (2 * lanes, 2 * lanes)
    image, weight, expected = in_groups(groups, channels)

    schedules = sampled(grouped(groups, channels), cpu)

    assert len(schedules) > 6
    for schedule in schedules:
        assert is_tiled(schedule)
        tiles = [loop for loop in analysis.walk(schedule.mod["main"].body, tirx.For)
                 if loop.kind == tirx.ForKind.VECTORIZED and int(loop.extent) == lanes]  # fmt: skip
        assert tiles
        found = run_on(schedule.mod, cpu.tvm(), [image, weight], np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("share", "ins_of_outs"), [(16, 1), (8, 2), (8, 3)])
def test_other_groups_of_few_channels_are_left_alone(cpu, share, ins_of_outs):
    """Of less than a quarter of a vector, and of one column, or of another number of channels."""
    columns = max(1, registers(cpu.tvm()).lanes // share)
    groups = 32 // columns

    assert not contraction.fits(grouped(groups, (groups * columns * ins_of_outs, 32)), cpu.tvm())


def test_sums_that_nothing_follows_are_copied_out(cpu):
    workload = convolution(bias=False)
    rng = np.random.default_rng(0)
    image, weight = (rng.normal(size=s).astype(np.float32) for s in ((1, 14, 14, 8), (3, 3, 8, 32)))

    for schedule in sampled(workload, cpu, 4):
        assert is_tiled(schedule)
        found = run_on(schedule.mod, cpu.tvm(), [image, weight], np.zeros((1, 14, 14, 32), np.float32))
        np.testing.assert_allclose(found, convolved(image, weight, 1), rtol=1e-4, atol=1e-4)


def test_every_program_of_attention_scores_computes_them(cpu):
    workload = attention()
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=s).astype(np.float32) for s in ((4, 32, 16), (4, 16, 32)))
    mask = rng.random((1, 32, 32)) < 0.5

    for schedule in sampled(workload, cpu):
        assert is_tiled(schedule)
        found = run_on(schedule.mod, cpu.tvm(), [query, key, mask], np.zeros((4, 32, 32), np.float32))
        np.testing.assert_allclose(found, query @ key + np.where(mask, 0, -9), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(37, 53, 29), (37, 7, 29), (28, 14, 96), (26, 3, 64)])
def test_every_program_of_a_product_of_extents_that_vectors_do_not_divide_computes_it(cpu, rows, columns, depth):
    x, w = te.placeholder((rows, depth), name="x"), te.placeholder((depth, columns), name="w")
    shift = te.placeholder((columns,), name="shift")
    out = topi.nn.relu(topi.add(topi.nn.matmul(x, w), shift))
    workload = as_workload(te.create_prim_func([x, w, shift, out]).with_attr("layout_free_buffers", [1]))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in ((rows, depth), (depth, columns), (columns,))]

    schedules = sampled(workload, cpu)

    assert len(schedules) > 6
    for schedule in schedules:
        assert is_tiled(schedule)
        found = run_on(schedule.mod, cpu.tvm(), arrays, np.full((rows, columns), np.nan, np.float32))
        np.testing.assert_allclose(found, np.maximum(arrays[0] @ arrays[1] + arrays[2], 0), rtol=1e-4, atol=1e-4)


def in_slabs(schedule):
    """Whether a task goes through the reduction in parts: TVM's `rfactor` names the sums of one so."""
    return "_rf_local" in schedule.mod.script()


@pytest.mark.parametrize(("size", "stride"), [(7, 1), (14, 2)])
def test_every_program_of_a_deep_convolution_computes_it_in_slabs_and_without(cpu, size, stride):
    workload = convolution(size=size, channels=(1024, 32), stride=stride)
    rng = np.random.default_rng(0)
    shapes = ((1, size, size, 1024), (3, 3, 1024, 32), (32,))
    image, weight, shift = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    expected = np.maximum(convolved(image, weight, stride) + shift, 0)

    schedules = sampled(workload, cpu)

    assert {in_slabs(schedule) for schedule in schedules} == {True, False}
    for schedule in schedules:
        assert is_tiled(schedule)
        found = run_on(schedule.mod, cpu.tvm(), [image, weight, shift], np.full(expected.shape, np.nan, np.float32))
        assert np.abs(found - expected).max() < 1e-5 * expected.max()


@pytest.mark.parametrize(
    ("size", "channels", "why"),
    [(7, 64, "its weights stay near anyway"), (5, 1024, "few rows read them again")],
)
def test_a_convolution_has_no_slabs_where(cpu, size, channels, why):
    assert not any(map(in_slabs, sampled(convolution(size=size, channels=(channels, 32)), cpu))), why


def test_attention_over_a_prime_number_of_tokens_is_tiled(cpu):
    workload = attention(tokens=37)
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=s).astype(np.float32) for s in ((4, 37, 16), (4, 16, 37)))
    mask = rng.random((1, 37, 37)) < 0.5

    for schedule in sampled(workload, cpu):
        assert is_tiled(schedule)
        found = run_on(schedule.mod, cpu.tvm(), [query, key, mask], np.full((4, 37, 37), np.nan, np.float32))
        np.testing.assert_allclose(found, query @ key + np.where(mask, 0, -9), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 2])
def test_every_program_of_a_convolution_of_images_of_prime_size_computes_it(cpu, stride):
    workload = convolution(size=37, channels=(8, 40), stride=stride)
    rng = np.random.default_rng(0)
    image, weight = (rng.normal(size=s).astype(np.float32) for s in ((1, 37, 37, 8), (3, 3, 8, 40)))
    shift = rng.normal(size=40).astype(np.float32)
    expected = np.maximum(convolved(image, weight, stride) + shift, 0)

    for schedule in sampled(workload, cpu):
        assert is_tiled(schedule)
        found = run_on(schedule.mod, cpu.tvm(), [image, weight, shift], np.full(expected.shape, np.nan, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("workload", "why"),
    [
        (matmul(16, 1, 64), "it has one column"),
        (as_workload(te.create_prim_func([x := te.placeholder((4, 32)), topi.nn.softmax(x)])), "two sums"),
        (as_workload(te.create_prim_func([x := te.placeholder((4, 32)), topi.sum(x, 1)])), "no products"),
    ],
)
def test_what_is_no_contraction_is_left_to_metaschedule(cpu, workload, why):
    assert not contraction.fits(workload, cpu.tvm()), why


def test_weights_are_not_columns_when_their_rows_lie_together(cpu):
    x, w = te.placeholder((16, 64), name="x"), te.placeholder((32, 64), name="w")

    workload = as_workload(te.create_prim_func([x, w, topi.nn.matmul(x, w, transpose_b=True)]))

    assert not contraction.fits(workload, cpu.tvm())


def test_a_product_followed_by_what_does_not_move_falls_back_on_metaschedule(cpu):
    x, w = te.placeholder((16, 64), name="x"), te.placeholder((64, 32), name="w")
    rows = topi.nn.matmul(x, w)
    mirrored = topi.add(rows, topi.flip(rows, 0))  # needs the first and the last row at once
    workload = as_workload(te.create_prim_func([x, w, mirrored]))

    found = evolution.sample(workload, cpu.tvm(), 4, known=set(), seed=0)

    assert contraction.fits(workload, cpu.tvm())
    assert len(found) == 4
    assert not any(is_tiled(traces.apply(workload, proposal.trace)) for proposal in found)
