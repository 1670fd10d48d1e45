from dataclasses import dataclass

import pytest

from lib.contracts import settings
from lib.contracts.errors import ConfigError
from lib.measure.runner import MeasureConfig
from lib.search.evolution import SearchConfig
from lib.tuning.planning import PlanConfig


@dataclass(frozen=True)
class Settings:
    count: int = 3
    share: float = 0.5
    name: str = "x"


def test_text_becomes_the_type_of_the_field():
    assert settings.configured(Settings, "s", {"count": "7"}, name="y") == Settings(7, 0.5, "y")


def test_an_unknown_key_is_named_beside_the_known_ones():
    with pytest.raises(ConfigError, match=r"\[s\] has unknown keys: cuont. It may have: count, share, name."):
        settings.configured(Settings, "s", {"cuont": "7"})


def test_a_value_of_the_wrong_type_is_named():
    with pytest.raises(ConfigError, match=r"\[s\] count must be int, but got 'many'"):
        settings.configured(Settings, "s", {"count": "many"})


@pytest.mark.parametrize(("key", "text"), [("count", "-1"), ("share", "nan"), ("share", "inf"), ("share", "-0.1")])
def test_a_number_that_is_negative_or_not_finite_is_named(key, text):
    with pytest.raises(ConfigError, match=rf"\[s\] {key} must be a number from 0 on, but got '{text}'"):
        settings.configured(Settings, "s", {key: text})


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: PlanConfig(strategy="best"), "--strategy must be one of foresee, gradient, round-robin"),
        (lambda: PlanConfig(foresee=2), "--foresee is a share"),
        (lambda: MeasureConfig(run_timeout_s=0.1), "every candidate times out"),
        (lambda: MeasureConfig(weights="hot"), "must be cold or warm, but got 'hot'"),
        (lambda: SearchConfig(population=4), "at least 8 programs an island"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


def test_equal_settings_have_equal_digests():
    assert settings.digest(Settings(), 1) == settings.digest(Settings(), 1)
    assert settings.digest(Settings(), 1) != settings.digest(Settings(count=4), 1)
