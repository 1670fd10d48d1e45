"""Which settings name a run, and which existing run is meant."""

import json
from dataclasses import dataclass, replace

import pytest

from lib.contracts.files import ModelFiles
from lib.contracts.settings import limit
from lib.tuning import runs
from lib.tuning.planning import PlanConfig
from tests.helpers import CONDITIONS


@dataclass(frozen=True)
class Config:
    repeats: int = 3
    patience_s: float = limit(120.0)


@dataclass(frozen=True)
class NewerConfig(Config):
    warm: bool = False


def identity(config=None, conditions=CONDITIONS, **options):
    configs = {"plan": PlanConfig(), "measure": config or Config()}
    return runs.identity("foresee", configs, {"seed": 0, **options}, conditions)


@pytest.fixture
def model(tmp_path):
    """A model with one run."""
    model = ModelFiles(tmp_path)
    runs.record(runs.find(model, identity()).files, identity())
    return model


def test_the_settings_of_a_run_stand_in_its_folder_in_words(model):
    found = json.loads(runs.find(model, identity()).files.settings.read_text())

    assert found["deciding"]["measure"] == {"repeats": 3}
    assert found["deciding"]["options"] == {"seed": 0}
    assert found["deciding"]["conditions"]["lowering"] == "plain r0"
    assert found["limits"] == {"measure": {"patience_s": 120.0}}


def test_with_another_limit_the_same_run_goes_on_and_its_file_says_so(model):
    changed = identity(Config(patience_s=5.0))

    found = runs.find(model, changed)
    runs.record(found.files, changed)

    assert not found.is_new
    assert json.loads(found.files.settings.read_text())["limits"] == {"measure": {"patience_s": 5.0}}
    assert runs.find(model, identity()).files == found.files


def test_a_setting_that_decides_starts_another_run_and_is_named_beside_the_nearest(model):
    other = identity(Config(repeats=9), seed=7, families="each")
    runs.record(runs.find(model, other).files, other)

    found = runs.find(model, identity(Config(repeats=9)))

    assert found.is_new
    assert found.message == f"a new run: it differs from {runs.find(model, identity()).files.folder.name} in\n" \
        "  [measure] repeats = 9 (there: 3)"  # fmt: skip


def test_another_lowering_starts_another_run_and_is_named(model):
    found = runs.find(model, identity(conditions=replace(CONDITIONS, lowering="plain r1")))

    assert found.differences == ("[conditions] lowering = plain r1 (there: plain r0)",)


def test_a_new_field_with_a_default_does_not_orphan_a_run(model):
    old = runs.find(model, identity())

    assert runs.find(model, identity(NewerConfig())).files == old.files
    assert runs.find(model, identity(NewerConfig(warm=True))).differences == ("[measure] warm = True (there: False)",)


def test_a_run_that_went_on_keeps_what_a_new_field_was_for_it(model):
    runs.record(runs.find(model, identity(NewerConfig())).files, identity(NewerConfig()))

    @dataclass(frozen=True)
    class ChangedDefault(Config):
        warm: bool = True

    assert runs.find(model, identity(ChangedDefault())).differences == ("[measure] warm = True (there: False)",)


def test_a_setting_that_is_no_more_starts_another_run(model):
    runs.record(runs.find(model, identity(NewerConfig(warm=True))).files, identity(NewerConfig(warm=True)))
    only = ModelFiles(model.folder.with_name("only"))
    runs.record(runs.find(only, identity(NewerConfig())).files, identity(NewerConfig()))

    assert runs.find(only, identity()).differences == ("[measure] warm = (no such setting) (there: False)",)


@pytest.mark.parametrize("damage", ["", "{", '{"deciding": 3}', "[]", None])
def test_a_run_without_readable_settings_is_left_alone_and_named(model, damage):
    files = runs.find(model, identity()).files
    renamed = files.folder.rename(files.folder.with_name("of-older-code"))
    (renamed / "run.json").unlink() if damage is None else (renamed / "run.json").write_text(damage)

    found = runs.find(model, identity())

    assert found.is_new
    assert found.message == "left alone, since no run.json says what they are: of-older-code"


def test_a_run_whose_settings_were_lost_is_found_by_its_name(model):
    files = runs.find(model, identity()).files
    files.settings.unlink()

    assert runs.find(model, identity()) == runs.Found(files, is_new=False)
