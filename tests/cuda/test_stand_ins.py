"""That the stand-ins of GPUs do what GPUs do, and notice what GPUs may let pass."""

import os
import subprocess
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import numpy as np
import pytest

from lib.machine import host, targets
from lib.tuning import cost_model
from tests.cuda import compiler, emulated, stand_ins

pytestmark = pytest.mark.usefixtures("gpus")


def kernel(body: str, before: str = "", threads: int = 64) -> str:
    return f'{before}extern "C" __global__ void __launch_bounds__({threads}) main_kernel(float* x_ptr) {{ {body} }}'


def launched(source: str, block: int = 64, n: int = 64, **options: int) -> np.ndarray:
    """What becomes of 0, 1, 2, ..."""
    run = partial(emulated.launch, block=block, **options)
    [found] = emulated.in_own_process(run, source, [np.arange(n, dtype=np.float32)])
    return found


SHARED = "__shared__ alignas(64) float s_ptr[64];"
DYNAMIC = "extern __shared__ __align__(64) float s_ptr[];"
REVERSED = """
    s_ptr[threadIdx.x] = x_ptr[threadIdx.x];
    {}
    x_ptr[threadIdx.x] = s_ptr[63 - threadIdx.x];
"""


@pytest.mark.parametrize("array", [SHARED, DYNAMIC])
def test_threads_of_a_block_share_memory(array):
    found = launched(kernel(array + REVERSED.format("__syncthreads();")), dynamic_bytes=256)

    np.testing.assert_array_equal(found, np.arange(64)[::-1])


@pytest.mark.parametrize("array", [SHARED, DYNAMIC])
def test_without_a_barrier_threads_read_what_is_not_there_yet(array):
    found = launched(kernel(array + REVERSED.format("")), dynamic_bytes=256)

    assert np.isnan(found).any()


def test_without_a_barrier_at_the_end_of_a_loop_threads_overwrite_what_others_need():
    body = """
        float sum = 0;
        for (int n = 0; n < 4; ++n) {{
            s_ptr[threadIdx.x] = x_ptr[threadIdx.x] + n;
            __syncthreads();
            sum += s_ptr[63 - threadIdx.x];
            {}
        }}
        x_ptr[threadIdx.x] = sum;
    """
    expected = 4 * np.arange(64)[::-1] + 6

    np.testing.assert_array_equal(launched(kernel(SHARED + body.format("__syncthreads();"))), expected)
    assert (launched(kernel(SHARED + body.format(""))) != expected).any()


def test_the_order_of_threads_is_that_of_the_seed(monkeypatch):
    source = kernel(SHARED + REVERSED.format(""))
    once, again = launched(source), launched(source)
    monkeypatch.setenv("STANDIN_SEED", "1")
    otherwise = launched(source)

    np.testing.assert_array_equal(once, again)
    assert not np.array_equal(once, otherwise, equal_nan=True)


FAULTS = {
    "behind": (
        "x_ptr[threadIdx.x + 1] = 0;",
        r"thread \(63, 0, 0\) wrote 0 bytes behind the end of an array of 256 bytes",
    ),
    "far behind": (
        "x_ptr[0] = x_ptr[2048];",
        "read 7936 bytes behind the end of an array of 256 bytes of device memory",
    ),
    "before": ("x_ptr[int(threadIdx.x) - 1] = 0;", "wrote next to an array of 256 bytes of device memory"),
    "behind shared": (
        SHARED + "float* s = s_ptr; s[threadIdx.x + 1] = 0;",
        "wrote 0 bytes behind the end of an array of 256 bytes of shared memory",
    ),
    "behind dynamic": (
        DYNAMIC + "s_ptr[threadIdx.x + 1] = 0;",
        "wrote 0 bytes behind the end of an array of 256 bytes of shared memory",
    ),
    "before shared": (
        SHARED + "float* s = s_ptr; s[int(threadIdx.x) - 1] = 0;",
        "wrote next to an array of 256 bytes of shared memory",
    ),
    "local": (
        "alignas(64) float r_ptr[4]; r_ptr[threadIdx.x] = 1; x_ptr[threadIdx.x] = r_ptr[threadIdx.x];",
        "a local array out of its bounds",
    ),
    "by zero": ("x_ptr[threadIdx.x] = 7 / (int(threadIdx.x) / 64);", "divided an integer by zero"),
    "half a warp": (
        "if (threadIdx.x < 40) __shfl_sync(~0u, 1, 0); else __syncthreads();",
        "waits for threads that never come",
    ),
}


@pytest.mark.parametrize(("body", "told"), FAULTS.values(), ids=FAULTS)
def test_what_a_thread_must_not_do_is_told_with_the_thread(body, told):
    with pytest.raises(RuntimeError, match=f"an illegal memory access was encountered.*{told}"):
        launched(kernel(body), dynamic_bytes=256)


@pytest.mark.parametrize(("threads", "dynamic_bytes"), [(1025, 0), (64, 49153)])
def test_what_a_gpu_has_no_room_for_is_not_launched(threads, dynamic_bytes):
    with pytest.raises(RuntimeError, match="invalid configuration argument"):
        launched(kernel(""), block=threads, dynamic_bytes=dynamic_bytes)


def test_the_host_cannot_touch_memory_of_a_gpu():
    with pytest.raises(BrokenProcessPool):
        emulated.in_own_process(emulated.touched_by_the_host)


