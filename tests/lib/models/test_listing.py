import pytest

from lib.contracts.errors import ModelError
from lib.models.listing import Listed, parse
from lib.models.source import Source


def test_names_and_patterns_are_listed_in_the_order_given_and_files_in_theirs(tmp_path):
    for name in ("b.onnx", "a.onnx", "c.txt"):
        (tmp_path / name).touch()

    found = parse(f"resnet50, {tmp_path}/*.onnx,bert_base", batch_size=4)

    assert [each.source for each in found] == [
        Source("resnet50", batch_size=4), Source(f"{tmp_path}/a.onnx"), Source(f"{tmp_path}/b.onnx"),
        Source("bert_base", batch_size=4),
    ]  # fmt: skip
    assert {each.importance for each in found} == {1.0}


def test_a_toml_file_says_of_each_model_what_the_options_say_of_one(tmp_path):
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "a.onnx").touch()
    listed = tmp_path / "list.toml"
    listed.write_text("""
        [[model]]
        model = "bert_base"
        sequence = 64
        importance = 2
        [[model]]
        model = "nets/*.onnx"
        shape = "ids=1,128"
    """)

    assert parse(str(listed), batch_size=8) == [
        Listed(Source("bert_base", batch_size=8, sequence=64), 2.0),
        Listed(Source(str(tmp_path / "nets" / "a.onnx"), shape="ids=1,128")),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is no such"),  # an empty file has no [[model]]
        ("[[model]]\nbatch_size = 1", "names no model"),
        ("[[model]]\nmodel = 'a.onnx'\nbatch = 1", "batch is unknown"),
        ("[[model]]\nmodel = 3", "model = 3 is no str"),
        ("[[model]]\nmodel = 'resnet50'\nbatch_size = true", "batch_size = True is no int"),
        ("[[model]]\nmodel = 'resnet50'\nimportance = 0", "must be above 0"),
        ("[[model]]\nmodel = 'resnet50'\nimportance = nan", "must be above 0"),
        ("[[model]]\nmodel = 'resnet50'\n[[model]]\nmodel = 'resnet50'", "lists resnet50 twice"),
        ("[model]\nmodel = 'resnet50'", "expected"),
        ("model = ", "expected"),
    ],
)
def test_a_list_that_is_none_is_refused_with_what_is_wrong(tmp_path, text, told):
    path = tmp_path / "list.toml"
    path.write_text(text)

    with pytest.raises(ModelError, match="expected" if told == "is no such" else told):
        parse(str(path))


def test_a_list_of_nothing_or_of_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelError, match="lists no model"):
        parse(" , ")
    with pytest.raises(ModelError, match=r"nowhere\.toml"):
        parse(str(tmp_path / "nowhere.toml"))


def test_a_model_that_is_not_there_is_still_listed_since_the_others_go_on():
    [found] = parse("nowhere.onnx")

    assert (found.source, found.name) == (Source("nowhere.onnx"), "nowhere.onnx")
