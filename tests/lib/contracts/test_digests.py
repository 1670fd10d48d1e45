from lib.contracts import digests


def test_texts_are_kept_apart():
    assert digests.of_text("ab", "c") != digests.of_text("a", "bc")


def test_the_order_of_keys_does_not_matter():
    assert digests.of_json({"a": 1, "b": [2]}) == digests.of_json({"b": [2], "a": 1})


def test_digests_are_the_same_on_every_machine():
    assert (
        digests.of_text("conv2d") == "c5d9ec344ac36ca5"
    )  # sha256 of the length in 8 bytes and the text, computed apart


def test_a_file_has_the_digest_of_its_bytes(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"ab" * 2_000_000)

    assert digests.of_file(path) == digests.of_bytes([b"ab" * 1_000_000, b"ab" * 1_000_000])
