"""Whole models, compiled by processes that may hang, crash and ask for everything."""

import sys
from pathlib import Path

import pytest
import tvm

from lib import building
from lib.contracts.errors import CompilationError
from lib.graph import fusion
from lib.measure.protocol import BuildModel
from lib.models.zoo import catalogue
from lib.verification import CompileConfig
from stages import compile

LIMITS = {"memory_share": 0.5, "timeout_s": 60.0}


@pytest.fixture(scope="module")
def module(cpu, tmp_path_factory):
    path = tmp_path_factory.mktemp("module") / "module.json"
    path.write_text(tvm.ir.save_json(fusion.fuse(catalogue.load("tiny_cnn").module, cpu.tvm())))
    return path


def test_one_that_fails_costs_its_library_alone(module, cpu, tmp_path):
    (tmp_path / "damaged.json").write_text("no module")
    orders = [BuildModel(tmp_path / "damaged.json", tmp_path / "bad.so"), BuildModel(module, tmp_path / "good.so")]

    failed = building.build_all(orders, cpu, **LIMITS)

    assert list(failed) == [tmp_path / "bad.so"]
    assert (tmp_path / "good.so").stat().st_size > 1000


def test_one_that_takes_too_long_is_ended_and_nothing_of_it_is_left(module, cpu, tmp_path):
    failed = building.build_all([BuildModel(module, tmp_path / "late.so")], cpu, memory_share=0.5, timeout_s=0.01)

    assert failed == {tmp_path / "late.so": "killed for taking too long: 0.01 s"}
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limits")
def test_one_that_needs_more_memory_than_it_may_have_fails(cpu, tmp_path, monkeypatch):
    monkeypatch.setattr(building.host, "memory_of_each", lambda _share, _processes: 1 << 30)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(4 << 30)  # takes no room on the disk

    failed = building.build_all([BuildModel(tmp_path / "large.json", tmp_path / "large.so")], cpu, **LIMITS)

    assert "MemoryError" in failed[tmp_path / "large.so"]


@pytest.mark.parametrize(("library", "raises"), [("tuned", True), ("checked", True), ("untuned", False)])
def test_a_model_without_its_untuned_library_is_shipped_and_without_another_one_is_not(
    module, cpu, tmp_path, monkeypatch, library, raises
):
    orders = [BuildModel(module, tmp_path / f"{name}.so") for name in ("tuned", "checked", "untuned")]
    half = tmp_path / f"{library}.so"

    def failing(_orders, _target, **_limits: float) -> dict[Path, str]:
        half.write_bytes(b"half")
        return {half: "it ran out of memory"}

    monkeypatch.setattr(building, "build_all", failing)
    if raises:
        with pytest.raises(CompilationError, match=f"The {library} model could not be compiled: it ran out of memory"):
            compile._build_all(orders, cpu, CompileConfig())
    else:
        compile._build_all(orders, cpu, CompileConfig())

    assert not half.exists()
