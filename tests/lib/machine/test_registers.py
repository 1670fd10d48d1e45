import json

import pytest
from tvm.target import Target

from lib.machine import targets
from lib.machine.dots import ARM_SMALL, INT7, INT8, INT16
from lib.machine.registers import Registers, narrowed, registers


def x86(**parts):
    return Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "num-cores": 2, **parts})


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"mcpu": "skylake-avx512"}, Registers(32, 16, for_small=INT7)),
        ({"mcpu": "knl"}, Registers(32, 16)),
        ({"mcpu": "haswell"}, Registers(16, 8, (INT16,), spreads=False, for_small=INT7)),
        ({"mcpu": "sandybridge"}, Registers(16, 8, spreads=False)),
        ({"mcpu": "x86-64"}, Registers(16, 4, spreads=False)),
        ({"mcpu": "x86-64", "mattr": ["+avx2"]}, Registers(16, 8, (INT16,), spreads=False, for_small=INT7)),
        ({"mcpu": "skylake-avx512", "mattr": ["-avx512f"]}, Registers(16, 8, (INT16,), spreads=False, for_small=INT7)),
        ({"mcpu": "skylake-avx512", "vector-width": 256}, Registers(32, 8, for_small=INT7)),
        ({"mcpu": "haswell", "vector-width": 128}, Registers(16, 4, (INT16,), spreads=False, for_small=INT7)),
    ],
)
def test_registers_are_those_that_the_compiler_may_use(parts, expected):
    assert registers(x86(**parts)) == expected


def test_small_weights_have_an_instruction_of_their_own_where_none_is_for_all_bytes():
    assert registers(x86(mcpu="alderlake")).for_small is None
    assert registers(x86(mcpu="haswell")).fastest("int8") == INT7
    assert registers(x86(mcpu="skylake-avx512")).fastest("int8") == INT7
    assert registers(x86(mcpu="alderlake")).fastest("int8") == INT8


def test_an_arm_cpu_has_neons():
    arm = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"})

    assert registers(arm) == Registers(32, 4, for_small=ARM_SMALL)


def test_the_older_architecture_has_half_as_many_and_no_instructions_for_products():
    old = {"kind": "llvm", "mtriple": "armv8l-linux-gnueabihf", "mcpu": "cortex-a72", "mattr": ["+neon", "+i8mm"]}

    assert registers(Target(old)) == Registers(16, 4, spreads=False)


@pytest.mark.parametrize(
    ("mcpu", "expected"),
    [
        ("cortex-a72", set()),
        ("neoverse-n1", {"sdot"}),
        ("neoverse-v1", {"bfdot", "usdot", "sdot"}),
        ("apple-m2", {"bfdot", "usdot", "sdot"}),
    ],
)
def test_arm_has_instructions_for_products_by_its_features(mcpu, expected):
    found = registers(Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu}))

    assert {dot.name for dot in found.dots} == expected
    assert found.for_small == (None if expected else ARM_SMALL)


@pytest.mark.parametrize(
    ("target", "bits"),
    [({"mcpu": "haswell"}, 7), ({"mcpu": "skylake-avx512"}, 7), ({"mcpu": "icelake-server"}, 8),
     ({"mcpu": "cortex-a72", "mtriple": "aarch64-linux-gnu"}, 8)],
)  # fmt: skip
def test_weights_have_as_many_bits_as_are_multiplied_fastest(target, bits):
    assert registers(x86(**target)).weight_bits == bits


@pytest.mark.parametrize("width", [128, 256, 512])
def test_the_name_of_a_target_and_its_tiles_have_one_vector_width(width):
    parts = {"kind": "llvm", "mcpu": "skylake-avx512", "mtriple": "x86_64-linux-gnu", "vector-width": width}
    target = targets.cpu_target(json.dumps(parts), 1)

    assert target.name == f"llvm-skylake-avx512-1t-{width}b"
    assert registers(target.tvm()).lanes == width // 32


@pytest.mark.parametrize(("dot", "left"), [(INT16, 15), (INT7, 14), (INT8, 16), (None, 16)])
def test_products_that_another_instruction_adds_take_registers_and_the_time_in_which_numbers_are_loaded(dot, left):
    assert Registers(16, 8, spreads=False).beside(dot) == Registers(left, 8, spreads=left < 16)


def test_vectors_are_narrowed_to_what_fills_an_extent():
    assert [narrowed(16, extent) for extent in (48, 24, 12, 10, 7)] == [16, 8, 4, 1, 1]
    assert [narrowed(4, extent) for extent in (12, 10, 7)] == [4, 2, 1]
