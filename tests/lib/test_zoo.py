import numpy as np
import pytest

from lib import zoo
from lib.errors import ModelError


@pytest.mark.parametrize("name", zoo.ZOO)
def test_equal_seeds_give_equal_weights_in_parameter_order(name):
    first, second = zoo.load(name, seed=5), zoo.load(name, seed=5)

    names = [str(p.name) for p in first.module["main"].params][int(first.module["main"].attrs["num_input"]) :]
    assert list(first.weights) == names
    assert all(np.array_equal(first.weights[key], second.weights[key]) for key in names)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ModelError, match="The zoo has: resnet18, resnet50, tiny_cnn, tiny_transformer"):
        zoo.load("resnet51")
