import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import tvm

from lib import winners
from lib.contracts import digests
from lib.search.evolution import sample
from lib.tir.traces import EMPTY_TRACE
from lib.tuning.history import Foretold, History, SubgraphHistory, TimedCandidate
from lib.verification import CompileConfig
from tests.helpers import CONDITIONS, matmul

QUICK = CompileConfig(finalists=2, repeats=1, timeout_s=60)
WORKLOAD = matmul(32, 32, 32)
SUBGRAPH = {
    "subgraph_id": "s", "family_id": "matmul", "workload": tvm.ir.save_json(WORKLOAD), "tunable": True, "note": "",
    "weight": 1, "flop": 1e6,
}  # fmt: skip


class FakePool:
    """Answers with made-up latencies and errors, in the order of the finalists, and keeps what it is asked."""

    conditions = CONDITIONS

    def __init__(self, latencies_s: Sequence[float], errors: Sequence[float | None] = (0.0,)) -> None:
        self.latencies_s, self.errors = latencies_s, list(errors)
        self.baselines: list[str | None] = []

    def compare(self, workload, traces, repeats, *, baseline):
        self.baselines.append(baseline)
        return [[latency_s] * repeats for latency_s in self.latencies_s], [] if baseline is None else [1.0, 1.0]

    def check(self, workload, trace, timeout_s):
        return self.errors.pop(0)


def past(untuned_s=None, names=("a", "b"), **changes):
    fastest = [TimedCandidate(0.1 * (1 + 0.05 * n), name, f'"{name}"') for n, name in enumerate(names)]
    return History(subgraphs={"s": SubgraphHistory(fastest=fastest, untuned_s=untuned_s, **changes)})


def test_a_subgraph_that_got_no_faster_ships_the_untuned_schedule():
    choice = winners.choose(SUBGRAPH, past(), QUICK, FakePool([2.0, 3.0]))

    assert (choice.candidate_id, choice.trace, choice.tuned_s) == (None, "", 1.0)
    assert choice.note == "none was faster than the untuned one"


@pytest.mark.parametrize(
    ("tried", "untuned_s", "chosen", "note"),
    [
        ((), None, "a", "foretold, not measured"),
        (("a",), None, "b", "foretold, not measured"),
        (("a",), 1.0, None, "no candidate worked"),
        (("a", "b"), None, None, "no candidate worked"),
    ],
)
def test_what_was_foretold_is_taken_until_it_was_tried_and_failed_or_the_untuned_one_works(
    tried, untuned_s, chosen, note
):
    foretold = [Foretold(name, f'"{name}"', "evolved") for name in ("a", "b")]
    known = {digests.of_trace(f'"{name}"') for name in tried}
    fastest = [TimedCandidate(untuned_s, "untuned", EMPTY_TRACE)] if untuned_s else []
    so_far = History(
        subgraphs={"s": SubgraphHistory(fastest=fastest, untuned_s=untuned_s, foretold=foretold, known=known)}
    )

    [choice] = winners.without_wrong(
        [winners.choose(SUBGRAPH, so_far, QUICK, FakePool([]))], [SUBGRAPH], so_far, QUICK, FakePool([])
    )

    assert (choice.candidate_id, choice.note) == (chosen, note)


@pytest.mark.parametrize("error", [0.5, None])
def test_a_candidate_with_wrong_results_is_passed_over(error):
    choice = winners.choose(SUBGRAPH, past(), QUICK, FakePool([0.2, 0.3], [error, 1e-7]))

    assert (choice.candidate_id, choice.trace, choice.tuned_s) == ("b", '"b"', 0.3)
    assert choice.note == "1 faster with wrong results"


@pytest.mark.parametrize(("untuned_s", "baseline"), [(None, EMPTY_TRACE), (0.2, EMPTY_TRACE), (2.0, None)])
def test_the_untuned_program_is_timed_again_if_it_was_not_far_behind(untuned_s, baseline):
    pool = FakePool([0.2, 0.3])

    choice = winners.choose(SUBGRAPH, past(untuned_s), QUICK, pool)

    assert pool.baselines == [baseline]
    assert choice.untuned_s == (1.0 if baseline else untuned_s)


@pytest.mark.parametrize(("untuned_s", "chosen"), [(0.2, "a"), (0.099, "a"), (0.08, None)])
def test_where_nothing_is_timed_again_an_untuned_program_is_shipped_that_was_clearly_ahead(untuned_s, chosen):
    """It was compiled with less than a library is."""
    choice = winners.choose(SUBGRAPH, past(untuned_s), QUICK, FakePool([]), until=0.0)

    assert (choice.candidate_id, choice.tuned_s) == (chosen, 0.1 if chosen else untuned_s)


