"""How fast one core reads what another one has just written.

    python benchmarks/cores.py [--seconds 60]     # asks every second

A virtual machine's two cores share a cache at one moment and do not at the next: its host moves them, for tens of
seconds each time. On a Zen 4 the same library of MobileNetV2 took 1.8 ms at 75 GB/s and 3.0 ms at 25 GB/s. So whoever
times what runs on several cores asks this before and after.
"""

import argparse
import ctypes
import functools
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

_BYTES, _TURNS = 1 << 20, 40  # some milliseconds
_LOOKS = 3  # the best of them counts: whatever else runs makes it slower
_NEAR = 0.6  # of the fastest that was seen: below, the cores share no cache
_SOURCE = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

struct side { int core, number, turns; volatile char *bytes; size_t n; atomic_int *turn; double seconds; };

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec + at.tv_nsec / 1e9;
}

/* Reads all lines, then writes them, whenever it is its turn. */
static void *run(void *argument) {
  struct side *side = argument;
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(side->core, &core);
  pthread_setaffinity_np(pthread_self(), sizeof core, &core);
  for (int n = 0; n < side->turns; n++) {
    while (atomic_load(side->turn) != 2 * n + side->number) {}
    double before = now();
    char sum = 0;
    for (size_t k = 0; k < side->n; k += 64) sum += side->bytes[k];
    side->seconds += now() - before;
    for (size_t k = 0; k < side->n; k += 64) side->bytes[k] = sum;
    atomic_store(side->turn, 2 * n + side->number + 1);
  }
  return 0;
}

double bytes_per_second(int first, int second, size_t n, int turns) {
  char *bytes = calloc(n, 1);
  atomic_int turn = 0;
  struct side sides[2] = {{first, 0, turns, bytes, n, &turn, 0}, {second, 1, turns, bytes, n, &turn, 0}};
  pthread_t threads[2];
  for (int k = 0; k < 2; k++) pthread_create(&threads[k], 0, run, &sides[k]);
  for (int k = 0; k < 2; k++) pthread_join(threads[k], 0);
  free(bytes);
  return 2.0 * n * turns / (sides[0].seconds + sides[1].seconds);
}
"""


def between() -> float:
    """Bytes a second, of the first two cores that this process may use; NaN if there is but one."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        return math.nan
    return max(_probe()(*cores, _BYTES, _TURNS) for _ in range(_LOOKS))


def are_near(found: ArrayLike, fastest: float) -> Any:
    """Element by element, whether cores shared a cache, by what `between` found and the fastest that it found on the
    machine. Where it was not asked (NaN), they are taken to."""
    return np.logical_not(np.less(found, _NEAR * fastest))


@functools.cache
def _probe() -> Callable[..., float]:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "cores.c"), Path(folder, "cores.so")
        source.write_text(_SOURCE)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", source, "-o", library], check=True)
        function = ctypes.CDLL(str(library)).bytes_per_second
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_double
    probe: Callable[..., float] = function
    return probe


def main() -> None:
    """Print a line a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    for _ in range(parser.parse_args().seconds):
        print(f"{time.strftime('%T')} {between() / 1e9:.0f} GB/s", flush=True)
        time.sleep(1)


if __name__ == "__main__":
    main()
