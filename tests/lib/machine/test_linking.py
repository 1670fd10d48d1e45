import shutil

import pytest
from tvm.support import cc
from tvm.target import Target

from lib.contracts.errors import TargetError
from lib.machine import linking, targets

PI = targets.cpu_target("raspberry-pi/5").tvm()
MAC = targets.cpu_target("apple/m1").tvm()


@pytest.fixture
def there(monkeypatch):
    """The programs that are on PATH."""
    found = set()
    monkeypatch.setattr(shutil, "which", lambda name: name if name in found else None)
    monkeypatch.delenv(linking.VARIABLE, raising=False)
    return found


def test_libraries_of_this_machine_are_linked_as_ever(cpu, there):
    there.add(cc.get_cc())

    assert linking.for_export(cpu.tvm()) == {}
    assert linking.for_export(Target("nvidia/nvidia-h100")) == {}


def test_without_a_compiler_or_with_one_that_is_not_there_it_is_told_what_to_install(cpu, there, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(TargetError, match=r"no program 'no-such-compiler', which CXX or CC names\. Install"):
        linking.linker(cpu.tvm())

    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(TargetError, match=r"there is none on PATH\. Install one .*apt-get install"):
        linking.linker(cpu.tvm())


def test_debians_compiler_is_found(there):
    there.add("aarch64-linux-gnu-g++")

    assert linking.linker(PI) == ["aarch64-linux-gnu-g++"]
    assert "fcompile" in linking.for_export(PI)


def test_that_of_the_triple_itself_comes_first(there):
    there |= {"aarch64-linux-gnu-g++", "aarch64-poky-linux-g++"}
    board = targets.cpu_target('{"kind": "llvm", "mtriple": "aarch64-poky-linux"}', threads=2)

    assert linking.linker(board.tvm()) == ["aarch64-poky-linux-g++"]


def test_another_one_with_its_options_may_be_named(there, monkeypatch):
    there.add("clang++")
    monkeypatch.setenv(linking.VARIABLE, "clang++ --target=aarch64-linux-gnu '--sysroot=/a b'")

    assert linking.linker(PI) == ["clang++", "--target=aarch64-linux-gnu", "--sysroot=/a b"]


def test_one_that_is_named_must_be_there(there, monkeypatch):
    there.add("aarch64-linux-gnu-g++")
    monkeypatch.setenv(linking.VARIABLE, "clang++ --target=aarch64-linux-gnu")

    with pytest.raises(TargetError, match="no program 'clang\\+\\+' on PATH"):
        linking.linker(PI)


def test_without_any_the_debian_package_is_named(there):
    with pytest.raises(TargetError, match=r"apt-get install g\+\+-aarch64-linux-gnu.*\[tuner\] linker"):
        linking.linker(PI)


def test_what_is_linked_on_macs_alone_is_told(there):
    there.add("aarch64-linux-gnu-g++")

    with pytest.raises(TargetError, match="linked on a Mac"):
        linking.linker(MAC)
