import re

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from lib import deploy, packing
from lib.graph import fusion, reweight, widen
from lib.graph.concatenation import place_parts
from lib.graph.subgraphs import extract_subgraphs
from lib.machine.registers import Registers
from lib.search import evolution
from lib.tir import traces
from lib.tir.parameters import weight_positions
from lib.tir.workload import load_module
from tests.helpers import run_on
from tests.lib.graph.rules.helpers import const, module, operators, random, run

IMAGE = (2, 4, 5, 3)  # N, H, W, C


def conv(x, out, seed=1, size=1):
    weight = const(random((size, size, IMAGE[3], out), seed))
    return op.nn.conv2d(x, weight, padding=size // 2, data_layout="NHWC", kernel_layout="HWIO")


def dense_block(x):
    """Each layer reads what all earlier ones made, as in DenseNet; typed along the way."""
    for layer in range(3):
        weight = const(random((3, 3, 3 + 2 * layer, 2), layer))
        new = op.nn.conv2d(op.nn.relu(x), weight, padding=1, data_layout="NHWC", kernel_layout="HWIO")
        x = op.concat([x, new], 3)
    return x


def dense_block_of_lists(x):
    """The same as torch's and timm's DenseNets have it: each layer joins all images anew."""
    images = [x]
    for layer in range(4):
        joined = op.concat(images, 3) if layer else x
        weight = const(random((3, 3, 3 + 2 * layer, 2), layer))
        images.append(op.nn.conv2d(op.nn.relu(joined), weight, padding=1, data_layout="NHWC", kernel_layout="HWIO"))
    return op.concat(images, 3)


def lists_that_share_their_first_images(x):
    """One after the other, the shorter one last, and one that has the images in another order."""
    a, b, c, d = (conv(x, 2, seed) for seed in range(4))
    return [op.concat(images, 3) for images in ([a, b, c, d], [a, b, c, x], [b, a, c], [a, b, c], [a, b], [a, b, d])]


def two_that_append(x):
    """Both begin with the same concatenation and grow it by as much: one buffer cannot hold both."""
    base = op.concat([conv(x, 4), conv(x, 2, 2)], 3)
    longer, other = op.concat([base, conv(x, 2, 3)], 3), op.concat([base, conv(x, 2, 4)], 3)
    return [longer, other]


def one_longer_than_the_other(x):
    base = op.concat([conv(x, 4), conv(x, 2, 2)], 3)
    return [op.concat([base, conv(x, 2, 3)], 3), op.nn.relu(base), op.concat([base, conv(x, 5, 4)], 3)]


def the_same_part_in_two(x):
    part = conv(x, 2)
    return [op.concat([part, conv(x, 3, 2)], 3), op.concat([conv(x, 4, 3), part], 3)]


def depthwise(x, channels, seed=5):
    weight = const(random((3, 3, 1, channels), seed))
    return op.nn.conv2d(x, weight, padding=1, groups=channels, data_layout="NHWC", kernel_layout="HWIO")


def ghosts(x):
    """Half of the images are made of the other half, as in GhostNet."""
    own = op.nn.relu(conv(x, 8))
    return op.concat([own, op.nn.relu(depthwise(own, 8))], 3)


def each_made_of_the_one_before(x):
    """As in Res2Net, or YOLO's stages: the last one is summed as well."""
    first = op.nn.relu(conv(x, IMAGE[3]))
    second = op.nn.relu(conv(first, IMAGE[3], 2, 3))
    third = op.add(conv(second, IMAGE[3], 3, 3), first)
    return op.nn.relu(op.concat([third, second, x, first], 3))


def what_is_appended_was_there_first(x):
    """A part of the longer one is made before the parts of the other, as where positions are rotated in part."""
    parts = op.split(op.permute_dims(x, [0, 2, 1, 3]), [2], 3)
    turned, rest = relax.TupleGetItem(parts, 0), relax.TupleGetItem(parts, 1)
    halves = op.split(turned, 2, 3)
    one, other = relax.TupleGetItem(halves, 0), relax.TupleGetItem(halves, 1)
    joined = op.concat([op.subtract(op.exp(one), other), op.add(op.exp(other), one)], 3)
    return op.permute_dims(op.concat([joined, rest], 3), [0, 2, 1, 3])


def a_slice_where_it_was(x):
    """One part is a slice of an image with as many channels as the joint one, at the same channels; the image is read
    again. As in EdgeNeXt."""
    image, half = op.nn.softmax(x), x.ty.shape.values[3] // 2
    other = op.nn.softmax(op.strided_slice(image, [3], [half], [2 * half]))
    joined = op.concat([op.strided_slice(image, [3], [0], [half]), other], 3)
    return [op.negative(joined), op.exp(image)]


CONCATENATIONS = [
    ghosts,
    each_made_of_the_one_before,
    lambda x: [joined := ghosts(x), op.concat([joined, depthwise(joined, 16)], 3)],
    lambda x: op.concat([own := conv(x, 8), own, depthwise(own, 8)], 3),
    lambda x: [own := conv(x, 8), op.concat([own, depthwise(own, 8)], 3)],  # the caller reads a part
    lambda x: op.concat([op.concat([own := conv(x, 8), depthwise(own, 8)], 3), own], 3),  # it is joined twice
    a_slice_where_it_was,
    what_is_appended_was_there_first,
    lambda x: op.concat([conv(x, 2), conv(x, 4, 2, 3)], 3),
    lambda x: op.concat([conv(x, 2), conv(x, 4, 2)], -1),
    lambda x: op.concat([op.nn.relu(conv(x, 2)), x, const(random((2, 4, 5, 2)))], 3),  # an input, a constant
    lambda x: op.concat([x, x], 3),
    lambda x: op.concat([part := conv(x, 2), part, part], 3),
    lambda x: op.concat([x], 3),
    lambda x: op.concat([joined := op.concat([conv(x, 2), x], 3), joined], 3),
    lambda x: op.concat([x, op.concat([conv(x, 2), x], 3)], 3),  # the earlier one comes second
    lambda x: op.concat([op.concat([op.concat([x, conv(x, 2)], 3), x], 3), x], 3),
    lambda x: [part := conv(x, 2), op.concat([part, x], 3)],
    lambda x: [joined := op.concat([conv(x, 2), x], 3), op.exp(joined)],
    lambda x: op.nn.relu(op.concat([op.strided_slice(x, [3], [0], [1]), conv(x, 2)], 3)),
    dense_block,
    dense_block_of_lists,
    lists_that_share_their_first_images,
    two_that_append,
    one_longer_than_the_other,
    the_same_part_in_two,
]


def fused(made, cpu):
    return fusion.fuse(fusion.lift_constants(made).module, cpu.tvm())


def run_fused(made, cpu, x):
    model = fusion.lift_constants(made)
    return run(fusion.fuse(model.module, cpu.tvm()), x, *model.weights.values())


@pytest.mark.parametrize("build", CONCATENATIONS)
def test_placed_parts_are_the_concatenation_and_no_kernel_concatenates(build, cpu):
    made, x = module(build, IMAGE), random(IMAGE)

    found = run_fused(made, cpu, x)

    for given, expected in zip(found, run(made, x), strict=True):
        np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-5)
    names = [gvar.name_hint for gvar, _ in fused(made, cpu).functions_items()]
    assert not any("concat" in name or "join" in name for name in names)


