"""Weights of libraries, packed once for all that read them alike."""

import json

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from lib import deploy, packing, sharing
from lib.contracts import arrays
from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.runtime.family_tuner_runtime.weights import Mapped
from lib.search import evolution
from lib.tir.numerics import relative_error
from lib.tir.packings import packing as order_of
from lib.tir.workload import load_module

DEPTH, COLUMNS = 64, 96


def layers(rows):
    """Two products with weights of rows to which a table is added, of which each length takes the beginning."""
    builder = relax.BlockBuilder()
    shapes = {"x": (rows, DEPTH), "first": (DEPTH, COLUMNS), "second": (COLUMNS, DEPTH), "table": (rows, DEPTH)}
    params = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()]
    x, first, second, table = params
    with builder.function("main", params, attrs={"num_input": 1}):
        with builder.dataflow():
            hidden = builder.emit(op.nn.relu(op.matmul(op.add(x, table), first)))
            output = builder.emit_output(op.matmul(hidden, second))
        builder.emit_func_output(output)
    return builder.get()


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    shapes = {"first": (DEPTH, COLUMNS), "second": (COLUMNS, DEPTH), "table": (32, DEPTH)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def built(cpu, tmp_path_factory):
    """For three lengths: the library and what packs its weights, by programs that do the same with them."""
    folder, found = tmp_path_factory.mktemp("layers"), {}
    modules = {rows: fusion.fuse(layers(rows), cpu.tvm()) for rows in (32, 16, 24)}
    products = {rows: products_of(module, cpu) for rows, module in modules.items()}
    for rows, module in modules.items():
        traces = {}
        for place, (functions, programs) in enumerate(products[rows]):
            packer = min(set.intersection(*(set(each[place][1]) for each in products.values())))
            traces |= dict.fromkeys(functions, programs[packer])
        assert len(traces) == 2
        files = folder / f"{rows}.so", folder / f"{rows}.json"
        deploy.build(module, traces, cpu.tvm(), *files)
        found[rows] = files
    return found


def products_of(module, cpu):
    """For each product with weights: its functions, and traces by the index maps with which they pack the weights."""
    found = []
    for subgraph in (each for each in extract_subgraphs(module) if "matmul" in each.name):
        programs = evolution.sample(load_module(subgraph.workload), cpu.tvm(), 64, known=set(), seed=0)
        packed = {index_maps(each.trace): each.trace for each in programs if order_of(each.trace)}
        found.append((subgraph.functions, packed))
    return found


def index_maps(trace):
    return tuple(inputs[1] for kind, inputs, *_ in json.loads(trace)[0] if kind == "TransformLayout")


def given_to(weights, rows):
    """What a model of so many rows takes of the weights: the same arrays, but for the beginning of the table."""
    return {**weights, "table": weights["table"][:rows]} if rows < len(weights["table"]) else weights


def reference(x, weights):
    return np.maximum((x + weights["table"][: len(x)]) @ weights["first"], 0) @ weights["second"]


def outcome(library, x, packed):
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(x), *map(tvm.runtime.tensor, packed)).numpy()


def test_what_several_libraries_read_alike_is_packed_once_and_is_one_array(built, weights, cpu):
    packings = [load_module(path.read_text()) for _, path in built.values()]

    packed = packing.pack(packings, [given_to(weights, rows) for rows in built], cpu.tvm())

    assert len({id(array) for own in packed for array in own}) == 2 + len(built)
    for (rows, (library, _)), own in zip(built.items(), packed, strict=True):
        x = np.random.default_rng(rows).normal(size=(rows, DEPTH)).astype(np.float32)
        expected = reference(x, weights)
        assert relative_error(outcome(library, x, own), expected) < 1e-5
        assert {array.shape for array in own} - {array.shape for array in weights.values()}  # they are in other orders


def test_equal_work_is_in_the_joined_module_once(built):
    packings = [load_module(path.read_text()) for _, path in built.values()]

    module = packing.joined(packings, [[0, 1, 2], [0, 1, 3], [0, 1, 4]])

    calls = [
        binding.value
        for block in module["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
    ]
    assert len(calls) == 2  # of six: tables stay as they are
    functions = [f for f in module.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    assert len(functions) == 2


def test_other_weights_stay_apart_though_the_same_is_done_with_them(built, weights, cpu):
    packs = load_module(built[32][1].read_text())
    other = {name: -array for name, array in weights.items()}

    first, second = packing.pack([packs, packs], [weights, other], cpu.tvm())

    for one, another in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, -another)


def test_files_of_which_one_refers_to_another_become_one_file(built, weights, cpu, tmp_path):
    files = [tmp_path / f"{rows}.npz" for rows in built]
    for path, rows in zip(files, built, strict=True):
        arrays.write(path, path, given_to(weights, rows), like=files[0] if path != files[0] else None)

    packing.write(tmp_path / "all", [path for _, path in built.values()], files, cpu.tvm(), tmp_path / "listed")

    together = sharing.read_together(tmp_path / "listed")
    assert together.n_bytes == sum(array.nbytes for array in weights.values())  # shorter tables are in the longest
    mapped = Mapped(tmp_path / "all")
    for (rows, (library, _)), named in zip(built.items(), together.of_each, strict=True):
        x = np.ones((rows, DEPTH), np.float32)
        expected = reference(x, weights)
        own = [np.from_dlpack(mapped.view(name, shape)) for name, shape in named]
        assert relative_error(outcome(library, x, own), expected) < 1e-5
