"""Deformable convolutions beyond what ONNX's own tests have (`test_onnx_backend`)."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from lib.models import onnx_import
from lib.tir.numerics import relative_error
from tests.helpers import computed


@pytest.mark.parametrize("version", [19, 22])
@pytest.mark.parametrize(
    ("groups", "offset_groups", "kernel", "given"),
    [
        (1, 1, (3, 3), {"pads": [1, 1, 1, 1]}),
        (2, 4, (3, 2), {"pads": [1, 0, 2, 1], "strides": [2, 1]}),
        (4, 2, (2, 3), {"dilations": [2, 1], "strides": [1, 2]}),
    ],
)
def test_it_is_what_onnx_defines(tmp_path, cpu, groups, offset_groups, kernel, given, version):
    rng, (height, width) = np.random.default_rng(0), (9, 8)
    x = rng.normal(size=(2, 8, height, width)).astype(np.float32)
    pads, strides, dilations = (
        given.get(name, [n] * m) for name, n, m in (("pads", 0, 4), ("strides", 1, 2), ("dilations", 1, 2))
    )
    out = [
        (n + pads[a] + pads[a + 2] - dilations[a] * (kernel[a] - 1) - 1) // strides[a] + 1
        for a, n in enumerate((height, width))
    ]
    taps = kernel[0] * kernel[1] * offset_groups
    arrays = {
        "x": x, "w": rng.normal(size=(12, 8 // groups, *kernel)), "moved": 2 * rng.normal(size=(2, 2 * taps, *out)),
        "b": rng.normal(size=12), "mask": rng.uniform(size=(2, taps, *out)),
    }  # fmt: skip
    arrays = {name: value.astype(np.float32) for name, value in arrays.items()}
    node = helper.make_node("DeformConv", list(arrays), ["y"], group=groups, offset_group=offset_groups,
                            kernel_shape=kernel, **given)  # fmt: skip
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in arrays.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (2, 12, *out))],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=9)
    onnx.save(proto, tmp_path / "m.onnx")

    [found] = computed(onnx_import.load(tmp_path / "m.onnx"), cpu, *arrays.values())

    [expected] = ReferenceEvaluator(proto).run(None, arrays)
    assert relative_error(found, expected) < 1e-5
