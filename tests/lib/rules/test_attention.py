import pytest
from tvm.relax import op

from lib.rules import attention as rules
from lib.simplify import RULES
from tests.lib.rules.helpers import becomes, const, random, stays

TOKENS, WIDTH, SIZE = 5, 6, 2
BIAS = random((12,), 3)


def project(x, columns=12, bias=BIAS):
    product = op.matmul(x, const(random((WIDTH, columns), 1)))
    return product if bias is None else op.add(product, const(bias))


def heads_of(x, heads=6, order=(0, 2, 1, 3), batch=2, tokens=TOKENS):
    return op.permute_dims(op.reshape(x, (batch, tokens, heads, 12 // heads)), list(order))


@pytest.mark.parametrize("strides", [None, [1]])
@pytest.mark.parametrize("axis", [2, -1])
@pytest.mark.parametrize(("begin", "end"), [(0, 4), (4, 8), (8, 2**31), (5, 6)])
def test_a_part_of_a_projection_is_a_projection(begin, end, axis, strides):
    def build(x):
        return op.strided_slice(project(x), [axis], [begin], [end], strides)

    assert becomes([rules.part_of_projection], build, (2, TOKENS, WIDTH))[1] == ["matmul", "add"]


def test_a_part_of_a_projection_without_bias_is_a_product():
    def build(x):
        return op.strided_slice(project(x, bias=None), [2], [3], [9])

    assert becomes([rules.part_of_projection], build, (2, TOKENS, WIDTH))[1] == ["matmul"]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.strided_slice(project(x), [1], [0], [4]),
        lambda x: op.strided_slice(project(x), [1, 2], [0, 0], [4, 4]),
        lambda x: op.strided_slice(project(x), [2], [0], [8], [2]),
        lambda x: op.strided_slice(project(x), [2], [-4], [-1]),
        lambda x: op.strided_slice(op.exp(project(x)), [2], [0], [4]),
        lambda x: op.strided_slice(op.matmul(x, op.permute_dims(x, [0, 2, 1])), [2], [0], [4]),
    ],
)
def test_other_slices_stay(build):
    assert stays([rules.part_of_projection], build, (2, TOKENS, WIDTH))


@pytest.mark.parametrize("shape", [(12, 1), (1, 1, 1, 12), (2, 12, 1)])
def test_what_is_added_to_tokens_is_no_bias(shape):
    """As many tokens as columns: extents alone do not tell them apart."""

    def part(x):
        return op.strided_slice(project(x, bias=random(shape)), [-1], [0], [4])

    def split(x):
        return heads_of(project(x, bias=random(shape)), tokens=12)

    assert stays([rules.part_of_projection], part, (2, 12, WIDTH))
    assert stays([rules.project_to_heads], split, (2, 12, WIDTH))


@pytest.mark.parametrize("bias", [None, BIAS, BIAS.reshape(1, 1, 12)])
@pytest.mark.parametrize("heads", [1, 3, 12])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 2, 3, 1)])
def test_a_projection_gives_heads_at_once(order, heads, bias):
    def build(x):
        return heads_of(project(x, bias=bias), heads, order)

    after = ["einsum"] + ["add"] * (bias is not None) + ["permute_dims"] * (order[2] == 3)
    assert becomes([rules.project_to_heads], build, (2, TOKENS, WIDTH))[1] == after


def test_queries_and_keys_of_one_projection_are_projected_each():
    def build(x):
        both = project(x)
        parts = [op.strided_slice(both, [2], [n], [n + 6]) for n in (0, 6)]
        return [op.permute_dims(op.reshape(part, (2, TOKENS, 3, 2)), [0, 2, 1, 3]) for part in parts]

    after = becomes(rules.RULES, build, (2, TOKENS, WIDTH))[1]
    assert sorted(after) == ["add", "add", "einsum", "einsum"]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: heads_of(project(x), order=(0, 1, 3, 2)),
        lambda x: heads_of(op.exp(project(x))),
        lambda x: op.permute_dims(op.reshape(project(x), (2, 3, TOKENS, 4)), [0, 2, 1, 3]),  # tokens are cut across
        lambda x: [split := op.reshape(project(x), (2, TOKENS, 3, 4)), op.permute_dims(split, [0, 2, 1, 3])],
    ],
)
def test_other_transposes_stay(build):
    assert stays([rules.project_to_heads], build, (2, TOKENS, WIDTH))


