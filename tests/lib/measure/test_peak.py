import numpy as np
import tvm

from lib.machine import targets
from lib.measure import peak
from lib.search.evolution import sample
from lib.tir import lowering
from tests.helpers import matmul


def test_no_program_of_the_same_pool_reaches_more(cpu, pool):
    """Where other tests share the cores, a turn may be disturbed, or have both cores for once: medians of programs."""
    n = 256
    workload = matmul(n, n, n)
    proposals = sample(workload, cpu.tvm(), 4, known=(), seed=0)

    peaks, reached = [], []
    for _ in range(4):
        peaks.append(peak.flops(cpu, pool))
        latencies, _ = pool.compare(tvm.ir.save_json(workload), [p.trace for p in proposals], 1, baseline=None)
        reached.append([2 * n**3 / latency for [latency] in latencies])

    assert None not in peaks
    assert max(peaks) > np.median(reached, axis=0).max()


def test_a_gpu_has_none(pool):
    assert peak.flops(targets.target("nvidia/nvidia-h100"), pool) is None


def test_it_computes_what_it_counts(cpu, tmp_path):
    """Against NumPy: compilers leave nothing of it out."""
    source = peak._SOURCE.format(threads=2, lanes=8, sums=3, steps=5)
    workload = tvm.IRModule({"main": tvm.script.from_source(source)})
    lowering.build(workload, cpu.tvm()).export_library(str(tmp_path / "peak.so"))
    x = np.random.default_rng(0).random((2, 8), np.float32)
    y = tvm.runtime.tensor(np.zeros((2, 3, 8), np.float32))

    tvm.runtime.load_module(str(tmp_path / "peak.so"))["main"](tvm.runtime.tensor(x), y)

    expected = x
    for _ in range(5):
        expected = expected * x + x
    np.testing.assert_allclose(y.numpy(), np.repeat(expected[:, None], 3, axis=1), rtol=1e-6)
