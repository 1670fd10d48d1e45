"""What tests run in processes that have stand-in GPUs: kernels by themselves, and candidates beside the CPU's.

A kernel that goes wrong leaves its process without CUDA, so each test has a process of its own.
"""

import ctypes
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tests.cuda import compiler

T = TypeVar("T")


def in_own_process(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a fresh process, with the environment of now."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("dynamic_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("n_attributes", ctypes.c_uint),
    )  # fmt: skip


def launch(
    source: str, arrays: Sequence[np.ndarray], grid: int = 1, block: int = 1, dynamic_bytes: int = 0, device: int = 0
) -> list[np.ndarray]:
    """Run `main_kernel` of CUDA C++ on copies of arrays, by the calls that TVM makes; what they are afterwards.

    Args:
        device: That runs it; the arrays are in the memory of the first.

    Raises:
        RuntimeError: CUDA says why.
    """
    folder = Path(os.environ["STANDIN_FOLDER"])
    driver = ctypes.CDLL(str(folder / "lib" / "libcuda.so.1"), ctypes.RTLD_GLOBAL)
    runtime = ctypes.CDLL(str(folder / "lib" / "libcudart.so.13"))

    def check(error: int) -> None:
        if error:
            runtime.cudaGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(runtime.cudaGetErrorString(error).decode())

    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver.cuModuleLoadData(ctypes.byref(module), compiler.compiled(source, folder)))
    check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"main_kernel"))
    addresses = [ctypes.c_void_p() for _ in arrays]
    for address, array in zip(addresses, arrays, strict=True):
        check(runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(array.nbytes)))
        check(runtime.cudaMemcpyAsync(address, array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes),
                                      1, None))  # fmt: skip
    pointers = (ctypes.c_void_p * len(arrays))(*(ctypes.addressof(address) for address in addresses))
    check(runtime.cudaSetDevice(device))
    config = _LaunchConfig((grid, 1, 1), (block, 1, 1), dynamic_bytes)
    check(driver.cuLaunchKernelEx(ctypes.byref(config), function, pointers, None))
    found = [np.empty_like(array) for array in arrays]
    for address, array in zip(addresses, found, strict=True):
        check(runtime.cudaMemcpyAsync(array.ctypes.data_as(ctypes.c_void_p), address, ctypes.c_size_t(array.nbytes),
                                      2, None))  # fmt: skip
    return found


def touched_by_the_host() -> float:
    """What the host reads from memory of a device."""
    runtime = ctypes.CDLL(str(Path(os.environ["STANDIN_FOLDER"]) / "lib" / "libcudart.so.13"))
    address = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(4)) == 0
    assert address.value
    return ctypes.c_float.from_address(address.value).value
