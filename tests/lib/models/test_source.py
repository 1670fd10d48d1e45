import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from lib.contracts.errors import ModelError
from lib.models.source import Source, parse_shapes


def test_shapes_are_given_by_input_or_by_dimension():
    assert parse_shapes("ids=1,128 mask=1,128 batch=4") == {"ids": (1, 128), "mask": (1, 128), "batch": (4,)}


def test_a_name_may_hold_what_exporters_put_there():
    assert parse_shapes("gpu_0/data_0=1,3,224,224 x:0=2 a=b=3") == {
        "gpu_0/data_0": (1, 3, 224, 224),
        "x:0": (2,),
        "a=b": (3,),
    }


@pytest.mark.parametrize(
    "text", ["1,128", "ids=", "ids=0,128", "ids=1,-1", "ids=1,n", "=1", "ids=2²", "ids=1" + 19 * "0"]
)
def test_a_shape_that_is_none_is_shown_with_the_way_to_write_it(text):
    with pytest.raises(ModelError, match=r"--shape .* expected NAME=EXTENT,EXTENT"):
        parse_shapes(text)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source("nowhere.onnx"), r"--model nowhere\.onnx: there is no such file"),
        (Source("./resnet50"), r"expected a file that ends in \.onnx or \.pt2"),
        (Source("resnet50", shape="x=1"), "takes --batch-size and --sequence"),
        (Source("resnet50", batch_size=-1), "count from 1"),
        (Source("resnet50", weights="nowhere.safetensors"), r"--weights nowhere\.safetensors: there is no such file"),
    ],
)
def test_options_that_do_not_fit_are_refused(source, message):
    with pytest.raises(ModelError, match=message):
        source.check()


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"sequence": 64}, {"weights": "w.safetensors"}])
def test_a_file_takes_no_options_of_the_zoo(tmp_path, options):
    path = tmp_path / "m.onnx"
    path.touch()

    with pytest.raises(ModelError, match="are for models of the zoo"):
        Source(str(path), **options).check()


def test_names_tell_models_shapes_and_contents_apart(tmp_path):
    first, second = tmp_path / "a" / "m.onnx", tmp_path / "b" / "m.onnx"
    for number, path in enumerate((first, second)):
        path.parent.mkdir()
        path.write_bytes(bytes([number]))
    weights = tmp_path / "w.safetensors"
    weights.touch()
    sources = [
        Source(str(first)),
        Source(str(second)),
        Source(str(first), shape="batch=1 x=1,2"),
        Source(str(first), shape="batch=11 x=2"),
        Source("bert_base"),
        Source("bert_base", batch_size=2),
        Source("bert_base", sequence=2),
        Source("bert_base", weights=str(weights)),
    ]

    names = [source.name for source in sources]

    assert len(set(names)) == len(names)
    assert names[4] == "bert_base"
    assert not any(set(name) & set("/= ,") for name in names)


def test_batch_one_is_the_default():
    assert Source("bert_base", batch_size=1).name == Source("bert_base").name


def test_a_name_is_never_longer_than_a_file_system_takes(tmp_path):
    shapes = [" ".join(f"input{n}=1,3,224,{extent}" for n in range(40)) for extent in (224, 225)]
    path = tmp_path / f"{'m' * 200}.onnx"
    path.write_bytes(b"")

    names = {Source(str(path), shape=shape).name for shape in shapes}

    assert len(names) == 2
    assert max(map(len, names)) < 150


def test_a_model_whose_external_weights_changed_is_another_model(tmp_path):
    path, data = tmp_path / "m.onnx", tmp_path / "weights.bin"
    weight = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])], [weight],
    )  # fmt: skip
    onnx.save(helper.make_model(graph), path, save_as_external_data=True, location=data.name, size_threshold=0)
    before = Source(str(path)).name
    assert Source(str(path)).name == before

    data.write_bytes(np.full((4, 4), 2, np.float32).tobytes())

    assert Source(str(path)).name != before
