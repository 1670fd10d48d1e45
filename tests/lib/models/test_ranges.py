import pytest

from lib.contracts.errors import ModelError
from lib.models import ranges
from lib.models.ranges import RangeConfig
from tests import range_files


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return str(range_files.attention(tmp_path_factory.mktemp("files") / "mask.onnx", "mask"))


def waste(buckets, lowest, highest):
    """Of each extent: what is computed, and how much of it is padding."""
    used = {extent: next(bucket for bucket in buckets if bucket >= extent) for extent in range(lowest, highest + 1)}
    return [(bucket, bucket - extent) for extent, bucket in used.items()]


LIMITS = [(1, 512), (1, 64), (3, 100), (1, 2048), (500, 512), (1, 8), (7, 16), (1, 63)]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("most", [1, 20, 36])
def test_of_what_is_computed_at_most_a_quarter_is_padding_or_seven_in_ranges_from_64_on(limits, most):
    buckets = ranges.buckets(*limits, most)

    assert buckets[-1] == limits[1]
    assert all(4 * more <= bucket or (limits[1] >= 64 and more <= 7) for bucket, more in waste(buckets, *limits))
    assert limits[1] < 64 or all(bucket % (8 if bucket > 32 else 4) == 0 for bucket in buckets[:-1])


def test_more_buckets_pad_less_down_to_a_twelfth():
    few, many = ranges.buckets(1, 512, 1), ranges.buckets(1, 512, 40)

    assert few == [4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 72, 96, 128, 168, 216, 288, 384, 512]
    assert len(many) == 40
    assert all(12 * more <= bucket or more <= 7 for bucket, more in waste(many, 1, 512))
    assert max(more / bucket for bucket, more in waste(many, 65, 512)) < 0.1
    assert ranges.buckets(1, 512, 100) == many


@pytest.mark.parametrize("most", range(18, 41))
def test_there_are_no_more_buckets_than_are_allowed_where_a_quarter_needs_no_more(most):
    assert len(ranges.buckets(1, 512, most)) <= most


def test_each_shape_has_an_anchor_near_that_counts_for_it(file):
    found = ranges.parse(file, "batch=1 sequence=1..512", config=RangeConfig(buckets=40, anchors=6))
    extents = [bucket["sequence"] for bucket in found.buckets]
    anchors = [extent for extent, importance in zip(extents, found.importances, strict=True) if importance]

    assert len(anchors) == 6
    assert {4, 512} <= set(anchors)
    assert sum(found.importances) == len(extents)
    assert all(min(max(anchor / extent, extent / anchor) for anchor in anchors) <= 3 for extent in extents)


def test_few_shapes_are_all_tuned(file):
    assert ranges.parse(file, "batch=1..2 sequence=8,16").importances == [1.0] * 4
    assert ranges.parse(file, "batch=1 sequence=8,16,24", config=RangeConfig(anchors=1)).importances == [3.0, 0.0, 0.0]


def test_a_histogram_moves_buckets_to_where_less_is_computed_under_the_same_rule():
    counts = {extent: 1000.0 if extent in (65, 130, 260) else 1.0 for extent in range(1, 513)}
    plain = ranges.buckets(1, 512, 1)
    found = ranges.fitted(1, 512, counts, len(plain))

    def computed(buckets):
        return sum(counts[extent] * next(b for b in buckets if b >= extent) for extent in counts)

    assert computed(found) < 0.97 * computed(plain)
    assert len(found) <= len(plain)
    assert all(4 * more <= bucket or more <= 7 for bucket, more in waste(found, 1, 512))


def test_a_range_has_each_bucket_of_one_dimension_with_each_of_the_other_the_largest_first(file):
    found = ranges.parse(file, "batch=1..2 sequence=8,16")

    assert found.buckets == [
        {"batch": 2, "sequence": 16}, {"batch": 1, "sequence": 16}, {"batch": 2, "sequence": 8},
        {"batch": 1, "sequence": 8},
    ]  # fmt: skip
    assert found.limits == {"batch": (1, 2), "sequence": (1, 16)}
    assert found.shape(found.buckets[1]) == "batch=1 sequence=16"


def test_one_shape_is_no_range(file):
    assert ranges.parse(file, "batch=1 sequence=16") is None
    assert ranges.parse(file, "ids=1,16 mask=1,16") is None
    assert ranges.parse("resnet18", "") is None
    assert ranges.parse(file, "batch=1 sequence=4..8").shape({"sequence": 8}) == "batch=1 sequence=8"


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ("sequence=9..8", "9 is above 8"),
        ("tokens=1..8", "has no open dimension 'tokens'; open are batch, sequence"),
        ("batch=1..64 sequence=1..512", "shapes to compile, 48 are the most"),
        ("sequence=8,x", "expected sequence=EXTENT"),
    ],
)
def test_what_is_no_range_is_told(file, shape, complaint):
    with pytest.raises(ModelError, match=complaint):
        ranges.parse(file, shape)


def test_an_input_of_a_program_is_told_from_a_range_without_reading_the_file():
    assert ranges.parse("not_there.pt2", "ids=1,16 s77=16") is None


def test_only_files_have_ranges():
    with pytest.raises(ModelError, match="ranges are for files that leave dimensions open"):
        ranges.parse("bert_base", "sequence=1..8")


def test_lengths_are_read_and_what_is_none_is_told(file, tmp_path):
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("length,count\n# of last week\n3, 10\n17 2.5\n")
    assert ranges.parse(file, "batch=1 sequence=1..20", str(lengths)).dimensions[0].buckets[-1] == 20
    with pytest.raises(ModelError, match="is for a range"):
        ranges.parse(file, "batch=1 sequence=20", str(lengths))
    with pytest.raises(ModelError, match="a histogram of one dimension"):
        ranges.parse(file, "batch=1..2 sequence=1..20", str(lengths))
    with pytest.raises(ModelError, match="no length from 30 to 40"):
        ranges.parse(file, "batch=1 sequence=30..40", str(lengths))
    lengths.write_text("3 ten\n")
    with pytest.raises(ModelError, match="line 1: expected a length and a count"):
        ranges.parse(file, "batch=1 sequence=1..20", str(lengths))


def test_other_buckets_and_other_files_have_other_names(file, tmp_path):
    lengths = tmp_path / "lengths"
    lengths.write_text("17 1\n3 1\n")
    names = {
        ranges.name("m", ranges.parse(file, shape)) for shape in ("sequence=1..20", "sequence=1..21", "sequence=4,20")
    }
    names |= {ranges.name("m", ranges.parse(file, "sequence=1..20", str(lengths)))}

    assert len(names) == 4