def test_a_gpu_cannot_touch_memory_of_another():
    with pytest.raises(RuntimeError, match="of device memory, which is another device's"):
        launched(kernel("x_ptr[threadIdx.x] = 0;"), device=1)


def after_a_fault() -> str:
    broken = kernel("x_ptr[1 << 20] = 0;")
    for source in (broken, kernel("")):
        try:
            emulated.launch(source, [np.zeros(64, np.float32)])
        except RuntimeError as error:
            told = str(error)
    return told


def test_after_a_fault_a_process_has_no_cuda():
    assert emulated.in_own_process(after_a_fault).startswith("an illegal memory access was encountered")


def test_threads_of_a_warp_hand_values_over_while_other_warps_wait():
    """The barrier of the block is none of theirs."""
    body = """
        if (threadIdx.x < 32) {
            float sum = x_ptr[threadIdx.x];
            for (int n = 16; n > 0; n /= 2) sum += __shfl_down_sync(__activemask(), sum, n, 32);
            if (threadIdx.x == 0) s_ptr[0] = sum;
        }
        __syncthreads();
        x_ptr[threadIdx.x] = s_ptr[0];
    """

    np.testing.assert_array_equal(launched(kernel(SHARED + body)), np.full(64, 31 * 16))


@pytest.mark.parametrize(
    ("shuffle", "expected"),
    [
        ("__shfl_sync(~0u, x, 3, 8)", np.arange(64) // 8 * 8 + 3),
        ("__shfl_xor_sync(~0u, x, 1)", np.arange(64) ^ 1),
        ("__shfl_up_sync(~0u, x, 2, 16)", np.where(np.arange(64) % 16 < 2, np.arange(64), np.arange(64) - 2)),
        ("__shfl_down_sync(~0u, x, 2, 16)", np.where(np.arange(64) % 16 > 13, np.arange(64), np.arange(64) + 2)),
    ],
)
def test_lanes_exchange_values(shuffle, expected):
    found = launched(kernel(f"float x = x_ptr[threadIdx.x]; x_ptr[threadIdx.x] = {shuffle};"))

    np.testing.assert_array_equal(found, expected)


def test_threads_that_have_ended_are_not_waited_for():
    body = "if (threadIdx.x >= 40) return; s_ptr[threadIdx.x] = 1; __syncthreads(); x_ptr[threadIdx.x] = s_ptr[0];"

    np.testing.assert_array_equal(launched(kernel(SHARED + body)), [1.0] * 40 + list(range(40, 64)))


def test_each_block_begins_with_shared_memory_of_no_value():
    body = "x_ptr[blockIdx.x * 64 + threadIdx.x] = s_ptr[threadIdx.x]; __syncthreads(); s_ptr[threadIdx.x] = 1;"

    assert np.isnan(launched(kernel(SHARED + body), n=256, grid=4)).all()


def test_tensor_cores_multiply_matrices_of_a_warp():
    source = """#include <cuda_fp16.h>
#include <mma.h>
extern "C" __global__ void __launch_bounds__(32) main_kernel(half* a_ptr, half* b_ptr, float* c_ptr) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 16, half, row_major> a;
  fragment<matrix_b, 16, 16, 16, half, col_major> b;
  fragment<accumulator, 16, 16, 16, float> c;
  fill_fragment(c, 1.0f);
  load_matrix_sync(a, a_ptr, 16);
  load_matrix_sync(b, b_ptr, 16);
  mma_sync(c, a, b, c);
  store_matrix_sync(c_ptr, c, 16, mem_row_major);
}"""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((16, 16)).astype(np.float16) for _ in range(2))

    *_, c = emulated.in_own_process(partial(emulated.launch, block=32), source, [a, b, np.zeros((16, 16), np.float32)])

    np.testing.assert_allclose(c, a.astype(np.float32) @ b.astype(np.float32).T + 1, rtol=1e-5, atol=1e-5)


def test_instructions_that_it_does_not_know_do_not_compile():
    with pytest.raises(compiler.Unknown, match="knows no PTX 'mma"):
        compiler.translated(kernel('asm volatile("mma.sync.aligned.m16n8k8" : : );'))


def test_the_tools_of_a_machine_with_gpus_are_there(gpus, tmp_path):
    source = tmp_path / "kernels.cu"
    source.write_text("this is no C++")
    done = subprocess.run(["nvcc", "--fatbin", "-o", tmp_path / "out", source], capture_output=True, text=True)

    assert host.gpus() == list(stand_ins.UUIDS)
    assert targets.target("cuda").name == targets.target(stand_ins.TARGET).name == "cuda-sm_80"
    assert done.returncode != 0
    assert "refuses what the kernel became" in done.stderr


def test_xgboost_tells_them_from_real_ones():
    assert cost_model.without_cuda().startswith("XGBoost")


def loaded_then_forked() -> int:
    """Exit code of a child that asks for a device; its parent has loaded TVM and used none."""
    import tvm

    child = os.fork()
    if child == 0:
        os._exit(int(tvm.cuda(0).exist))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def two_devices() -> list[list[float]]:
    import tvm

    return [tvm.runtime.tensor(np.full(2, n, np.float32), tvm.cuda(n)).numpy().tolist() for n in range(2)]


def test_tvm_finds_both():
    assert emulated.in_own_process(two_devices) == [[0, 0], [1, 1]]


def test_a_fork_of_a_process_that_loaded_cuda_has_none():
    assert emulated.in_own_process(loaded_then_forked) == 0
