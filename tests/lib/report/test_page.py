"""Pages of made-up rows: what they say, and that nothing in them is taken for markup. A browser looks at real ones in
test_browser.py."""

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pytest

from lib.report import page
from lib.report.nights import ModelRow, NightRows, Prospect
from lib.report.rows import Accuracy, Candidate, Failure, Program, RunRows, SubgraphRow
from tests.helpers import CONDITIONS

FACTS = {
    "device": "a CPU", "threads": 2, "host": "here", "target": {"kind": "llvm"}, "shipped": "tuned",
    "latencies_s": {"tuned": [0.010, 0.012, 0.011], "untuned": [0.110], "onnxruntime": [0.022]},
    "untuned_estimated": False, "untuned_is_lower_bound": False, "max_error": 2e-6, "largest_output": 1.0,
    "onnx": {"by": "ONNX Runtime 1.31.1", "max_error": 3e-6, "failure": ""}, "peak_flops": 100e9,
    "model_inputs": [{"shape": [1, 3], "dtype": "float32", "bound": 0}, {"shape": [], "dtype": "int64", "bound": 7}],
}  # fmt: skip


def subgraph(name, calls, tuned_s, family="matmul", **changes):
    program = Program("4 x 2 x 8 lanes", ("parallel 4", "  product"), "sch.parallel(l1)")
    best = (Candidate("c1", tuned_s, "evolved", "contraction", 3, 0.5),)
    row = SubgraphRow(
        f"id-{name}", name, family, "matmul", calls, 1e6, 4000, 20, 5, Counter(ok=23, crash=2), 10 * tuned_s, tuned_s,
        1e-6, "", "adapted", "fused_conv2d", program, best,
    )  # fmt: skip
    return replace(row, **changes)


SUBGRAPHS = (subgraph("fused_matmul", 4, 0.001), subgraph("softmax", 1, 0.002, "softmax"), subgraph("tiny", 1, 1e-7))
RUN = RunRows(
    "resnet on a CPU", FACTS, 3, 60, 15, 30, CONDITIONS, ("float32",), SUBGRAPHS,
    (Accuracy("matmul", 40, 20, 0.8, 0.97, 0.6, None),), (Failure("crash", 2, ("fused_matmul",), "signal 11"),),
    {"search": 10.0, "run": 30.0, "total": 40.0}, 0.01,
    pa.table({"seconds": [1.0, 2.0], "trials": [1, 2], "latency_s": [0.02, 0.01]}),
)  # fmt: skip


class Parsed(HTMLParser):
    """Ids, links and text of a page; complains about tags that do not match."""

    VOID = ("meta", "link", "br", "path", "use")

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.texts, self._open = [], [], [], []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if tag == "a" else []
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.texts))


def run_page(run=RUN):
    return page.run_page(run, Path("/models/compiled"))


def test_the_first_lines_say_how_fast_beside_what_and_how_right():
    text = Parsed(run_page()).text

    assert "11.00 ms an inference, 2.00 times as fast as ONNX Runtime 1.31.1 (22.00 ms)" in text
    assert "10.0 times as fast as untuned (110.00 ms)" in text
    assert "Largest error 2.0e-06 of the largest output, 3.0e-06 to ONNX Runtime 1.31.1." in text
    assert "60 trials in 3 rounds, 15 measurements recalled, 40 s in all." in text


def test_other_work_beside_the_measurements_is_told_where_there_was_much():
    told = "Candidates had no core in 43 % of the time in which they were timed"

    assert told in Parsed(run_page(replace(RUN, waited=0.43))).text
    assert "no core" not in Parsed(run_page()).text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"shipped": "untuned"}, "nothing faster than the untuned model was found"),
        ({"untuned_estimated": True}, "(110.00 ms, estimated)"),
        ({"untuned_is_lower_bound": True}, "at least 10.0 times as fast as untuned"),
        ({"rest": {"told": "2 of its 9 operators are left"}}, ". Of the file, 2 of its 9 operators are left."),
        ({"largest_output": 0.0}, "The outputs vanish, so nothing could be compared"),
        ({"onnx": {"by": "", "max_error": None, "failure": "it hangs"}}, "not compared with its file: it hangs."),
    ],
)
def test_what_is_not_known_is_not_claimed(changes, told):
    assert told in page.verdict(replace(RUN, facts={**FACTS, **changes}))


def test_boxes_are_as_large_as_time_and_lead_to_their_subgraph():
    found = Parsed(run_page())
    areas = {}
    for box in page.treemap(SUBGRAPHS)["boxes"]:
        width, height = (float(re.search(rf"{side}:([\d.]+)%", box["place"]).group(1)) for side in ("width", "height"))
        areas[box["name"]] = width * height / 1e4
        assert f"#{box['link']}" in found.links
        assert box["link"] in found.ids

    assert areas["matmul"] == pytest.approx(0.004 / 0.0060001, rel=1e-3)
    assert areas["softmax"] == pytest.approx(0.002 / 0.0060001, rel=1e-3)
    assert len(found.ids) == len(set(found.ids))


