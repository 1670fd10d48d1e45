"""Weights of resized axes, worked by hand."""

import numpy as np
import pytest

from lib.models.onnx_resize import Resize, taps


def matrix(found, n):
    """[outputs, inputs]"""
    made = np.zeros((found.indices.shape[1], n))
    for indices, weights in zip(found.indices, found.weights, strict=True):
        np.add.at(made, (np.arange(len(indices)), indices), weights)
    return made


def test_twice_as_many_by_the_nearest():
    found = taps(2, 4, 2.0, Resize("nearest"))

    assert found.indices.tolist() == [[0, 0, 1, 1]]
    assert (found.weights == 1).all()


@pytest.mark.parametrize(
    ("coordinates", "expected"),
    [
        ("half_pixel", [[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]]),
        ("align_corners", [[1, 0], [2 / 3, 1 / 3], [1 / 3, 2 / 3], [0, 1]]),
        ("asymmetric", [[1, 0], [0.5, 0.5], [0, 1], [0, 1]]),
    ],
)
def test_twice_as_many_between_two(coordinates, expected):
    np.testing.assert_allclose(matrix(taps(2, 4, 2.0, Resize("linear", coordinates)), 2), expected, atol=1e-12)


def test_half_as_many_without_aliasing_look_at_all_that_they_stand_for():
    found = matrix(taps(4, 2, 0.5, Resize("linear", antialias=True, exclude_outside=True)), 4)

    # Triangles of twice the width around 0.5 and 2.5: 1/4, 3/4, 3/4, 1/4 of what is inside.
    np.testing.assert_allclose(found, [[3 / 7, 3 / 7, 1 / 7, 0], [0, 1 / 7, 3 / 7, 3 / 7]], atol=1e-12)


def test_what_lies_outside_of_a_cropped_part_has_a_value_of_its_own():
    found = taps(4, 3, 0.75, Resize("linear", "tf_crop_and_resize", outside=9.0), roi=(0.5, 1.5))

    # Places 1.5, 3.0 and 4.5 of 0 to 3.
    np.testing.assert_allclose(matrix(found, 4), [[0, 0.5, 0.5, 0], [0, 0, 0, 1], [0, 0, 0, 0]], atol=1e-12)
    assert found.constant.tolist() == [0, 0, 9]


def test_cubic_weights_are_keys_kernel():
    found = matrix(taps(8, 8, 1.0, Resize("cubic", "asymmetric", cubic_a=-0.5)), 8)

    np.testing.assert_allclose(found, np.eye(8), atol=1e-12)  # at its own places it is one
    between = matrix(taps(8, 16, 2.0, Resize("cubic", "asymmetric", cubic_a=-0.5)), 8)[7]
    np.testing.assert_allclose(between, [0, 0, -1 / 16, 9 / 16, 9 / 16, -1 / 16, 0, 0], atol=1e-12)