def test_one_concatenation_is_numpys(cpu):
    x = random(IMAGE)
    found = run_fused(module(lambda x: op.concat([x, op.negative(x), x], 3), IMAGE), cpu, x)

    np.testing.assert_array_equal(found[0], np.concatenate([x, -x, x], 3))


@pytest.mark.parametrize(
    ("shape", "axis"), [(IMAGE, 0), (IMAGE, 2), ((4, 5, 3), 2), ((2, 3), -1), ((1, 2, 4, 5, 3), 3)]
)
def test_other_concatenations_stay(shape, axis):
    assert "concat" in operators(place_parts(module(lambda x: op.concat([x, op.exp(x)], axis), shape)))


def test_a_concatenation_of_unknown_shape_stays():
    assert "concat" in operators(place_parts(module(lambda x: op.concat([x, op.exp(x)], 3), ("n", 2, 2, 3))))


def test_a_convolution_writes_where_its_channels_belong(cpu):
    made = fused(module(lambda x: op.concat([conv(x, 2), conv(x, 4, 2)], 3), IMAGE), cpu)

    assert all("conv2d" in name for name in operators(made))
    assert len(operators(made)) == 2


def test_layers_that_join_all_images_before_them_copy_none_twice(cpu):
    made = fused(module(dense_block_of_lists, IMAGE), cpu)

    *layers, whole = [name for name in operators(made) if "conv2d" in name or "place" in name]
    assert len([*layers, whole]) <= 4 + 1  # four layers, which write where they belong, and the input


def test_an_image_that_a_convolution_reads_as_well_is_not_copied(cpu):
    made = fused(module(ghosts, IMAGE), cpu)

    assert len(operators(made)) == 2
    assert all("conv2d" in name and "place" in name for name in operators(made))


@pytest.mark.parametrize("columns", [8, 24, 7])
def test_a_copied_part_is_moved_row_by_row(columns, cpu):
    """Vectors that ran on from row to row would be scattered."""
    made = fused(module(lambda x: op.concat([x, x], 3), (2, 4, 5, columns)), cpu)

    for subgraph in extract_subgraphs(made):
        workload = load_module(subgraph.workload)
        x, out = random((2, 4, 5, columns)), random((2, 4, 5, 2 * columns), 1)
        expected = run_on(workload, cpu.tvm(), [x], out)
        for program in evolution.sample(workload, cpu.tvm(), 4, known=set(), seed=0):
            schedule = traces.apply(workload, program.trace)
            lanes = [int(n) for n in re.findall(r"T\.vectorized\((?:T\.int64\()?(\d+)", schedule.mod.script())]
            assert all(n <= columns for n in lanes)
            np.testing.assert_array_equal(run_on(schedule.mod, cpu.tvm(), [x], out), expected)


