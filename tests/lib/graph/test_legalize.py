import numpy as np
import pytest
import tvm
from scipy import special
from tvm import relax
from tvm.relax import op

from lib.graph import fusion
from lib.graph.legalize import legalize_ops
from lib.graph.subgraphs import extract_subgraphs
from tests.lib.graph.rules.helpers import module, run

# Dense around 0, sparse far out; both signs and 0 itself.
WIDE = np.concatenate([np.linspace(-20, 20, 4001), np.linspace(-1e4, 1e4, 1001), [-1e30, 1e30]]).astype(np.float32)
EXACT = WIDE.astype(np.float64)


def computed(build, *arrays):
    return run(legalize_ops()(module(build, *arrays)), *arrays)[0]


@pytest.mark.parametrize(
    ("function", "expected", "bound"),
    [
        (op.erf, special.erf(EXACT), 3.3e-7),
        (op.tanh, np.tanh(EXACT), 2.4e-7),
        (op.sigmoid, special.expit(EXACT), 2e-7),
    ],
    ids=["erf", "tanh", "sigmoid"],
)
def test_bounded_functions_are_off_by_little(function, expected, bound):
    assert np.abs(computed(function, WIDE) - expected).max() <= bound


@pytest.mark.parametrize(("function", "exact"), [(op.sin, np.sin), (op.cos, np.cos)])
def test_sines_are_off_by_little_for_all_numbers_that_tell_parts_of_a_circle(function, exact):
    around = np.concatenate([np.linspace(-10, 10, 40001), *(np.linspace(-x, x, 10001) for x in (1e3, 1e6, 1e9))])
    x = around.astype(np.float32)

    assert np.abs(computed(function, x) - exact(x.astype(np.float64))).max() <= 1.5e-7
    assert f"T.{exact.__name__}(" not in legalize_ops()(module(function, x)).script()  # a call of libm


@pytest.mark.parametrize("function", [op.sin, op.cos])
def test_sines_of_larger_numbers_stay_sines(function):
    found = computed(function, np.array([1e12, -1e20, 3e38, np.inf, -np.inf, np.nan], np.float32))

    assert np.all(np.abs(found[:3]) <= 1 + 1e-6)
    assert np.isnan(found[3:]).all()


@pytest.mark.parametrize(("limit", "bound"), [(5, 8e-8), (87, 4.1e-6)])
def test_exp_is_off_by_little_of_its_value(limit, bound):
    x = np.linspace(-limit, limit, 20001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))

    assert (np.abs(computed(op.exp, x) - exact) / exact).max() <= bound


def test_exp_beyond_its_range_is_next_to_nothing_or_very_large():
    found = computed(op.exp, np.array([-np.inf, -1e4, -90, 90, 1e4], np.float32))

    assert np.all(found[:3] < 2e-38)
    assert np.all(found[3:] > 2e38)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (op.nn.silu, EXACT * special.expit(EXACT)),
        (op.nn.gelu, EXACT * special.ndtr(EXACT)),
        (op.nn.gelu_tanh, EXACT * (0.5 + 0.5 * np.tanh(np.sqrt(2 / np.pi) * (EXACT + 0.044715 * EXACT**3)))),
    ],
    ids=["silu", "gelu", "gelu_tanh"],
)
def test_activations_are_off_by_little_of_their_argument(function, expected):
    finite = np.abs(WIDE) < 1e10  # x^3 is none beyond
    found = computed(function, WIDE[finite])

    assert np.all(np.abs(found - expected[finite]) <= 4e-7 * np.maximum(np.abs(EXACT[finite]), 1e-30))


def test_activations_of_zero_are_zero():
    for function in (op.erf, op.tanh, op.nn.silu, op.nn.gelu, op.nn.gelu_tanh):
        assert computed(function, np.zeros(3, np.float32)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("scale", [1, 50, 1e30])
def test_softmax_sums_to_one_and_is_scipys(axis, scale):
    x = (scale * np.random.default_rng(0).normal(size=(3, 4, 5))).astype(np.float32)

    found = computed(lambda given: op.nn.softmax(given, axis), x)

    np.testing.assert_allclose(found, special.softmax(x.astype(np.float64), axis), rtol=1e-6, atol=3e-7)
    np.testing.assert_allclose(found.sum(axis), 1, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("scale", [0.1, 1, 30])
def test_log_softmax_is_scipys(axis, scale):
    x = (np.random.default_rng(0).normal(size=(5, 7, 40)) * scale).astype(np.float32)
    x[0, 1, :3] = -np.inf

    found = computed(lambda given: op.nn.log_softmax(given, axis), x)

    expected = special.log_softmax(x.astype(np.float64), axis)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=3e-6)
    assert "T.exp(" not in legalize_ops()(module(lambda given: op.nn.log_softmax(given, axis), x)).script()  # libm


def test_softmax_ignores_what_is_masked():
    x = np.array([[0, 1, -np.inf, np.finfo(np.float32).min]], np.float32)

    np.testing.assert_allclose(computed(op.nn.softmax, x), special.softmax(x.astype(np.float64), -1), atol=3e-7)


@pytest.mark.parametrize(
    "function",
    [
        op.erf,
        op.exp,
        op.log,
        op.sin,
        op.cos,
        op.tanh,
        op.sigmoid,
        op.nn.silu,
        op.nn.gelu,
        op.nn.gelu_tanh,
        op.nn.softmax,
    ],
)
def test_half_precision_is_left_to_tvm(function):
    made = module(function, np.ones((2, 3), np.float16))

    tvm.ir.assert_structural_equal(legalize_ops()(made), relax.transform.LegalizeOps()(made))


def test_what_is_no_number_is_found_in_vectors(cpu):
    x = np.array([np.nan, -np.nan, np.inf, -np.inf, 0, -0.0, 1, 3e38] * 8, np.float32)

    np.testing.assert_array_equal(computed(op.isnan, x), np.isnan(x))
    found = legalize_ops()(module(op.isnan, x)).script()
    assert "T.reinterpret" in found


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axes", [None, [1], [0, -1]])
@pytest.mark.parametrize(("reduce", "exact"), [(op.max, np.max), (op.min, np.min)], ids=["max", "min"])
def test_extrema_of_infinities_are_infinite(reduce, exact, axes, keepdims, dtype):
    x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(dtype)
    x[0], x[1, :, 2], x[2, 3] = -np.inf, np.inf, np.finfo(dtype).min

    found = computed(lambda value: reduce(value, axes, keepdims), x)

    assert np.array_equal(found, exact(x, None if axes is None else tuple(axes), keepdims=keepdims))


def normed(x, scale, shift):
    return op.mean(op.nn.layer_norm(x, scale, shift, axes=[-1]), axis=[1])


def test_names_of_blocks_do_not_tell_how_many_variables_a_model_has(cpu):
    def built(x, scale, shift):
        return normed(op.sort(op.sort(x)), scale, shift)  # nothing is fused with those

    arrays = np.ones((2, 3, 4), np.float32), np.ones(4, np.float32), np.ones(4, np.float32)
    found = extract_subgraphs(fusion.fuse(module(built, *arrays), cpu.tvm()))
    alone = extract_subgraphs(fusion.fuse(module(normed, *arrays), cpu.tvm()))

    assert {each.subgraph_id for each in alone} <= {each.subgraph_id for each in found}
    assert len(alone) == 2
