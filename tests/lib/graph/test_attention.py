"""Attention as one operator, against NumPy; run untuned, so on any CPU."""

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from lib.graph import attention, fusion
from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from lib.graph.subgraphs import extract_subgraphs
from lib.machine.dots import BF16
from tests.lib.graph.test_packing import context
from tests.lib.graph.test_precision import functions, model, rounded, run

BATCH, HEADS, TOKENS, SIZE = 2, 3, 7, 8
SCORES = (BATCH, HEADS, TOKENS, TOKENS)


def drawn(*shape, seed=0):
    return np.random.default_rng(sum(shape) + seed).standard_normal(shape).astype(np.float32)


def of_inputs(logits, *masks, size=SIZE, others=TOKENS, multiply=context, n_masks=0):
    """Attention of three inputs, which are computed with before, as activations are; and of masks, `n_masks` of which
    are inputs, too."""
    shapes = [(BATCH, HEADS, TOKENS, SIZE), (BATCH, HEADS, SIZE, others), (BATCH, HEADS, others, size), *masks]

    def build(builder, x, y, z, *read):
        x, y, z = (builder.emit(op.nn.relu(each)) for each in (x, y, z))
        scores = logits(builder, builder.emit(op.matmul(x, y)), *read)
        return multiply(builder.emit(op.nn.softmax(scores, -1)), z)

    return model(shapes, build, n_inputs=3 + n_masks)


def in_numpy(logits, query, keys, values, *masks):
    """(b, n, h, s), in double precision."""
    scores = logits(query.astype(np.float64) @ keys, *masks)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhnm,bhms->bnhs", weights / weights.sum(-1, keepdims=True), values.astype(np.float64))


def inputs_of(found):
    """Random ones for its inputs, and the weights after them."""
    params = found.module["main"].params
    given = [drawn(*(int(n) for n in each.ty.shape), seed=k) for k, each in enumerate(params)]
    return given[: len(params) - len(found.weights)]


def called(found, cpu):
    return [name for name, _ in functions(found, cpu) if attention.FUNCTION in name]


def scaled(builder, scores):
    return builder.emit(op.multiply(scores, relax.const(0.25, "float32")))


def masked(builder, scores, mask):
    return builder.emit(op.add(mask, scaled(builder, scores)))


def limited(builder, scores, mask):
    above = builder.emit(op.subtract(scaled(builder, scores), mask))
    return builder.emit(op.maximum(above, relax.const(-0.5, "float32")))


def chosen(builder, scores, mask):
    is_kept = builder.emit(op.greater(mask, relax.const(0.0, "float32")))
    return builder.emit(op.where(is_kept, scores, relax.const(-3.0, "float32")))


