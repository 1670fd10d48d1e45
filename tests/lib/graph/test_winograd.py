import json
import re

import ml_dtypes
import numpy as np
import pytest
from tvm import relax, te, topi
from tvm.relax import op
from tvm.target import Target

from lib.graph import fusion, reweight, winograd
from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from lib.graph.filters import integral, minimal
from lib.graph.fusion import Model
from lib.graph.subgraphs import extract_subgraphs
from lib.machine.registers import registers
from lib.machine.targets import CpuTarget
from lib.search import evolution
from lib.tir import traces
from lib.tir.operators import operators
from lib.tir.outline import outline
from lib.tir.workload import as_workload, load_module
from tests.helpers import packed, results, run_on
from tests.lib.search.spaces.test_contraction import convolved, sampled
from tests.lib.tir.test_dot import WITH, instructions, needs_avx2, needs_it


def rewrite(module, weights, is_narrow=False):
    return reweight.rewrite(module, weights, [winograd.replacement(is_narrow=is_narrow)])


def workload(tile, size=10, channels=(16, 32), padding=None, kind="float32", batch=1, taps=3):
    """A convolution with bias and ReLU; in bf16 with a kernel that may be packed."""
    image = te.placeholder((batch, size, size, channels[0]), kind, name="image")
    kernel = te.placeholder((tile + taps - 1, tile + taps - 1, *channels), kind, name="kernel")
    shift = te.placeholder((channels[1],), name="shift")
    out = topi.nn.relu(topi.add(winograd.convolution(image, kernel, tile, padding or [taps // 2] * 4), shift))
    function = te.create_prim_func([image, kernel, shift, out])
    return as_workload(function if kind == "float32" else function.with_attr("layout_free_buffers", [1]))


def arrays(size=10, channels=(16, 32), batch=1, taps=3):
    rng = np.random.default_rng(0)
    shapes = ((batch, size, size, channels[0]), (taps, taps, *channels), (channels[1],))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(("tile", "taps"), [(2, 3), (4, 3), (2, 5), (4, 5), (2, 7)])
@pytest.mark.parametrize("size", [8, 10, 7])  # with tiles that end with the image, and that reach beyond it
def test_it_is_the_convolution(cpu, tile, taps, size):
    image, kernel, shift = arrays(size, taps=taps)
    expected = np.maximum(convolved(image, kernel, 1) + shift, 0)
    inputs = [image, winograd.transformed(kernel, tile), shift]

    found = run_on(workload(tile, size, taps=taps), cpu.tvm(), inputs, np.zeros(expected.shape, np.float32))

    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


def test_padding_may_differ_from_side_to_side(cpu):
    image, kernel, shift = arrays()
    padded = np.pad(image, ((0, 0), (0, 2), (1, 0), (0, 0)))
    expected = np.maximum(convolved(padded, kernel, 1)[:, 1:-1, 1:-1] + shift, 0)
    inputs = [image, winograd.transformed(kernel, 2), shift]

    found = run_on(workload(2, padding=(0, 1, 2, 0)), cpu.tvm(), inputs, np.zeros(expected.shape, np.float32))

    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(("tile", "taps"), [(2, 3), (4, 3), (4, 5), (2, 7)])
def test_every_scheduled_program_computes_it(cpu, tile, taps):
    image, kernel, shift = arrays(taps=taps)
    expected = np.maximum(convolved(image, kernel, 1) + shift, 0)
    inputs = [image, winograd.transformed(kernel, tile), shift]

    schedules = sampled(workload(tile, taps=taps), cpu, 8)

    assert len(schedules) == 8
    texts = [schedule.mod.script() for schedule in schedules]
    assert any("for a_b_p_" in text for text in texts)  # products by positions
    assert any("for p_" in text for text in texts)  # and by tiles
    for schedule, text in zip(schedules, texts, strict=True):
        assert text.count("T.parallel(") == 4  # padding, data, products, results
        found = run_on(schedule.mod, cpu.tvm(), inputs, np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


def is_in_blocks(program):
    """Whether its tasks go from data to results."""
    return program.mod.script().count("T.parallel(") == 1


@pytest.mark.parametrize(
    ("tile", "size", "batch", "taps"), [(2, 16, 1, 3), (4, 32, 1, 3), (4, 34, 1, 3), (2, 18, 2, 3), (4, 33, 1, 5)]
)
def test_large_images_may_be_computed_some_lines_of_tiles_at_a_time(cpu, tile, size, batch, taps):
    image, kernel, shift = arrays(size, batch=batch, taps=taps)
    expected = np.maximum(convolved(image, kernel, 1) + shift, 0)
    inputs = [image, winograd.transformed(kernel, tile), shift]

    given = workload(tile, size, batch=batch, taps=taps)
    in_blocks = [program for program in sampled(given, cpu, 16) if is_in_blocks(program)]

    assert len(in_blocks) > 2
    for program in in_blocks:
        found = run_on(program.mod, cpu.tvm(), inputs, np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


def test_tasks_of_some_lines_have_register_tiles_that_divide_no_line(cpu):
    """A line has 26; two lines have 52, which tiles of four rows divide."""
    image, kernel, shift = arrays(104, (8, 48))
    expected = np.maximum(convolved(image, kernel, 1) + shift, 0)
    inputs = [image, winograd.transformed(kernel, 4), shift]

    found = [each for each in sampled(workload(4, 104, (8, 48)), cpu, 24) if is_in_blocks(each)]

    heights = {each: int(outline(each.mod).tile.split()[0]) for each in found}
    others = [each for each, height in heights.items() if 26 % height]
    assert others
    result = run_on(others[0].mod, cpu.tvm(), inputs, np.zeros(expected.shape, np.float32))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


def tasks_of(program):
    return int(re.search(r"T\.parallel\((\d+)", program.mod.script()).group(1))


@pytest.mark.parametrize(("size", "batch"), [(160, 1), (157, 2)])  # with tiles that reach beyond the image
def test_of_wide_images_a_task_may_have_a_part_of_one_line_of_tiles(cpu, size, batch):
    image, kernel, shift = arrays(size, batch=batch)
    expected = np.maximum(convolved(image, kernel, 1) + shift, 0)
    inputs = [image, winograd.transformed(kernel, 4), shift]

    found = [program for program in sampled(workload(4, size, batch=batch), cpu, 24) if is_in_blocks(program)]

    lines = 40 * batch
    assert {tasks_of(program) > lines for program in found} == {True, False}
    of_parts = [program for program in found if tasks_of(program) > lines]
    for program in of_parts[:3]:
        assert tasks_of(program) % lines == 0
        result = run_on(program.mod, cpu.tvm(), inputs, np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


def test_a_line_of_tiles_that_a_cache_holds_is_whole(cpu):
    """Of 39 tiles, each of 36 places and 48 channels, where 38 are the most."""
    wide, narrow = (sampled(workload(4, size), cpu, 24) for size in (156, 148))

    assert any(tasks_of(program) > 39 for program in wide if is_in_blocks(program))
    assert not any(tasks_of(program) > 37 for program in narrow if is_in_blocks(program))


@pytest.mark.parametrize(("tile", "size"), [(4, 28), (2, 13)])
def test_of_seven_lines_of_tiles_no_task_has_some(cpu, tile, size):
    assert not any(map(is_in_blocks, sampled(workload(tile, size), cpu, 16)))


def of_groups(image, kernel, groups):
    """The convolutions of each group's channels, side by side."""
    apart = zip(np.split(image, groups, axis=3), np.split(kernel, groups, axis=3), strict=True)
    return np.concatenate([convolved(own, weight, 1) for own, weight in apart], axis=3)


@pytest.mark.parametrize(("tile", "size", "groups", "of_group"), [(4, 10, 3, (16, 24)), (2, 17, 2, (8, 16))])
def test_in_groups_it_is_the_convolution_of_each(cpu, tile, size, groups, of_group):
    """In stages, and where there are lines enough also some lines of tiles at a time."""
    image, kernel, _ = arrays(size, (of_group[0], groups * of_group[1]))
    image = np.concatenate([image * (n + 1) for n in range(groups)], axis=3)
    expected = of_groups(image, kernel, groups)
    data, weight = (te.placeholder(shape) for shape in (image.shape, (tile + 2, tile + 2, *kernel.shape[2:])))
    found = winograd.convolution(data, weight, tile, [1] * 4, groups)
    given = as_workload(te.create_prim_func([data, weight, found]).with_attr("layout_free_buffers", [1]))

    proposals = evolution.sample(given, cpu.tvm(), 12, known=set(), seed=0)

    assert {proposal.space for proposal in proposals} == {"winograd"}
    programs = [traces.program(given, proposal.trace, cpu.tvm()) for proposal in proposals]
    assert any(is_in_blocks(traces.apply(given, each.trace)) for each in proposals) == (size == 17)
    for program in (given, *programs):
        inputs = [image, winograd.transformed(kernel, tile)]
        result = run_on(program, cpu.tvm(), inputs, np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


def of_volumes(tile, shape, depth, padding, outputs=32, kind="float32"):
    volume, kernel = te.placeholder(shape, kind), te.placeholder((tile + 2, tile + 2, depth, shape[4], outputs), kind)
    return as_workload(te.create_prim_func([volume, kernel, winograd.convolution(volume, kernel, tile, padding)]))


def convolved_volumes(volumes, kernel, padding):
    """The sum of products of shifted volumes with each tap of the kernel."""
    around = [(0, 0), *zip(padding[:3], padding[3:], strict=True), (0, 0)]
    whole = np.pad(volumes, around)
    extents = [n - k + 1 for n, k in zip(whole.shape[1:4], kernel.shape[:3], strict=True)]
    total = np.zeros((len(volumes), *extents, kernel.shape[4]))
    for tap in np.ndindex(kernel.shape[:3]):
        at = tuple(slice(t, t + n) for t, n in zip(tap, extents, strict=True))
        total += whole[(slice(None), *at)] @ kernel[tap].astype(np.float64)
    return total.astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "depth", "padding"),
    [
        ((1, 4, 8, 8, 16), 3, (1, 1, 1, 1, 1, 1)),
        ((2, 3, 7, 6, 16), 3, (1, 1, 0, 1, 1, 1)),  # images between two volumes belong to none
        ((2, 5, 6, 9, 16), 2, (0, 1, 1, 1, 1, 0)),
        ((1, 2, 8, 8, 16), 1, (0, 1, 1, 0, 1, 1)),
    ],
)
@pytest.mark.parametrize("tile", [2, 4])
def test_a_convolution_of_volumes_sums_over_images_too(cpu, tile, shape, depth, padding):
    rng = np.random.default_rng(0)
    volumes = rng.normal(size=shape).astype(np.float32)
    kernel = rng.normal(size=(depth, 3, 3, shape[4], 32)).astype(np.float32)
    expected = convolved_volumes(volumes, kernel, padding)
    given, inputs = of_volumes(tile, shape, depth, padding), [volumes, winograd.transformed(kernel, tile)]

    schedules = sampled(given, cpu, 3)

    for program in (given, *(schedule.mod for schedule in schedules)):
        found = run_on(program, cpu.tvm(), inputs, np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=5e-4)
    assert len(schedules) == 3


@needs_it
@pytest.mark.parametrize("size", [10, 16])  # in stages, and in blocks too
def test_every_program_in_bf16_has_the_instruction_and_rounds_what_it_multiplies_once(cpu, size):
    image, kernel, shift = arrays(size)
    image, transformed = image.astype(ml_dtypes.bfloat16), winograd.transformed(kernel, 2, "bfloat16")
    expected = np.maximum(convolved(image.astype(np.float32), kernel, 1) + shift, 0)
    lines = minimal(2, 3).data.astype(np.float32)
    narrow = workload(2, size, kind="bfloat16")

    proposals = evolution.sample(narrow, cpu.tvm(), 6, known=set(), seed=0)

    assert {proposal.space for proposal in proposals} == {"winograd"}
    assert any(is_in_blocks(traces.apply(narrow, each.trace)) for each in proposals) == (size == 16)
    results = []
    for proposal in proposals:
        program = traces.program(narrow, proposal.trace, cpu.tvm())
        assert instructions(program, cpu.tvm())
        results.append(run_on(program, cpu.tvm(), [image, transformed, shift], np.zeros(expected.shape, np.float32)))
    spread = np.abs(lines).sum(1).max() ** 2  # elements that a transform adds
    for found in results:
        np.testing.assert_allclose(found, expected, atol=spread * 2**-8 * np.abs(expected).max(), rtol=0)
        assert np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)) < 2**-7
        np.testing.assert_allclose(found, results[0], rtol=1e-4, atol=1e-4)  # sums in another order


def of_bytes(tile, size, channels=(16, 48), groups=1, value=0):
    """A convolution of bytes of some value around them, its inputs, and what it is."""
    rng = np.random.default_rng(size)
    image = rng.integers(0, 256, (1, size, size, channels[0]), dtype=np.uint8)
    image[0, : size // 2] = rng.choice([0, 255], (size // 2, size, channels[0]))
    kernel = rng.choice([-128, -127, 5, 127], (3, 3, channels[0] // groups, channels[1])).astype(np.int8)
    padded = np.pad(image, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=value)
    expected = of_groups(padded.astype(np.float64), kernel.astype(np.float64), groups)[:, 1:-1, 1:-1]
    shape = (tile + 2, tile + 2, *kernel.shape[2:])
    data, weight = te.placeholder(image.shape, "uint8"), te.placeholder(shape, "int16")
    found = winograd.convolution(data, weight, tile, [1] * 4, groups, value)
    workload = as_workload(te.create_prim_func([data, weight, found]).with_attr("layout_free_buffers", [1]))
    return workload, [image, winograd.transformed(kernel, tile, "int16")], expected.astype(np.int32)


@pytest.mark.parametrize("tile", [2, 4])
@pytest.mark.parametrize(("size", "value"), [(8, 0), (9, 17), (7, 255)])
def test_of_bytes_it_is_exact(cpu, tile, size, value):
    """Of the largest and the smallest there are, among others, whose sums are the largest, too."""
    workload, inputs, expected = of_bytes(tile, size, value=value)

    np.testing.assert_array_equal(run_on(workload, cpu.tvm(), inputs, np.zeros_like(expected)), expected)


@needs_avx2
@pytest.mark.parametrize(("tile", "size", "groups"), [(2, 17, 1), (4, 10, 1), (4, 33, 1), (4, 9, 2)])
def test_programs_of_bytes_multiply_pairs_and_every_one_is_exact(tile, size, groups):
    avx2 = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver3", "num-cores": 2})
    workload, inputs, expected = of_bytes(tile, size, groups=groups)

    proposals = evolution.sample(workload, avx2, 5 if size > 16 else 2, known=set(), seed=0)

    assert {proposal.space for proposal in proposals} == {"winograd"}
    assert any(is_in_blocks(traces.apply(workload, each.trace)) for each in proposals) == (size > 16)
    programs = [traces.program(workload, proposal.trace, avx2) for proposal in proposals]
    assert instructions(programs[0], avx2, "vpmaddwd")
    for program in programs:
        np.testing.assert_array_equal(run_on(program, avx2, inputs, np.zeros_like(expected)), expected)


@pytest.mark.parametrize(("weight", "channels", "size"), [(127, 64, 6), (127, 128, 4), (40, 128, 6)])
def test_tiles_of_bytes_are_as_large_as_sums_of_their_weights_allow(weight, channels, size):
    given, weights = model(kind="int8", inputs=channels)
    weights["w"][:] = weight

    _, kernels = reweight.rewrite(given, weights, [winograd.replacement_in_pairs("", weights)])

    assert kernels["w"].shape == (size, size, channels, 64)
    assert kernels["w"].dtype == np.int16


@pytest.mark.parametrize("tile", [2, 4])
@pytest.mark.parametrize("sign", [1, -1])
def test_no_sum_is_larger_than_what_is_foretold_of_its_weights(tile, sign):
    """Of as many channels as data that make one position's sum as large as it gets leave in 32 bits: one more is too
    many."""
    kernel = np.full((3, 3, 1, 1), 127 * sign, np.int8)
    lines, factors = integral(tile, 3)[0].data, winograd.transformed(kernel, tile, "int16")[..., 0, 0].astype(np.int64)
    sums = []
    for at in np.ndindex(factors.shape):
        entries = np.outer(lines[at[0]], lines[at[1]])
        for side in (1, -1):
            image = np.where(side * entries > 0, 255, 0)
            sums.append(abs(int((lines @ image @ lines.T)[at]) * factors[at]))
    most = int((2**31 - 1) // max(sums))

    found = [winograd._fits_sums(np.repeat(kernel, n, axis=2), tile) for n in (most, most + 1)]

    assert found == [True, False]


def test_those_of_bytes_are_taken_where_pairs_are_multiplied_alone(cpu):
    """CPUs that multiply bytes have four times as many in a vector."""
    parts = {**json.loads(cpu.text), "mattr": []}  # a virtual machine may hide some of its CPU's
    zen3, zen4 = (CpuTarget(json.dumps({**parts, "mcpu": mcpu}), cpu.threads, 256) for mcpu in ("znver3", "znver4"))
    plain = Model(*model(kind="int8"))
    plain.weights["w"][:] = 127  # of which no two fit sums of 16 bits

    pairs, quads = (choose_algorithms(plain, target, AlgorithmConfig()).weights for target in (zen3, zen4))

    assert pairs["w"].shape == (6, 6, 64, 64)
    assert quads["w"].shape == (3, 3, 64, 64)
    assert choose_algorithms(plain, zen3, AlgorithmConfig(winograd="never")).weights["w"].dtype == np.int16


def test_arm_has_its_own_instruction_in_them():
    arm = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "num-cores": 2, "mcpu": "neoverse-v1"})
    narrow = workload(2, kind="bfloat16")

    [proposal] = evolution.sample(narrow, arm, 1, known=set(), seed=0)

    assert proposal.space == "winograd"
    assert instructions(packed(narrow, proposal.trace, arm), arm, "\tbfdot\t")


def test_volumes_may_be_in_groups_as_well(cpu):
    rng = np.random.default_rng(0)
    volumes, kernel = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 3, 8, 8, 16), (3, 3, 3, 8, 16)))
    apart = zip(np.split(volumes, 2, axis=4), np.split(kernel, 2, axis=4), strict=True)
    expected = np.concatenate([convolved_volumes(*each, (1,) * 6) for each in apart], axis=4)
    data, weight = (te.placeholder(shape) for shape in (volumes.shape, (6, 6, *kernel.shape[:1], *kernel.shape[3:])))
    given = as_workload(te.create_prim_func([data, weight, winograd.convolution(data, weight, 4, (1,) * 6, 2)]))

    schedules = sampled(given, cpu, 2)

    for program in (given, *(schedule.mod for schedule in schedules)):
        inputs = [volumes, winograd.transformed(kernel, 4)]
        found = run_on(program, cpu.tvm(), inputs, np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("image", "channels", "tile"),
    [
        ((56, 56), (64, 64), 2),
        ((14, 14), (256, 256), 2),
        ((7, 7), (512, 512), 2),
        ((56, 56), (16, 16), 0),  # transforms of few channels cost what their products save
        ((1, 1), (512, 512), 0),
    ],
)
def test_in_bf16_tiles_are_of_two_or_there_are_none(image, channels, tile):
    assert winograd.best_tile(image, channels, kind="bfloat16") == tile


def test_the_tile_for_volumes_counts_what_a_result_sees():
    """Products are three times as many as of images; transforms are not."""
    assert winograd.best_tile((56, 56), (16, 16), kind="bfloat16") == 0
    assert winograd.best_tile((56, 56), (16, 16), (8, 8), depth=3, kind="bfloat16") == 2
    assert winograd.best_tile((48, 48), (16, 16), (48, 48), depth=3, kind="bfloat16") == 0  # through memory


def test_in_bf16_the_convolution_is_an_operator_of_its_own_with_a_kernel_of_half_the_bytes():
    module, kernels = rewrite(*model(), is_narrow=True)

    [subgraph] = [
        s for s in extract_subgraphs(fusion.fuse(module, Target(WITH))) if s.tunable and "conv" in s.core_operator
    ]

    assert kernels["w"].shape == (4, 4, 64, 64)
    assert kernels["w"].dtype == ml_dtypes.bfloat16
    assert subgraph.core_operator == "winograd_conv2d_bf16"


def test_a_kernel_transformed_by_hand():
    kernel = np.arange(9, dtype=np.float32).reshape(3, 3, 1, 1)
    matrix = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])  # Lavin and Gray, section 4.1

    expected = matrix @ np.arange(9).reshape(3, 3) @ matrix.T

    np.testing.assert_allclose(winograd.transformed(kernel, 2)[:, :, 0, 0], expected)


@pytest.mark.parametrize(
    ("image", "channels", "tile"),
    [
        ((56, 56), (64, 64), 4),
        ((28, 28), (128, 128), 4),
        ((7, 7), (512, 512), 2),  # a 6x6 kernel of 512 channels is 38 MB: reading it takes longer than what it saves
        ((1, 1), (512, 512), 0),  # one pixel: nothing is shared
    ],
)
def test_the_tile_is_a_matter_of_pixels_and_channels(image, channels, tile):
    assert winograd.best_tile(image, channels) == tile


@pytest.mark.parametrize(
    ("image", "channels", "kind", "tile"),
    [
        ((160, 160), (8, 8), "float32", 4),
        ((28, 28), (8, 8), "float32", 0),  # seven lines of tiles
        ((80, 80), (32, 32), "bfloat16", 2),
        ((14, 14), (32, 32), "bfloat16", 0),
        ((80, 80), (24, 24), "bfloat16", 0),
        ((64, 64), (64, 16), "bfloat16", 0),
    ],
)
def test_large_images_pay_with_fewer_channels(image, channels, kind, tile):
    assert winograd.best_tile(image, channels, kind=kind) == tile


@pytest.mark.parametrize(
    ("image", "channels", "tile"),
    [
        ((14, 14), (24, 48), 0),
        ((28, 28), (32, 32), 2),  # fourteen lines of tiles, of larger ones seven
        ((112, 112), (16, 16), 4),
        ((13, 13), (48, 192), 4),
    ],
)
def test_bytes_of_few_channels_pay_where_there_are_lines_of_tiles_enough(image, channels, tile):
    assert winograd.best_tile(image, channels, kind="int16") == tile


@pytest.mark.parametrize(
    ("taps", "kind", "tile"),
    [(5, "float32", 4), (7, "float32", 2), (9, "float32", 0), (1, "float32", 0), (5, "bfloat16", 0)],
)
def test_larger_kernels_gain_more_and_those_of_many_taps_have_no_transforms(taps, kind, tile):
    assert winograd.best_tile((28, 28), (64, 64), kind=kind, taps=taps) == tile


@pytest.mark.parametrize(
    ("image", "channels", "groups", "tile"),
    [
        ((56, 56), 48, 2, 4),  # 1.96 times as fast as it is; RegNet's (two cores of a Zen 3, benchmarks/winograd_2d)
        ((14, 14), 336, 14, 4),  # 1.54
        ((14, 14), 512, 8, 4),  # 2.08
        ((7, 7), 888, 37, 0),  # 0.98 at best
        ((14, 14), 512, 32, 0),  # 0.99; ResNeXt's
        ((56, 56), 256, 32, 0),  # 0.96
    ],
)
def test_groups_need_channels_that_share_transforms(image, channels, groups, tile):
    assert winograd.best_tile(image, (channels, channels), groups=groups) == tile


@pytest.mark.parametrize(("image", "channels", "tile"), [((28, 28), (128, 128), 4), ((14, 14), (256, 256), 2)])
def test_kernels_from_memory_cost_more_where_twice_as_much_is_multiplied_a_cycle(image, channels, tile):
    assert winograd.best_tile(image, channels) == 4
    assert winograd.best_tile(image, channels, instructions="avx512x2") == tile


def model(**attrs):
    """relu(conv(x, w)); the kernel is a weight."""
    size, outputs, inputs = attrs.pop("kernel", 3), attrs.pop("outputs", 64), attrs.pop("inputs", 64)
    kind, padding = attrs.pop("kind", "float32"), attrs.pop("padding", size // 2)
    if kind == "int8":
        attrs["out_dtype"] = "int32"
    x = relax.Var("x", relax.TensorType((1, 28, 28, inputs), "uint8" if kind == "int8" else kind))
    w = relax.Var("w", relax.TensorType((size, size, inputs // attrs.get("groups", 1), outputs), kind))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            conv = op.nn.conv2d(x, w, padding=padding, data_layout="NHWC", kernel_layout="HWIO", **attrs)
            out = builder.emit_output(builder.emit(op.nn.relu(builder.emit(conv))))
        builder.emit_func_output(out)
    rng = np.random.default_rng(0)
    return builder.get(), {"w": rng.normal(size=[int(n) for n in w.ty.shape.values]).astype(kind)}


def test_a_convolution_that_gains_is_replaced_with_what_follows_it_fused(cpu):
    module, kernels = rewrite(*model())

    [subgraph] = extract_subgraphs(fusion.fuse(module, cpu.tvm()))

    assert kernels["w"].shape == (6, 6, 64, 64)
    assert subgraph.core_operator == "winograd_conv2d"
    assert subgraph.operators[-1] == "max"
    assert evolution.sample(load_module(subgraph.workload), cpu.tvm(), 1, known=set(), seed=0)


def test_one_in_groups_is_replaced_in_float32_alone(cpu):
    given = model(groups=2)

    module, kernels = rewrite(*given)
    [subgraph] = extract_subgraphs(fusion.fuse(module, cpu.tvm()))

    assert kernels["w"].shape == (6, 6, 32, 64)
    assert subgraph.core_operator == "winograd_conv2d"
    assert "batch_matmul" in subgraph.operators
    assert rewrite(*given, is_narrow=True) == (given[0], {})


@pytest.mark.parametrize(("lanes", "is_taken"), [(8, True), (16, False)])
def test_groups_have_columns_for_whole_vectors(lanes, is_taken):
    """24 of each group: RegNet's are direct where vectors have sixteen lanes."""
    module, weights = model(groups=2, outputs=48)

    _, kernels = reweight.rewrite(module, weights, [winograd.replacement(lanes=lanes)])

    assert bool(kernels) == is_taken


@pytest.mark.parametrize(("outputs", "wider"), [(104, 112), (96, 96), (8, 8)])  # half a vector is no loss
def test_output_channels_are_padded_to_whole_vectors_for_the_products_alone(cpu, outputs, wider):
    module, weights = model(outputs=outputs)
    image = np.random.default_rng(1).normal(size=(1, 28, 28, 64)).astype(np.float32)
    expected = np.maximum(convolved(image, weights["w"], 1), 0)

    module, kernels = reweight.rewrite(module, weights, [winograd.replacement(lanes=16)])
    [subgraph] = extract_subgraphs(fusion.fuse(module, cpu.tvm()))
    fused = load_module(subgraph.workload)
    proposals = evolution.sample(fused, cpu.tvm(), 4, known=set(), seed=0)

    assert kernels["w"].shape[-1] == wider
    assert [proposal.space for proposal in proposals] == ["winograd"] * 4
    for program in (fused, *(traces.program(fused, each.trace, cpu.tvm()) for each in proposals)):
        found = run_on(program, cpu.tvm(), [image, kernels["w"]], np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_whoever_wants_no_wider_channels_gets_none(cpu):
    plain, lanes = Model(*model(outputs=104)), registers(cpu.tvm()).lanes

    wide, narrow = (
        choose_algorithms(plain, cpu, AlgorithmConfig(widen=choice)).weights for choice in ("auto", "never")
    )

    assert wide["w"].shape == (6, 6, 64, -(-104 // lanes) * lanes)
    assert narrow["w"].shape == (6, 6, 64, 104)


@needs_it
def test_in_bf16_they_are_padded_too(cpu):
    module, weights = model(outputs=104)
    image = np.random.default_rng(1).normal(size=(1, 28, 28, 64)).astype(ml_dtypes.bfloat16)
    expected = np.maximum(convolved(image.astype(np.float32), weights["w"], 1), 0)

    module, kernels = reweight.rewrite(module, weights, [winograd.replacement(lanes=16, is_narrow=True)])
    fused = [load_module(s.workload) for s in extract_subgraphs(fusion.fuse(module, cpu.tvm())) if "conv" in s.name]
    [proposal] = evolution.sample(fused[0], cpu.tvm(), 1, known=set(), seed=0)

    program = traces.program(fused[0], proposal.trace, cpu.tvm())
    found = run_on(program, cpu.tvm(), [image, kernels["w"]], np.zeros(expected.shape, np.float32))
    assert kernels["w"].shape == (4, 4, 64, 112)
    assert instructions(program, cpu.tvm())
    assert np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)) < 2**-7


def test_a_convolution_of_volumes_is_replaced(cpu):
    x = relax.Var("x", relax.TensorType((1, 4, 28, 28, 64), "float32"))
    w = relax.Var("w", relax.TensorType((3, 3, 3, 64, 64), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            conv = op.nn.conv3d(x, w, padding=1, data_layout="NDHWC", kernel_layout="DHWIO")
            out = builder.emit_output(builder.emit(op.nn.relu(builder.emit(conv))))
        builder.emit_func_output(out)

    module, kernels = rewrite(builder.get(), {"w": np.ones((3, 3, 3, 64, 64), np.float32)})
    [subgraph] = extract_subgraphs(fusion.fuse(module, cpu.tvm()))

    assert kernels["w"].shape == (6, 6, 3, 64, 64)
    assert subgraph.core_operator == "winograd_conv2d"
    assert subgraph.operators[-1] == "max"


def test_its_kernel_may_be_packed(cpu):
    module, _ = rewrite(*model())

    [subgraph] = extract_subgraphs(fusion.fuse(module, cpu.tvm()))

    assert list(load_module(subgraph.workload)["main"].attrs["layout_free_buffers"]) == [1]


def outcome(module, cpu, *arrays):
    return results(fusion.fuse(module, cpu.tvm()), cpu, *arrays)[0]


@pytest.mark.parametrize(
    ("dilation", "padding", "groups"), [(2, 2, 1), (2, 2, 2), (3, (4, 2, 1, 3), 1), (3, 3, 1), (3, 0, 1)]
)
def test_with_holes_it_is_the_convolution_of_smaller_images(cpu, dilation, padding, groups):
    """Of 28 pixels, or what padding makes of them, which dilations divide or do not."""
    module, weights = model(dilation=dilation, padding=padding, groups=groups)
    image = np.random.default_rng(1).normal(size=(1, 28, 28, 64)).astype(np.float32)

    replaced, kernels = rewrite(module, weights)

    expected, found = outcome(module, cpu, image, weights["w"]), outcome(replaced, cpu, image, kernels["w"])
    assert kernels["w"].shape[:2] != (3, 3)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


def test_images_are_moved_before_and_after_where_convolutions_have_holes(cpu):
    module, _ = rewrite(*model(dilation=2, padding=2))

    subgraphs = extract_subgraphs(fusion.fuse(module, cpu.tvm()))

    assert sorted(each.core_operator for each in subgraphs) == ["data_movement", "elementwise", "winograd_conv2d"]
    assert sum("max" in each.operators for each in subgraphs) == 1


@pytest.mark.parametrize(
    "attrs",
    [{"strides": 2}, {"dilation": (1, 2)}, {"dilation": 2, "inputs": 8, "outputs": 8, "padding": 2},
     {"dilation": 4, "padding": 4}, {"groups": 16}, {"kernel": 9}, {"kernel": 1}],
)  # fmt: skip
def test_other_convolutions_stay(attrs):
    module, weights = model(**attrs)

    assert rewrite(module, weights) == (module, {})


def test_a_kernel_that_is_no_weight_stays():
    module, _ = model()

    assert rewrite(module, {}) == (module, {})


def test_a_kernel_that_is_read_elsewhere_too_stays():
    x = relax.Var("x", relax.TensorType((1, 28, 28, 64), "float32"))
    w = relax.Var("w", relax.TensorType((3, 3, 64, 64), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            conv = builder.emit(op.nn.conv2d(x, w, padding=1, data_layout="NHWC", kernel_layout="HWIO"))
            out = builder.emit_output(relax.Tuple([conv, builder.emit(op.exp(w))]))
        builder.emit_func_output(out)

    assert not rewrite(builder.get(), {"w": np.zeros((3, 3, 64, 64), np.float32)})[1]


def test_transforms_are_named_in_the_structure():
    assert operators(workload(2))[:4] == ["pad", "transform", "transform", "batch_matmul"]
