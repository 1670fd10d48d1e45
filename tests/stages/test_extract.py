import numpy as np
import pytest
import tvm

from lib import tables, workloads
from lib.errors import ModelError
from lib.layout import ModelFiles
from lib.schemas import SUBGRAPHS
from lib.source import Source
from lib.tables import Origin
from stages import extract


def test_module_weights_and_subgraphs_are_written(started):
    module = tvm.ir.load_json(started.model.module.read_text())
    weights = np.load(started.model.weights)
    rows = tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()

    n_inputs = int(module["main"].attrs["num_input"])
    shapes = [tuple(int(e) for e in p.ty.shape.values) for p in module["main"].params[n_inputs:]]
    assert [weights[name].shape for name in weights.files] == shapes
    for row in rows:
        assert workloads.workload_id(workloads.load(row["workload"])) == row["subgraph_id"]
        assert all(name in [str(g.name_hint) for g in module.get_global_vars()] for name in row["functions"])


@pytest.mark.parametrize("model", ["resnet51", "nowhere/model.onnx"])
def test_a_model_that_cannot_be_read_leaves_nothing_behind(tmp_path, cpu, model):
    with pytest.raises(ModelError):
        extract.run(Source(model), cpu, origin=Origin(), out=ModelFiles(tmp_path / "out"))

    assert not (tmp_path / "out").exists()
