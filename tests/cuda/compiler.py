"""`nvcc` of the stand-in GPUs: the host's C++ compiler makes a shared library of CUDA C++ that TVM wrote.

    compiler.py [options as of nvcc, of which most mean nothing here] -o OUT SOURCE.cu

The library stands in the output behind a header that `device/driver.cpp` reads. Kernels that were compiled before are
taken from a folder. Started by a script of the name `nvcc` that `stand_ins.py` writes.
"""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

CXX = os.environ.get("CXX", "g++")
FLAGS = ("-O1", "-march=native", "-fPIC", "-std=c++17", "-w", "-fno-strict-aliasing")
# An index that leaves an array of a thread's own is an illegal instruction.
BOUNDS = ("-fsanitize=bounds", "-fsanitize-undefined-trap-on-error")

_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\)|alignas\(\d+\))? ?(\w+) (\w+)\[\];")
_STATIC = re.compile(r"__shared__ (?:__align__\(\d+\)|alignas\(\d+\))? ?([\w:]+) (\w+)\[(\d+)\];")
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(\d+(?:, \d+)?\) )?(\w+)\([^)]*\) \{')
_PTX = re.compile(r'\b(?:asm|__asm__) (?:volatile|__volatile__) ?\(\s*"([^"]*)"[^;]*;')
_LEFT = re.compile(r"__shared__|\basm\b\s*(?:volatile)?\s*\(")
# Copies that TVM writes as plain loads and stores are done at once: there is nothing to wait for.
_NOTHING = re.compile(r"cp\.async\.(commit_group|wait_group \d+);")


class Unknown(Exception):
    """CUDA C++ that the stand-in cannot run."""


def translated(source: str) -> str:
    """CUDA C++ as the host compiles it after `device/kernel.h`.

    Raises:
        Unknown: There is PTX in it that has no translation.
    """
    numbers = iter(range(1 << 16))

    def declared(found: re.Match[str]) -> str:
        kind, name, extent = found.groups()
        array = f"{kind}[{extent}]"
        return f"auto& {name} = standin::shared_array<{array}>({next(numbers)});"

    def without_ptx(found: re.Match[str]) -> str:
        if not _NOTHING.fullmatch(found[1].strip()):
            raise Unknown(f"the stand-in GPU knows no PTX {found[1]!r}")
        return ";"

    source = _DYNAMIC.sub(r"\1* \2 = static_cast<\1*>(standin::dynamic_shared());", source)
    source = _PTX.sub(without_ptx, _STATIC.sub(declared, source))
    code = re.sub(r"(?m)^\s*(#|//).*", "", source)
    if left := _LEFT.search(code):
        line = code[code.rfind("\n", 0, left.start()) + 1 :].partition("\n")[0]
        raise Unknown(f"the stand-in GPU cannot read {line.strip()!r}")
    entries = [
        f'extern "C" void {name}__entry(void** arguments) {{ standin::call({name}, arguments); }}'
        for name in _KERNEL.findall(source)
    ]
    return "\n".join([source, *entries, ""])


def compiled(source: str, folder: Path) -> bytes:
    """An image that the stand-in of the driver loads.

    Args:
        folder: Of the stand-ins, with `kernel.h` and the libraries; `kernels` below it keeps what was compiled.

    Raises:
        Unknown: See `translated`; or the host's compiler refuses it.
    """
    text = translated(source)
    kept = folder / "kernels" / f"{hashlib.sha1(text.encode()).hexdigest()}.so"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        fresh, written = (kept.with_suffix(f".{os.getpid()}.{kind}") for kind in ("so", "cpp"))
        written.write_text(text)
        command = [CXX, *FLAGS, *BOUNDS, "-shared", "-include", folder / "kernel.h", "-I", folder / "include", written,
                   "-o", fresh, "-L", folder / "lib", "-l:libcuda.so.1"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        written.unlink()
        if done.returncode:
            raise Unknown(f"{CXX} refuses what the kernel became:\n{done.stderr}")
        fresh.replace(kept)
    library = kept.read_bytes()
    return b"STAND-IN" + len(library).to_bytes(8, "little") + library


def main(arguments: list[str]) -> None:
    """Compile a file as nvcc would."""
    out = Path(arguments[arguments.index("-o") + 1])
    [source] = [each for each in arguments if each.endswith(".cu")]
    try:
        out.write_bytes(compiled(Path(source).read_text(), Path(os.environ["STANDIN_FOLDER"])))
    except Unknown as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
