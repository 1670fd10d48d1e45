import pytest
from tvm.relax import op

from lib.graph.rules.products import RULES
from tests.lib.graph.rules.helpers import becomes, const, random, stays

BATCH, HEADS, H, W, K, L, SIZE = 1, 2, 3, 5, 4, 6, 8
QUERY, KEYS = (BATCH, HEADS, H * W, SIZE), (BATCH, HEADS, SIZE, K * L)
ROWS, COLUMNS = (BATCH, HEADS, H, W, K), (BATCH, HEADS, H, W, L)
WIDE = (BATCH, HEADS, H, W, K, L)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "moves"),
    [
        ("bhid,bhjd->bhij", ((1, 2, 3, 4), (1, 2, 5, 4)), 1),
        ("bhij,bhjd->bihd", ((1, 2, 3, 4), (1, 2, 4, 5)), 1),
        ("bid,bjd->bij", ((2, 3, 4), (2, 5, 4)), 1),
        ("bchw, bcd -> bhwd", ((2, 3, 4, 5), (2, 3, 6)), 1),
        ("ij,kj->ik", ((3, 4), (5, 4)), 1),
        ("ij,jk->ik", ((3, 4), (4, 5)), 0),
        ("ij,jk->ki", ((3, 4), (4, 5)), 1),
        ("nctv,vw->nctw", ((2, 3, 4, 5), (5, 6)), 0),
        ("qc,nwc->nqw", ((3, 4), (5, 60, 4)), 2),  # of the question, which is small, and of the result
        ("bqc,bwc->bwq", ((2, 3, 4), (2, 60, 4)), 1),
    ],
)
def test_einsums_are_products(subscripts, shapes, moves):
    before, after = becomes(RULES, lambda *tensors: op.einsum(tensors, subscripts), *shapes)

    assert before == ["einsum"]
    assert after.count("matmul") == 1
    assert after.count("permute_dims") == moves
    assert set(after) <= {"matmul", "permute_dims", "reshape"}


@pytest.mark.parametrize(
    ("subscripts", "shapes", "products"),
    [
        ("xi,oij,yj->xyo", ((9, 8), (7, 8, 6), (9, 6)), 2),
        ("ij,jk,kl->il", ((3, 4), (4, 5), (5, 6)), 2),
        ("ab,bc,cd,de->ae", ((3, 9), (9, 4), (4, 8), (8, 5)), 3),
    ],
)
def test_einsums_of_several_tensors_are_products_of_two_at_a_time(subscripts, shapes, products):
    before, after = becomes(RULES, lambda *tensors: op.einsum(tensors, subscripts), *shapes)

    assert before == ["einsum"]
    assert after.count("matmul") == products
    assert set(after) <= {"matmul", "permute_dims", "reshape"}


@pytest.mark.parametrize("subscripts", ["byhwc,hkc->byhwk", "byhwc,wkc->byhwk"])
def test_what_is_constant_is_moved_beforehand(subscripts):
    weight = random((H if "hkc" in subscripts else W, K, SIZE))

    _, after = becomes(RULES, lambda x: op.einsum((x, const(weight)), subscripts), (BATCH, HEADS, H, W, SIZE))

    assert after.count("permute_dims") == 2  # of the other tensor, and back
    assert after.count("matmul") == 1


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("bhid,bhjd->bhi", ((1, 2, 3, 4), (1, 2, 5, 4))),
        ("ij,ij->ij", ((3, 4), (3, 4))),
        ("bi,bj->bij", ((2, 3), (2, 4))),
        ("bhnm,bhms->bnhs", ((1, 2, 3, 4), (1, 2, 4, 5))),
        ("b...d,bde->b...e", ((2, 3, 4), (2, 4, 5))),
        ("ij,jk->ik", (("n", 4), (4, 5))),
        ("ij,jk,kl->il", ((3, 4), (4, 5), (5, "n"))),
        ("i,j,k->ijk", ((3,), (4,), (5,))),  # none is summed over
    ],
)
def test_other_einsums_stay(subscripts, shapes):
    assert stays(RULES, lambda *tensors: op.einsum(tensors, subscripts), *shapes)


def together(product, rows, columns):
    """As MViT v2 adds positions to scores."""
    scores = op.add(op.reshape(product, WIDE), op.expand_dims(rows, -1))
    return op.reshape(op.add(scores, op.expand_dims(columns, -2)), (BATCH, HEADS, H * W, K * L))


def apart(product, rows, columns):
    """As SAM adds them in transformers."""
    positions = op.add(op.expand_dims(rows, -1), op.expand_dims(columns, -2))
    return op.add(product, op.reshape(positions, (BATCH, HEADS, H * W, K * L)))


@pytest.mark.parametrize("add", [together, apart])
@pytest.mark.parametrize("is_turned", [False, True])
def test_relative_positions_of_rows_and_columns_are_columns_of_a_product(add, is_turned):
    def build(query, keys, rows, columns):
        keys = op.permute_dims(keys, [0, 1, 3, 2]) if is_turned else keys
        return op.nn.softmax(add(op.matmul(query, keys), rows, columns), -1)

    before, after = becomes(RULES, build, QUERY, (BATCH, HEADS, K * L, SIZE) if is_turned else KEYS, ROWS, COLUMNS)

    assert before.count("add") == 2
    assert sorted(each for each in after if each not in ("reshape", "expand_dims")) == [
        "broadcast_to", "concat", "concat", "matmul", "nn.softmax", *["permute_dims"] * is_turned,
    ]  # fmt: skip


def test_positions_that_are_products_themselves_are_told_from_scores():
    """As one head of MViT v2 has them, where axes of one element are left out."""
    shape = (1, 1, H, W, K, L)
    one = (1, 1, H * W, K * L)

    def build(query, keys, weights):
        rows = op.reshape(op.matmul(op.reshape(query, (H, W, SIZE)), weights), (1, 1, H, W, K, 1))
        total = op.add(op.reshape(op.matmul(query, keys), shape), rows)
        return op.reshape(total, one)

    _, after = becomes(RULES, build, (1, 1, H * W, SIZE), (1, 1, SIZE, K * L), (H, SIZE, K))

    assert after.count("add") == 0
    assert after.count("concat") == 2


@pytest.mark.parametrize("add", [together, apart])
@pytest.mark.parametrize(
    ("keys", "rows", "columns", "is_read_twice"),
    [
        (KEYS, (1, 1, H, W, K), COLUMNS, False),  # of all heads
        (KEYS, ROWS, COLUMNS, True),
        ((1, 1, SIZE, K * L), ROWS, COLUMNS, False),  # one head's keys for all
        (random(KEYS), ROWS, COLUMNS, False),
    ],
)
def test_other_positions_stay(add, keys, rows, columns, is_read_twice):
    def build(query, *others):
        keys_, rows_, columns_ = others if len(others) == 3 else (const(keys), *others)
        product = op.matmul(query, keys_)
        found = add(product, rows_, columns_)
        return [found, op.exp(product)] if is_read_twice else found

    given = [QUERY, rows, columns] if not isinstance(keys, tuple) else [QUERY, keys, rows, columns]

    assert stays(RULES, build, *given)


@pytest.mark.parametrize("rows", [(2,), ()], ids=["of rows", "of a vector"])
def test_other_sums_of_products_stay(rows):
    """As a recurrent layer that was taken apart has them: of a step's inputs and states."""

    def build(x, y, h, weight):
        return op.add(op.matmul(h, weight), op.reshape(op.add(x, y), (*rows, 3)))

    assert stays(RULES, build, (1, *rows, 3), (1, *rows, 3), (*rows, 4), (4, 3))
