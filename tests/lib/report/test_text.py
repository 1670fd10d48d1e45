from dataclasses import replace

from lib.report import text
from tests.lib.report.test_page import SUBGRAPHS


def test_numbers_stand_under_each_other():
    assert text.align([("name", "n"), ("a", "1"), ("bcd", "12")]) == "name   n\n----  --\na      1\nbcd   12"


def test_a_long_name_keeps_its_beginning_and_its_end_and_a_line_stays_readable():
    long = "fused_conv2d20_" + "add12_cast12_multiply9_" * 9 + "cast131"

    lines = text.subgraph_table([replace(SUBGRAPHS[0], name=long), *SUBGRAPHS[1:]]).splitlines()

    assert lines[1].startswith(48 * "-" + "  ")
    assert lines[2].startswith("fused_conv2d20_add12_cast12_mult...")
    assert lines[2][35:50] == "ltiply9_cast131"[-13:] + "  "