@pytest.mark.parametrize("others", [16, 7], ids=["whole vectors", "columns that leave part of a vector"])
@pytest.mark.parametrize("size", [16, 8])
@pytest.mark.parametrize(
    ("logits", "mask", "expected"),
    [
        (scaled, None, lambda s: 0.25 * s),
        (masked, (1, 1, TOKENS, -1), lambda s, m: 0.25 * s + m),
        (masked, (BATCH, 1, 1, -1), lambda s, m: 0.25 * s + m),
        (masked, (HEADS, 1, -1), lambda s, m: 0.25 * s + m),
        (limited, (1, HEADS, TOKENS, 1), lambda s, m: np.maximum(0.25 * s - m, -0.5)),
        (chosen, (1, 1, TOKENS, -1), lambda s, m: np.where(m > 0, s, -3.0)),
    ],
    ids=["scale", "causal", "padding", "by head", "differences and limits", "choice"],
)
def test_it_computes_numpys_attention(cpu, logits, mask, expected, size, others):
    masks = [tuple(others if n == -1 else n for n in mask)] if mask else []
    plain = of_inputs(logits, *masks, size=size, others=others, n_masks=len(masks))
    given = inputs_of(plain)

    found = attention.fuse(plain, None, 16)

    assert len(called(found, cpu)) == 1
    query, keys, values, *read = given
    wanted = in_numpy(expected, *(np.maximum(each, 0) for each in (query, keys, values)), *read)
    np.testing.assert_allclose(run(found, given, cpu), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("others", [16, 7])
def test_in_bf16_its_factors_are_rounded_and_nothing_else(cpu, others):
    plain = of_inputs(scaled, others=others)
    given = inputs_of(plain)

    found = attention.fuse(plain, BF16, 16)

    factors = [rounded(np.maximum(each, 0)) for each in given]
    wanted = in_numpy(lambda s: 0.25 * s, *factors)
    # A weight is rounded before it is multiplied: by half a unit of its seven bits.
    np.testing.assert_allclose(run(found, given, cpu), wanted, rtol=2**-8, atol=1e-5)


def of_windows(*masks):
    """Of heads and windows, each with fewer queries than keys, as Hiera's tokens are pooled."""
    shapes = [(BATCH, HEADS, 5, 3, SIZE), (BATCH, HEADS, 5, SIZE, TOKENS), (BATCH, HEADS, 5, TOKENS, SIZE), *masks]

    def build(builder, x, y, z, *added):
        x, y, z = (builder.emit(op.nn.relu(each)) for each in (x, y, z))
        scores = builder.emit(op.matmul(x, y))
        scores = masked(builder, scores, *added) if added else scaled(builder, scores)
        return op.matmul(builder.emit(op.nn.softmax(scores, -1)), z)

    return model(shapes, build, n_inputs=3 + len(masks))


def test_windows_beside_heads_are_more_heads(cpu):
    plain = of_windows()
    given = inputs_of(plain)

    found = attention.fuse(plain, None, 16)

    assert len(called(found, cpu)) == 1
    factors = [np.maximum(each, 0).reshape(BATCH, HEADS * 5, *each.shape[-2:]) for each in given]
    wanted = in_numpy(lambda s: 0.25 * s, *factors).swapaxes(1, 2).reshape(BATCH, HEADS, 5, 3, SIZE)
    np.testing.assert_allclose(run(found, given, cpu), wanted, rtol=1e-5, atol=1e-6)


def test_windows_with_masks_stay_as_they_are():
    plain = of_windows((HEADS, 1, 3, TOKENS))

    assert attention.fuse(plain, None, 16) is plain


@pytest.mark.parametrize("mask", [(HEADS, TOKENS, TOKENS), (TOKENS, TOKENS), (HEADS, 1, TOKENS)])
def test_heads_that_are_joined_with_batches_are_those_of_one_batch(cpu, mask):
    """As PyTorch's batched products have them; a mask may be of each."""
    shapes = [(HEADS, TOKENS, SIZE), (HEADS, SIZE, TOKENS), (HEADS, TOKENS, SIZE), mask]

    def build(builder, x, y, z, added):
        x, y, z = (builder.emit(op.nn.relu(each)) for each in (x, y, z))
        scores = masked(builder, builder.emit(op.matmul(x, y)), added)
        return op.matmul(builder.emit(op.nn.softmax(scores, -1)), z)

    plain = model(shapes, build, n_inputs=4)
    given = inputs_of(plain)

    found = attention.fuse(plain, None, 16)

    assert len(called(found, cpu)) == 1
    factors = [np.maximum(each, 0)[None] for each in given[:3]]
    [wanted] = in_numpy(lambda s, m: 0.25 * s + m, *factors, given[3]).swapaxes(1, 2)
    np.testing.assert_allclose(run(found, given, cpu), wanted, rtol=1e-5, atol=1e-6)


def test_a_weight_that_is_added_fills_vectors_once_when_the_model_is_compiled(cpu):
    plain = of_inputs(masked, (1, HEADS, TOKENS, TOKENS))

    found = attention.fuse(plain, None, 16)

    [(name, original)] = plain.weights.items()
    assert list(found.weights) == [name] == [str(param.name) for param in found.module["main"].params[3:]]
    np.testing.assert_array_equal(found.weights[name], np.pad(original, [(0, 0)] * 3 + [(0, 9)]))
    given = inputs_of(plain)
    wanted = in_numpy(lambda s, m: 0.25 * s + m, *(np.maximum(each, 0) for each in given), original)
    np.testing.assert_allclose(run(found, given, cpu), wanted, rtol=1e-5, atol=1e-6)


def test_a_product_of_weights_and_values_that_is_not_by_tokens_is_by_heads(cpu):
    plain = of_inputs(scaled, multiply=op.matmul)
    given = inputs_of(plain)

    found = attention.fuse(plain, None, 16)

    wanted = in_numpy(lambda s: 0.25 * s, *(np.maximum(each, 0) for each in given))
    assert called(found, cpu)
    np.testing.assert_allclose(run(found, given, cpu), wanted.transpose(0, 2, 1, 3), rtol=1e-5, atol=1e-6)


def test_weights_that_no_float_has_are_zero(cpu):
    """Scores that differ by 200: e to minus that is no float."""
    plain = of_inputs(
        lambda builder, scores, mask: builder.emit(op.add(scores, mask)), (1, 1, TOKENS, TOKENS), n_masks=1
    )
    given = inputs_of(plain)
    given[3] = np.where(np.eye(TOKENS, dtype=bool), 0, -200).astype(np.float32)[None, None]

    found = run(attention.fuse(plain, None, 16), given, cpu)

    np.testing.assert_allclose(found, np.maximum(given[2], 0).transpose(0, 2, 1, 3), rtol=1e-6, atol=0)


def twice_read(builder, scores, mask):
    return builder.emit(op.add(scaled(builder, scores), builder.emit(op.nn.relu(scores))))


def summed(builder, scores, mask):
    return builder.emit(op.cumsum(scores, 3))


@pytest.mark.parametrize("logits", [twice_read, summed], ids=["scores that are read twice", "a sum along the scores"])
def test_other_chains_stay_in_three_operators(logits):
    plain = of_inputs(logits, (1, 1, TOKENS, TOKENS))

    assert attention.fuse(plain, None, 16) is plain


def test_it_can_be_left_out(cpu):
    plain = of_inputs(scaled)

    names = {
        choice: {s.core_operator for s in extract_subgraphs(fusion.fuse(found.module, cpu.tvm()))}
        for choice in ("auto", "never")
        for found in [choose_algorithms(plain, cpu, AlgorithmConfig(attention=choice))]
    }

    assert "attention" in names["auto"]
    assert "softmax" not in names["auto"]
    assert {"batch_matmul", "softmax"} <= names["never"]