def test_equal_convolutions_stay_one_workload_wherever_they_write(cpu):
    made = fused(module(lambda x: op.concat([conv(x, 2, seed, 3) for seed in range(4)], 3), IMAGE), cpu)

    [subgraph] = [found for found in extract_subgraphs(made) if "conv" in found.core_operator]
    assert subgraph.weight == 4


def test_weights_of_every_part_are_packed_before_an_inference(cpu, tmp_path):
    given = module(lambda x: op.concat([conv(x, 32), conv(x, 48, 2, 3)], 3), IMAGE)
    model = fusion.lift_constants(given)
    made = fusion.fuse(model.module, cpu.tvm())
    found = {}
    for subgraph in extract_subgraphs(made):
        workload = load_module(subgraph.workload)
        assert len(weight_positions(workload["main"])) == 1
        [program] = evolution.sample(workload, cpu.tvm(), 1, known=set(), seed=0)
        found |= dict.fromkeys(subgraph.functions, program.trace)
    deploy.build(made, found, cpu.tvm(), tmp_path / "lib.so", tmp_path / "packing.json")

    library = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "lib.so")), tvm.cpu())
    [packed] = packing.pack([load_module((tmp_path / "packing.json").read_text())], [model.weights], cpu.tvm())
    y = library["main"](*map(tvm.runtime.tensor, [random(IMAGE), *packed]))

    shapes = [weight.shape for weight in packed]
    assert len(shapes) == 2
    assert not {*shapes} & {weight.shape for weight in model.weights.values()}
    np.testing.assert_allclose(y.numpy(), run(given, random(IMAGE))[0], rtol=1e-4, atol=1e-4)


def parts_that_fill_no_vectors(x):
    apart = depthwise(x, IMAGE[3])
    return op.concat([op.nn.silu(conv(x, 20)), x, op.nn.relu(conv(x, 60, 2, 3)), op.nn.relu(apart)], 3)


def test_a_part_that_fills_no_vectors_leaves_the_others_alone(cpu):
    given = fusion.lift_constants(module(parts_that_fill_no_vectors, IMAGE))
    model = reweight.replaced(given, [widen.replacement(Registers(32, 16))])
    subgraphs = extract_subgraphs(fusion.fuse(model.module, cpu.tvm()))
    assert len([found for found in subgraphs if "place" in found.operators]) == 4

    for subgraph in subgraphs:
        workload = load_module(subgraph.workload)
        *inputs, out = [random([int(n) for n in param.ty.shape], 3) for param in workload["main"].params]
        expected = run_on(workload, cpu.tvm(), inputs, out)
        for program in evolution.sample(workload, cpu.tvm(), 4, known=set(), seed=0):
            found = run_on(traces.apply(workload, program.trace).mod, cpu.tvm(), inputs, out)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def a_part_of_three_tensors(x):
    return op.concat([op.add(conv(x, 2, size=3), const(random((2,), 5))), conv(x, 4, 2)], 3)


def a_part_of_none(x):
    return op.concat([op.full((2, 4, 5, 2), const(1.5), "float32"), conv(x, 4, 2)], 3)


@pytest.mark.parametrize("build", [dense_block, a_part_of_three_tensors, a_part_of_none])
@pytest.mark.parametrize("packs", [None, "packing.json"])
def test_placed_parts_can_be_built_into_a_library(packs, build, cpu, tmp_path):
    made = fused(module(build, IMAGE), cpu)

    deploy.build(made, {}, cpu.tvm(), tmp_path / "lib.so", tmp_path / packs if packs else None)

    library = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "lib.so")), tvm.cpu())
    assert library.module.implements_function("main")
    assert not library.module.implements_function(deploy.PACKER)  # it stands beside it, if it is asked for
    assert (tmp_path / "packing.json").exists() == (packs is not None)


def test_the_first_part_is_no_view_of_the_image_that_it_was_in(cpu, tmp_path):
    """A scheduled program moves each element to where it was: TVM takes that for a reshape. But the next part is
    written into that memory."""
    given = module(a_slice_where_it_was, (2, 4, 5, 32))
    model = fusion.lift_constants(given)
    made = fusion.fuse(model.module, cpu.tvm())
    chosen = {}
    for subgraph in extract_subgraphs(made):
        if "strided_slice" in subgraph.name and "place" in subgraph.name:
            [program] = evolution.sample(load_module(subgraph.workload), cpu.tvm(), 1, known=set(), seed=0)
            chosen |= dict.fromkeys(subgraph.functions, program.trace)
    assert chosen
    deploy.build(made, chosen, cpu.tvm(), tmp_path / "lib.so")

    library = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "lib.so")), tvm.cpu())
    x = random((2, 4, 5, 32))
    for found, expected in zip(library["main"](tvm.runtime.tensor(x)), run(given, x), strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