def test_where_weights_stand_packed_for_others_a_faster_untuned_program_is_no_choice_but_a_right_one_is():
    pool = FakePool([2.0, 3.0])
    choice = winners.choose(SUBGRAPH, past(untuned_s=0.05), QUICK, pool, is_packed=True)
    late = winners.choose(SUBGRAPH, past(untuned_s=0.05), QUICK, pool, is_packed=True, until=0.0)
    wrong = winners.choose(SUBGRAPH, past(untuned_s=0.05), QUICK, FakePool([2.0, 3.0], [1.0, None]), is_packed=True)

    assert (choice.candidate_id, choice.tuned_s, pool.baselines) == ("a", 2.0, [None])
    assert (late.candidate_id, late.note) == ("a", "not timed again; checked with the whole model")
    assert (wrong.candidate_id, wrong.trace, wrong.note) == (None, "", "2 with wrong results")


def test_an_untuned_program_that_was_spared_is_not_timed_for_the_finalists_either():
    pool = FakePool([0.2, 0.3])

    choice = winners.choose({**SUBGRAPH, "flop": 1e9}, past(None), QUICK, pool)

    assert pool.baselines == [None]
    assert (choice.candidate_id, choice.tuned_s, choice.untuned_s) == ("a", 0.2, None)


@pytest.mark.parametrize(("names", "share"), [(("a",), 1.0), (("a", "b"), 0.01)])
def test_what_makes_no_difference_is_not_timed_again_but_checked(names, share):
    pool = FakePool([], [None, 1e-7][-len(names) :])

    choice = winners.choose(SUBGRAPH, past(2.0, names), QUICK, pool, share=share)

    assert pool.baselines == pool.errors == []
    assert (choice.candidate_id, choice.untuned_s) == (names[-1], 2.0)
    assert choice.tuned_s == pytest.approx(0.1 if len(names) == 1 else 0.105)


def test_candidates_that_were_clearly_slower_while_tuning_are_not_timed_again():
    fastest = [TimedCandidate(latency_s, str(latency_s), f'"{latency_s}"') for latency_s in (0.1, 0.105, 0.12)]
    so_far = History(subgraphs={"s": SubgraphHistory(fastest=fastest, untuned_s=9.0)})

    choice = winners.choose(SUBGRAPH, so_far, CompileConfig(finalists=4), FakePool([0.3, 0.2], [1e-7]))

    assert (choice.candidate_id, choice.tuned_s) == ("0.105", 0.2)


def test_a_light_subgraph_is_timed_again_where_the_untuned_program_may_be_faster():
    pool = FakePool([0.2])

    winners.choose(SUBGRAPH, past(0.2), QUICK, pool, share=0.001)

    assert pool.baselines == [EMPTY_TRACE]


def test_a_finalist_is_timed_again_for_each_hundredth_of_an_inference_that_its_subgraph_takes():
    fastest = {"s": 1.0, "small": 0.014, "large": 0.03}
    so_far = History()
    for key, latency_s in fastest.items():
        several = [TimedCandidate(latency_s * (1 + n / 100), f"{key}{n}", f'"{n}"') for n in range(5)]
        so_far.subgraphs[key] = SubgraphHistory(fastest=several, untuned_s=99.0, best_after=[latency_s])
    subgraphs = [{**SUBGRAPH, "subgraph_id": key} for key in fastest]
    pool = FakePool([], [1e-7] * 3)
    pool.width = 1
    pool.compare = lambda _workload, traces, _repeats, *, baseline: ([[1.0 / len(traces)] for _ in traces], [])
    so_far.measured_s = 1e6

    choices = winners.choose_all(subgraphs, so_far, CompileConfig(finalists=4), pool, lambda _text: None)

    assert [choice.tuned_s for choice in choices] == [1 / 4, 0.014, 1 / 3]


@pytest.mark.parametrize(("untuned_s", "expected"), [(2.0, ("a", 0.1)), (None, ("a", 0.1)), (0.05, (None, 0.05))])
def test_when_the_time_for_finalists_is_over_the_rest_go_by_what_was_measured(untuned_s, expected):
    pool = FakePool([], [])
    pool.width = 1

    [choice] = winners.choose_all([SUBGRAPH], past(untuned_s), QUICK, pool, lambda _text: None)  # measured in no time

    assert pool.baselines == []
    assert (choice.candidate_id, choice.tuned_s) == expected
    assert (choice.max_error, choice.note) == (None, "not timed again; checked with the whole model")


def test_the_time_for_finalists_goes_to_the_subgraphs_that_take_most():
    so_far, asked = History(), []
    for key, latency_s in {"light": 0.1, "heavy": 9.0}.items():
        program = TimedCandidate(latency_s, key, f'"{key}"')
        so_far.subgraphs[key] = SubgraphHistory(fastest=[program], untuned_s=latency_s, best_after=[latency_s])
    pool = FakePool([], [1e-7] * 2)
    pool.width, so_far.measured_s = 1, 1e6
    pool.compare = lambda _workload, traces, _repeats, *, baseline: (asked.append(traces), ([[0.01]], [1.0]))[1]

    winners.choose_all([{**SUBGRAPH, "subgraph_id": key} for key in so_far.subgraphs], so_far, QUICK, pool, str)

    assert asked == [['"heavy"'], ['"light"']]


