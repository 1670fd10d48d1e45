import json

import pytest
from tvm.relax import op
from tvm.s_tir import meta_schedule as ms

from lib.machine import targets
from lib.search import evolution
from lib.search.spaces import contraction
from lib.search.spaces.generators import MutateChoice, has_choices
from lib.search.spaces.space import Space
from lib.search.spaces.table import SPACES, fitting
from lib.tir import traces
from tests.helpers import gather, matmul
from tests.lib.search.spaces.test_contraction import convolution
from tests.lib.search.spaces.test_rows import softmax, subgraph
from tests.lib.search.spaces.test_window import depthwise


def choices(trace):
    """The decisions of a trace by the position of their instruction."""
    _, decisions = json.loads(trace) if isinstance(trace, str) else trace.as_json()
    return {int(position): value for position, value in decisions}


@pytest.fixture(scope="module")
def trace(cpu):
    [proposal] = evolution.sample(convolution(), cpu.tvm(), 1, known=set(), seed=0)
    return traces.apply(convolution(), proposal.trace).trace


def test_a_mutation_changes_one_choice(trace):
    mutator = MutateChoice(0)

    for _ in range(20):
        changed = choices(mutator.apply(trace))
        before = choices(trace)
        assert sum(changed[position] != before[position] for position in changed) == 1


def test_equal_seeds_mutate_alike(trace):
    first, second = ([choices(MutateChoice(seed).apply(trace)) for _ in range(5)] for seed in (7, 7))

    assert first == second


def test_copies_of_a_mutator_begin_alike(trace):
    mutator = MutateChoice(3)

    assert choices(mutator.clone().apply(trace)) == choices(mutator.apply(trace))


def test_no_space_fits_a_gpu():
    gpu = targets.target("nvidia/nvidia-h100").tvm()

    assert fitting(matmul(), gpu) is None


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda cpu: matmul(), "contraction"),
        (lambda cpu: convolution(), "contraction"),
        (lambda cpu: depthwise(1), "window"),
        (lambda cpu: softmax(cpu, 24, 64), "rows"),
        (lambda cpu: subgraph(cpu, lambda _, x: op.permute_dims(x, [1, 0]), (7, 48)), "transposition"),
    ],
)
def test_a_workload_gets_the_space_of_its_kind(cpu, make, name):
    assert fitting(make(cpu), cpu.tvm()).name == name


def test_the_first_space_that_fits_is_taken_and_the_others_are_not_asked(cpu):
    asked = []
    spaces = [
        Space(name, fits=lambda *_, fits=fits, name=name: asked.append(name) or fits, sketches=lambda *_: [])
        for name, fits in (("a", False), ("b", True), ("c", True))
    ]

    assert fitting(matmul(), cpu.tvm(), spaces).name == "b"
    assert asked == ["a", "b"]
    assert fitting(gather(), cpu.tvm(), SPACES) is None


def test_without_remainders_tiles_divide_the_output(cpu):
    workload, target = matmul(37, 53, 29), cpu.tvm()

    assert contraction.space().fits(workload, target)
    assert not contraction.space(remainders=False).fits(workload, target)
    assert contraction.space(remainders=False).fits(matmul(), target)


def test_sketches_without_choices_are_no_space(cpu):
    context = ms.TuneContext(mod=matmul(), target=cpu.tvm(), num_threads=1, space_generator="post-order-apply")

    assert has_choices(context.generate_design_space())
    assert not has_choices([traces.apply(matmul(), traces.EMPTY_TRACE)])