def test_a_subgraph_has_its_speed_its_share_of_the_peak_its_tile_its_schedule_and_its_best_candidates():
    text = Parsed(run_page()).text

    assert "1.00 MFLOP a call: 1.0 GFLOP/s, 1.0 % of the peak" in text
    assert "adapted from fused_conv2d, register tile 4 x 2 x 8 lanes" in text
    assert "parallel 4" in text
    assert "sch.parallel(l1)" in text
    assert "20 new trials, 5 recalled; failed: 2 crash" in text
    assert "of peak" not in Parsed(run_page(replace(RUN, facts={**FACTS, "peak_flops": None}))).text


def test_a_page_of_many_subgraphs_stays_small_and_shows_the_schedules_of_those_that_take_longest():
    program = Program("8 lanes", ("parallel 4", "  product"), "sch.parallel(loop=l1)\n" * 500)
    rows = tuple(subgraph(f"s{n:03}", 1, 0.001 * (400 - n), program=program) for n in range(400))

    found = run_page(replace(RUN, subgraphs=rows))

    assert len(found) < 3e6
    assert found.count("the schedule that makes it") == (1 << 20) // len(program.schedule)
    assert found.index("the schedule that makes it") < found.index("there is no room here for all")
    assert found.count("  product</pre>") == 400


def test_a_page_of_a_run_that_measured_nothing_says_so():
    nothing = replace(RUN, n_trials=0, curve=RUN.curve.slice(0, 0), accuracies=(), failures=())

    text = Parsed(run_page(nothing)).text

    assert "There is no curve: nothing was measured." in text
    assert "No model was trained." in text
    assert "No candidate of this run failed." in text


def test_nothing_that_was_measured_is_taken_for_markup():
    evil = "<script>alert('x')</script>&amp;"
    rows = (subgraph(evil, 1, 0.001, note=evil), subgraph("b", 1, 0.001, family=evil, origin=evil))
    run = replace(RUN, title=evil, subgraphs=rows, failures=(Failure("crash", 1, (evil,), evil),))

    found = run_page(run)

    assert found.count("<script>") == 1  # the page's own
    assert evil in Parsed(found).text


def test_no_page_asks_the_network_for_anything():
    for found in (run_page(), night_page(), compared()):
        assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", found)
        assert not re.findall(r"url\(\s*['\"]?(?!#)", found)
        assert "@import" not in found


def test_the_code_of_a_page_has_a_value_for_each_input():
    found = page.code(FACTS, Path("/models/it's here"))

    compile(found, "page", "exec")
    assert "x0 = np.random.rand(1, 3).astype('float32')" in found
    assert "x1 = np.array(1, 'int64')" in found
    assert 'Model("/models/it\'s here")' in found


def model(name, **changes):
    row = ModelRow(name, 1.0, "", "", 5, 30, 10, 0.02, 0.01, 0.011, 0.1, None, 1e-6, None, 60.0, None)
    return replace(row, **changes)


NIGHT = NightRows(
    "2 models on a CPU",
    (model("resnet", page_before_s=0.022, page=Path("/a/nights/../resnet/runs/r 1/report.html")),
     model("broken", error="no <ONNX> file", kept="/a/broken", library_s=0.03)),
    4, 60, 20, 10, 8, 3, (Failure("timeout", 2, ("resnet/conv",), "10 s"),),
    (Prospect("conv", ("resnet",), 0.4, 0.05, 64),), {"search": 10.0, "run": 30.0, "total": 40.0},
)  # fmt: skip


def night_page(night=NIGHT):
    return page.night_page(night, Path("/a/nights"))


def test_a_night_says_what_changed_what_failed_and_what_more_time_may_save():
    found = Parsed(night_page())

    assert "1 of 2 models have a library of this night, 1 failed" in found.text
    assert "-50.0 %" in found.text
    assert "broken : no <ONNX> file Its library of before is kept: /a/broken" in found.text
    assert "10 subgraphs to tune, 8 different ones, 3 of them known before" in found.text
    assert "20 measurements were recalled, 25.0 % of all that were used" in found.text
    assert "conv resnet 40.0 % 5.0 % 64" in found.text


def test_links_of_a_night_are_relative_and_quoted():
    assert Parsed(night_page()).links == ["../resnet/runs/r%201/report.html"]


def compared(second=RUN, settings=()):
    return page.comparison_page(RUN, second, (Path("/a"), Path("/b")), settings)