@pytest.mark.parametrize("heads", [1, 3])
def test_scores_are_sums_over_rows_of_queries_and_keys(heads):
    def build(q, k):
        return op.matmul(q, op.permute_dims(k, [0, 1, 3, 2]))

    shapes = (2, heads, 5, SIZE), (2, heads, 4, SIZE)
    assert becomes([rules.scores_by_rows], build, *shapes)[1] == ["einsum"]


@pytest.mark.parametrize(
    ("queries", "keys"), [((2, 3, 5, 2), (2, 1, 4, 2)), ((2, 3, 5, 2), (1, 3, 4, 2)), ((1, 3, 5, 2), (2, 3, 4, 2))]
)
def test_heads_that_are_broadcast_keep_their_products(queries, keys):
    """Several queries may share a key (multi-query attention)."""

    def scores(q, k):
        return op.matmul(q, op.permute_dims(k, [0, 1, 3, 2]))

    def context(q, k):
        return op.permute_dims(scores(q, k), [0, 2, 1, 3])

    assert stays([rules.scores_by_rows], scores, queries, keys)
    assert stays([rules.context_by_tokens], context, queries, keys)


def test_products_with_less_than_four_axes_stay():
    assert stays([rules.scores_by_rows], lambda q, k: op.matmul(q, op.permute_dims(k, [0, 2, 1])), (2, 5, 3), (2, 4, 3))
    other = lambda q, k: op.matmul(q, op.permute_dims(k, [0, 1, 3, 2]))  # noqa: E731
    assert stays([rules.scores_by_rows], other, (5, 3), (2, 3, 4, 3))


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


@pytest.mark.parametrize(
    ("batch", "joined", "after"),
    [(2, (2, 5, 6), ["einsum", "einsum"]), (2, (10, 6), ["einsum", "einsum", "reshape"])],
)
def test_heads_are_projected_without_being_joined(batch, joined, after):
    def build(p, v):
        context = op.reshape(op.einsum((p, v), "bhnm,bhms->bnhs"), joined)
        return op.matmul(context, const(random((6, 4), 1)))

    assert becomes([rules.project_from_heads], build, (batch, 3, 5, 4), (batch, 3, 4, SIZE))[1] == after


def test_one_token_of_one_image_may_lose_both_axes():
    def build(p, v):
        return op.matmul(op.reshape(op.einsum((p, v), "bhnm,bhms->bnhs"), (6,)), const(random((6, 4), 1)))

    after = becomes([rules.project_from_heads], build, (1, 3, 1, 4), (1, 3, 4, SIZE))[1]
    assert after == ["einsum", "einsum", "reshape"]


@pytest.mark.parametrize("joined", [(2, 3, 10), (2, 30)])
def test_heads_that_are_joined_with_tokens_stay(joined):
    def build(p, v):
        context = op.reshape(op.einsum((p, v), "bhnm,bhms->bnhs"), joined)
        return op.matmul(context, const(random((joined[-1], 4), 1)))

    assert stays([rules.project_from_heads], build, (2, 3, 5, 4), (2, 3, 4, SIZE))


def test_the_rows_of_unknown_weights_stay_together():
    def build(p, v, w):
        return op.matmul(op.reshape(op.einsum((p, v), "bhnm,bhms->bnhs"), (2, 5, 6)), w)

    assert stays([rules.project_from_heads], build, (2, 3, 5, 4), (2, 3, 4, SIZE), (6, 4))


def test_attention_moves_no_data():
    def build(x):
        whole = project(x, 36, None)
        parts = [op.strided_slice(whole, [2], [n], [n + 12]) for n in (0, 12, 24)]
        q, k, v = (heads_of(part, 3) for part in parts)
        scores = op.nn.softmax(op.matmul(q, op.permute_dims(k, [0, 1, 3, 2])))
        context = op.permute_dims(op.matmul(scores, v), [0, 2, 1, 3])
        return op.matmul(op.reshape(context, (2, TOKENS, 12)), const(random((12, WIDTH), 1)))

    assert set(becomes(RULES, build, (2, TOKENS, WIDTH))[1]) == {"einsum", "nn.softmax"}
