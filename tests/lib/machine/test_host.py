import psutil
import pytest

from lib.machine import host

TWO = [["0", "GPU-a"], ["1", "GPU-b"]]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["GPU-a", "GPU-b"]), ("1", ["GPU-b"]), ("GPU-a", ["GPU-a"]), ("0, 1", ["GPU-a", "GPU-b"]), ("", [])],
)
def test_only_gpus_that_this_process_may_use_count(visible, expected, monkeypatch):
    monkeypatch.setattr(host, "_nvidia_smi", lambda _columns: TWO)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert host.gpus() == expected


def test_a_machine_without_nvidias_tool_says_nothing_of_gpus(monkeypatch):
    monkeypatch.setenv("PATH", "")

    assert host.gpus() is None
    assert host.gpu_facts("name") == []


def test_cores_are_those_this_process_may_use(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0}, raising=False)

    assert host.physical_cores() == 1


def test_memory_is_what_the_container_may_have_shared_out_but_never_less_than_tvm_needs():
    assert 0 < host.memory_bytes() <= psutil.virtual_memory().total
    assert host.memory_of_each(1.0, 1) == max(host.memory_bytes(), 2 << 30)
    assert host.memory_of_each(0.5, 1000) == 2 << 30