@pytest.mark.parametrize(
    ("errors", "expected"),
    [([1e-7], ("a", 0.1, 1e-7)), ([0.5, 1e-7], ("b", 0.1 * 1.05, 1e-7)), ([None, 0.5], (None, 2.0, None))],
)
def test_what_was_not_checked_gives_way_to_the_next_best_that_is_right(errors, expected):
    pool = FakePool([], errors)
    pool.width = 1
    unchecked = winners.choose_all([SUBGRAPH], past(2.0), QUICK, pool, lambda _text: None)

    [choice] = winners.without_wrong(unchecked, [SUBGRAPH], past(2.0), QUICK, pool)

    assert (choice.candidate_id, choice.tuned_s, choice.max_error) == expected
    assert pool.errors == []


def test_the_untuned_schedule_is_no_finalist_and_without_others_it_is_shipped():
    only = History(subgraphs={"s": SubgraphHistory(fastest=[TimedCandidate(0.1, "u", EMPTY_TRACE)])})

    choice = winners.choose(SUBGRAPH, only, QUICK, FakePool([]))

    assert (choice.candidate_id, choice.note) == (None, "no candidate worked")


def test_what_was_chosen_is_not_measured_again_while_its_finalists_stay_the_same(tmp_path):
    first = winners.choose(SUBGRAPH, past(), QUICK, FakePool([0.2, 0.3], [1e-7]), tmp_path)
    nobody = FakePool([])
    again = winners.choose(SUBGRAPH, past(), QUICK, nobody, tmp_path)

    assert again == first
    assert again.trace == '"a"'
    assert nobody.baselines == []


@pytest.mark.parametrize(
    ("found", "config", "conditions"),
    [
        (past(names=("a", "c")), QUICK, CONDITIONS),
        (past(untuned_s=0.5), QUICK, CONDITIONS),
        (past(), replace(QUICK, repeats=3), CONDITIONS),
        (past(), QUICK, replace(CONDITIONS, threads=9)),
    ],
    ids=["finalists", "untuned", "settings", "conditions"],
)
def test_what_was_chosen_of_others_is_measured_anew(tmp_path, found, config, conditions):
    winners.choose(SUBGRAPH, past(), QUICK, FakePool([0.2, 0.3], [1e-7]), tmp_path)
    pool = FakePool([0.4, 0.3], [1e-7])
    pool.conditions = conditions

    choice = winners.choose(SUBGRAPH, found, config, pool, tmp_path)

    assert len(pool.baselines) == 1
    assert choice.tuned_s == 0.3


def test_what_was_chosen_of_a_light_subgraph_is_chosen_again_where_it_is_heavy_and_kept_for_both(tmp_path):
    pool = FakePool([0.4, 0.3], [1e-7, 1e-7])

    light = winners.choose(SUBGRAPH, past(2.0), QUICK, pool, tmp_path, share=0.001)
    heavy = winners.choose(SUBGRAPH, past(2.0), QUICK, pool, tmp_path, share=0.5)
    light_again = winners.choose(SUBGRAPH, past(2.0), QUICK, pool, tmp_path, share=0.001)

    assert (light.tuned_s, heavy.tuned_s) == (0.1, 0.3)
    assert light_again == heavy
    assert pool.errors == []


def test_a_choice_that_is_damaged_is_made_again(tmp_path):
    winners.choose(SUBGRAPH, past(), QUICK, FakePool([0.2, 0.3], [1e-7]), tmp_path)
    path = tmp_path / "s.json"
    path.write_text(path.read_text().replace("0.2", "0.1"))

    choice = winners.choose(SUBGRAPH, past(), QUICK, FakePool([0.4, 0.5], [1e-7]), tmp_path)

    assert choice.tuned_s == 0.4
    assert json.loads(path.read_text())["choice"]["tuned_s"] == 0.4


def test_what_could_not_be_timed_is_tried_again(tmp_path):
    class Lost(FakePool):
        def compare(self, workload, traces, repeats, *, baseline):
            return [[] for _ in traces], []

    lost = winners.choose(SUBGRAPH, past(), QUICK, Lost([]), tmp_path)
    choice = winners.choose(SUBGRAPH, past(), QUICK, FakePool([0.2, 0.3], [1e-7]), tmp_path)

    assert lost.tuned_s is None
    assert choice.tuned_s == 0.2


def test_real_finalists_are_timed_and_checked(cpu, pool, tmp_path):
    workload = matmul(128, 128, 128)
    proposals = sample(workload, cpu.tvm(), 2, known=(), seed=0)
    fastest = [TimedCandidate(1e-6, f"c{n}", proposal.trace) for n, proposal in enumerate(proposals)]
    found = History(subgraphs={"s": SubgraphHistory(fastest=fastest)}, measured_s=1e6)
    subgraph = {**SUBGRAPH, "workload": tvm.ir.save_json(workload)}

    [choice] = winners.choose_all([subgraph], found, QUICK, pool, lambda _text: None, tmp_path)

    assert choice.candidate_id in ("c0", "c1")
    assert choice.tuned_s < choice.untuned_s
    assert choice.max_error < 1e-5
