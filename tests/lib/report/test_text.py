from lib.report import text


def test_numbers_stand_under_each_other():
    assert text.align([("name", "n"), ("a", "1"), ("bcd", "12")]) == "name   n\n----  --\na      1\nbcd   12"
