import pytest
from tvm.relax import op

from lib.graph import simplify
from lib.graph.rules import attention as rules
from tests.lib.graph.rules.helpers import becomes, const, random, stays

TOKENS, WIDTH, SIZE = 5, 6, 2


def project(x, n, columns=12, bias=True):
    """A dense layer; `n` tells its weights from others'."""
    product = op.matmul(x, const(random((WIDTH, columns), n)))
    return op.add(product, const(random((columns,), 10 + n))) if bias else product


def heads_of(x, heads=6, order=(0, 2, 1, 3), batch=2, tokens=TOKENS):
    return op.permute_dims(op.reshape(x, (batch, tokens, heads, 12 // heads)), list(order))


@pytest.mark.parametrize("biases", [(True, True, True), (False, False, False), (True,) * 4, (True, False, True)])
def test_dense_layers_of_one_tensor_become_slices_of_one(biases):
    """Whether all have a bias, none, or some."""

    def build(x):
        return [project(x, n, bias=bias) for n, bias in enumerate(biases)]

    after = becomes(rules.merge_projections, build, (2, TOKENS, WIDTH))[1]
    assert after == ["matmul", *["add"] * any(biases), *["strided_slice"] * len(biases)]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: [project(x, n) for n in range(2)],  # two may as well be a gate and what it gates
        lambda x: [project(x, n, columns=12 + n) for n in range(3)],
        lambda x: [project(op.exp(x) if n else x, n) for n in range(3)],
        lambda x: [op.matmul(x, op.permute_dims(x, [0, 2, 1])) for _ in range(3)],
        lambda x: [op.matmul(const(random((4, TOKENS), n)), x) for n in range(3)],
    ],
)
def test_other_products_stay_apart(build):
    assert stays(rules.merge_projections, build, (2, TOKENS, WIDTH))


def test_a_product_that_is_read_beside_its_bias_is_merged_without_it():
    def build(x):
        products = [project(x, n, bias=False) for n in range(3)]
        return [*products, *(op.add(y, const(random((12,), 7))) for y in products)]

    after = becomes(rules.merge_projections, build, (2, TOKENS, WIDTH))[1]
    assert sorted(after) == ["add"] * 3 + ["matmul"] + ["strided_slice"] * 3


@pytest.mark.parametrize("shape", [(12, 1), (2, 12, 1)])
def test_what_is_added_to_tokens_is_no_bias(shape):
    """As many tokens as columns: extents alone do not tell them apart."""

    def build(x):
        return [op.add(project(x, n, bias=False), const(random(shape, n))) for n in range(3)]

    after = becomes(rules.merge_projections, build, (2, 12, WIDTH))[1]
    assert sorted(after) == ["add"] * 3 + ["matmul"] + ["strided_slice"] * 3


def test_the_context_comes_by_tokens():
    def build(p, v):
        return op.permute_dims(op.matmul(p, v), [0, 2, 1, 3])

    assert becomes([rules.context_by_tokens], build, (2, 3, 5, 4), (2, 3, 4, SIZE))[1] == ["einsum"]


@pytest.mark.parametrize(
    "build",
    [
        lambda p, v: op.permute_dims(op.matmul(p, v), [0, 1, 3, 2]),
        lambda p, v: [product := op.matmul(p, v), op.permute_dims(product, [0, 2, 1, 3])],
    ],
)
def test_a_context_in_another_order_or_that_others_read_stays(build):
    assert stays([rules.context_by_tokens], build, (2, 3, 5, 4), (2, 3, 4, SIZE))


@pytest.mark.parametrize(("p", "v"), [((2, 3, 5, 2), (2, 1, 2, 4)), ((2, 3, 5, 2), (1, 3, 2, 4))])
def test_heads_that_are_broadcast_keep_their_products(p, v):
    """Several queries may share a key (multi-query attention)."""
    assert stays([rules.context_by_tokens], lambda p, v: op.permute_dims(op.matmul(p, v), [0, 2, 1, 3]), p, v)


def test_batch_and_tokens_come_apart_before_the_last_product():
    def build(p, v):
        gathered = op.reshape(op.einsum((p, v), "bhnm,bhms->bnhs"), (10, 6))
        return op.matmul(gathered, const(random((6, 4), 1)))

    after = becomes([rules.tokens_apart], build, (2, 3, 5, 4), (2, 3, 4, SIZE))[1]
    assert after == ["einsum", "reshape", "matmul", "reshape"]


def test_few_tokens_of_several_texts_stay_joined():
    """As a MobileViT's on images of 64 pixels: the rule that joins the rows of short matrices would undo it."""

    def build(p, v):
        gathered = op.reshape(op.einsum((p, v), "bhnm,bhms->bnhs"), (6, 6))
        return op.matmul(gathered, const(random((6, 4), 1)))

    assert stays([rules.tokens_apart], build, (2, 3, 3, 4), (2, 3, 4, SIZE))


@pytest.mark.parametrize("joined", [(2, 5, 6), (2, 3, 10), (2, 30)])
def test_heads_that_are_joined_otherwise_stay(joined):
    def build(p, v):
        gathered = op.reshape(op.einsum((p, v), "bhnm,bhms->bnhs"), joined)
        return op.matmul(gathered, const(random((joined[-1], 4), 1)))

    assert stays([rules.tokens_apart], build, (2, 3, 5, 4), (2, 3, 4, SIZE))


@pytest.mark.parametrize("flat", [False, True])
def test_attention_copies_when_it_splits_heads_and_never_else(flat):
    def build(x):
        if flat:  # as GPT-2 is exported: batch and tokens joined around every product
            x = op.reshape(x, (2 * TOKENS, WIDTH))
        q, k, v = (heads_of(project(x, n), 3) for n in range(3))
        scores = op.nn.softmax(op.matmul(q, op.permute_dims(k, [0, 1, 3, 2])))
        context = op.permute_dims(op.matmul(scores, v), [0, 2, 1, 3])
        joined = op.reshape(context, (2 * TOKENS, 12) if flat else (2, TOKENS, 12))
        return op.reshape(op.matmul(joined, const(random((12, WIDTH), 5))), (2, TOKENS, WIDTH))

    after = becomes(simplify.channels_last, build, (2, TOKENS, WIDTH))[1]

    assert [name for name in after if name not in ("strided_slice", "reshape", "permute_dims")] == [
        "matmul", "add", "matmul", "nn.softmax", "einsum", "matmul",
    ]  # fmt: skip
    assert after.count("permute_dims") == 3
