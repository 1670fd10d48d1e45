import json

import pytest
from tvm.s_tir import meta_schedule as ms

from lib import search, spaces, targets
from lib.spaces import MutateChoice
from tests.helpers import matmul
from tests.lib.spaces.test_contraction import convolution


def choices(trace):
    """The decisions of a trace by the position of their instruction."""
    _, decisions = json.loads(trace) if isinstance(trace, str) else trace.as_json()
    return {int(position): value for position, value in decisions}


@pytest.fixture(scope="module")
def trace(cpu):
    [proposal] = search.sample(convolution(), cpu.tvm(), 1, known=set(), seed=0)
    return search.apply(convolution(), proposal.trace).trace


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


def test_a_gpu_has_metaschedules_space_alone():
    gpu = targets.target("nvidia/nvidia-h100").tvm()

    assert list(spaces.generators(matmul(), gpu, 0)) == ["post-order-apply"]


def test_metaschedules_space_is_the_last_resort(cpu):
    ours, last = spaces.generators(matmul(), cpu.tvm(), 0)

    assert isinstance(ours, ms.space_generator.PostOrderApply)
    assert last == "post-order-apply"


def test_sketches_without_choices_are_no_space(cpu):
    context = ms.TuneContext(mod=matmul(), target=cpu.tvm(), num_threads=1, space_generator="post-order-apply")

    assert spaces.has_choices(context.generate_design_space())
    assert not spaces.has_choices([search.apply(matmul(), search.EMPTY_TRACE)])
