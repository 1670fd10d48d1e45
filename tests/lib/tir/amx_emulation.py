"""AMX in software: what `lib.tir.matrix` calls, as functions in C with registers in memory; for CPUs that have none.

As Intel describes the instructions, but for one thing: a row of a register is as wide as its configuration says, and
whoever reads or writes beyond that ends the process, where the CPU would raise an exception.
"""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

_HEAD = r"""
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <utility>
struct Tile { int rows, width; unsigned char bytes[16][64]; };
static thread_local Tile tiles[8];
static thread_local bool ready = false;
static void check(bool holds, const char *what) { if (!holds) { std::fprintf(stderr, "%s\n", what); std::abort(); } }
static void configure(std::initializer_list<std::pair<int, int>> shapes) {
  int n = 0;
  for (auto [rows, width] : shapes) {
    check(rows <= 16 && width <= 64 && n < 8, "no such register");
    tiles[n] = Tile{rows, width, {}};
    ++n;
  }
  for (; n < 8; ++n) tiles[n] = Tile{};
  ready = true;
}
static void move(int n, char *at, char *next, bool in) {
  Tile &tile = tiles[n];
  check(ready && tile.rows, "a register that was not configured");
  for (int row = 0; row < tile.rows; ++row) {
    char *place = at + row * (next - at);
    if (in) std::memcpy(tile.bytes[row], place, tile.width); else std::memcpy(place, tile.bytes[row], tile.width);
  }
}
static float wide(uint16_t x) { uint32_t bits = uint32_t(x) << 16; float y; std::memcpy(&y, &bits, 4); return y; }
template <class Sum, class Product> static void multiply(int c, int a, int b, Product product) {
  Tile &sums = tiles[c], &data = tiles[a], &weights = tiles[b];
  check(ready && sums.rows == data.rows && sums.width == weights.width && weights.rows == data.width / 4, "shapes");
  for (int m = 0; m < sums.rows; ++m)
    for (int k = 0; k < weights.rows; ++k)
      for (int n = 0; n < sums.width / 4; ++n) {
        Sum sum; std::memcpy(&sum, sums.bytes[m] + 4 * n, 4);
        sum += product(data.bytes[m] + 4 * k, weights.bytes[k] + 4 * n);
        std::memcpy(sums.bytes[m] + 4 * n, &sum, 4);
      }
}
static float bf16(const unsigned char *x, const unsigned char *w) {
  uint16_t a[2], b[2]; std::memcpy(a, x, 4); std::memcpy(b, w, 4);
  return wide(a[0]) * wide(b[0]) + wide(a[1]) * wide(b[1]);
}
static int32_t bytes(const unsigned char *x, const unsigned char *w) {
  int32_t sum = 0;
  for (int n = 0; n < 4; ++n) sum += int32_t(x[n]) * int32_t(int8_t(w[n]));
  return sum;
}
extern "C" {
"""
_KINDS = {
    r"permitted": "int family_tuner_tiles_permitted() {{ return {permitted}; }}",
    r"configure((?:_\d+x\d+)+)": "void {name}() {{ configure({{{shapes}}}); }}",
    r"release": "void {name}() {{ ready = false; }}",
    r"zero_(\d)": "void {name}() {{ check(ready, \"zero\"); std::memset(tiles[{0}].bytes, 0, 1024); }}",
    r"(?:load|stream)_(\d)": "void {name}(char *at, char *next) {{ move({0}, at, next, true); }}",
    r"store_(\d)": "void {name}(char *at, char *next, char *) {{ move({0}, at, next, false); }}",
    r"multiply_tdpbf16ps_(\d)_(\d)_(\d)": "void {name}() {{ multiply<float>({0}, {1}, {2}, bf16); }}",
    r"multiply_tdpbusd_(\d)_(\d)_(\d)": "void {name}() {{ multiply<int32_t>({0}, {1}, {2}, bytes); }}",
}  # fmt: skip


def compiled(names: Iterable[str], out: Path, *, permitted: bool = True) -> Path:
    """An object file with the functions of these names."""
    source = out.with_suffix(".cpp")
    lines = [_function(name, permitted) for name in sorted(names)]
    source.write_text("\n".join([_HEAD, *lines, "}"]))
    subprocess.run(["g++", "-std=c++17", "-O1", "-fPIC", "-c", str(source), "-o", str(out)], check=True)
    return out


def _function(name: str, permitted: bool) -> str:
    for kind, text in _KINDS.items():
        if found := re.fullmatch(f"family_tuner_tiles_{kind}", name):
            shapes = ", ".join(f"{{{r}, {w}}}" for r, w in re.findall(r"_(\d+)x(\d+)", name))
            return text.format(*found.groups(), name=name, shapes=shapes, permitted=int(permitted))
    raise AssertionError(f"no such function: {name}")