def test_two_runs_stand_side_by_side_with_what_differs():
    faster = replace(
        RUN,
        facts={**FACTS, "latencies_s": {**FACTS["latencies_s"], "tuned": [0.005]}},
        subgraphs=(subgraph("fused_matmul", 4, 0.0005), *SUBGRAPHS[1:]),
        conditions=replace(CONDITIONS, threads=4),
    )

    text = Parsed(compared(faster, [("[options] seed", "0", "1")])).text

    assert "The second is 2.20 times as fast as the first" in text
    assert "[options] seed 0 1" in text
    assert "threads 2 4" in text
    assert "fused_matmul 4 1,000.0 500.0 2.00 +2.000 25 25 4 x 2 x 8 lanes 4 x 2 x 8 lanes" in text


def test_runs_of_different_models_are_not_called_faster_than_each_other():
    other = replace(RUN, subgraphs=(subgraph("another", 1, 0.001),))

    text = Parsed(compared(other)).text

    assert "They compute different things." in text
    assert "another 1 - 1,000.0" in text


@pytest.mark.parametrize(
    ("seconds", "told"), [(59.4, "59 s"), (61, "1 min 1 s"), (3599, "59 min 59 s"), (7260, "2 h 1 min")]
)
def test_durations_are_told_as_a_person_would(seconds, told):
    assert page.duration(seconds) == told


def test_a_run_without_trials_says_that_nothing_was_timed():
    facts = {**FACTS, "latencies_s": {"tuned": [0.01], "untuned": []}, "onnx": None}
    rows = tuple(replace(row, tuned_s=None, untuned_s=None, best=(), origin="foretold", donor="") for row in SUBGRAPHS)
    run = replace(RUN, facts=facts, subgraphs=rows, n_trials=0, n_rounds=0, curve=RUN.curve.slice(0, 0))

    text = Parsed(page.run_page(run, Path("compiled"))).text

    assert "No subgraph was timed" in text
    assert "as fast as untuned" not in text
    assert "foretold" in text


def test_the_page_says_what_learning_saved():
    """Search and runs took 40 s for 60 trials."""
    text = Parsed(page.run_page(RUN, Path())).text

    assert "30 trials of first looks, about 20 s, 15 trials recalled, about 10 s" in text
    assert "of what is shipped: 3 adapted" in text


def test_in_bf16_it_is_the_form_of_an_operator_that_keeps_it_in_floats():
    rows = subgraph("a", 1, 0.001, operator="matmul_bf16"), subgraph("b", 3, 0.001, operator="depthwise_conv2d")

    text = Parsed(run_page(replace(RUN, subgraphs=rows, facts={**FACTS, "tolerance": 0.05}))).text

    assert "In float32 stayed 3 of depthwise_conv2d: a depthwise convolution." in text


def test_beside_products_that_are_split_others_stay_whole_as_they_are_too_few():
    rows = subgraph("a", 1, 0.001, operator="matmul_bf16"), subgraph("b", 3, 0.001, operator="matmul")

    text = Parsed(run_page(replace(RUN, subgraphs=rows, facts={**FACTS, "precision": "bf16x6"}))).text

    assert "In float32 stayed 3 of matmul: products too few to be split." in text


@pytest.mark.parametrize(
    ("changes", "n_products", "is_told"),
    [
        ({}, 3, True),
        ({}, 1, False),
        ({"precision": "bf16x6"}, 3, False),
        ({"multiplies_matrices": False}, 3, False),
    ],
)
def test_products_in_floats_that_would_be_faster_in_six_of_bf16_are_told(changes, n_products, is_told):
    rows = subgraph("a", n_products, 0.001, operator="matmul"), subgraph("b", 3, 0.001, operator="softmax")
    facts = {**FACTS, "precision": "model", "multiplies_matrices": True, **changes}

    text = Parsed(run_page(replace(RUN, subgraphs=rows, facts=facts))).text

    assert ("50 % of the time are products that this CPU may compute sooner" in text) == is_told
    assert ("--precision bf16x6" in text) == is_told


def test_what_stayed_in_floats_is_told_with_the_reason_where_others_are_narrow():
    rows = (
        subgraph("a", 1, 0.001, operator="matmul_int8"), subgraph("b", 3, 0.001, operator="batch_matmul"),
        subgraph("c", 2, 0.001, operator="softmax"),
    )  # fmt: skip
    narrow = replace(RUN, subgraphs=rows, facts={**FACTS, "tolerance": 0.05, "peak_flops_int8": 400e9})

    text = Parsed(run_page(narrow)).text

    assert "In float32 stayed 3 of batch_matmul: not quantised in the file, or not as instructions take it." in text
    assert "(0.05 is allowed in this precision)" in text
    assert "measured on this device; of int8 400" in text
    assert "1.00 MFLOP a call: 1.0 GFLOP/s, 0.2 % of the peak" in text
    assert "In float32 stayed" not in Parsed(run_page()).text
