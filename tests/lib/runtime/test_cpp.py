"""The C++ header by its example, built with CMake as its README says, and run without Python."""

import json
import shutil
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest

from lib import bundle
from lib.contracts import manifest
from lib.contracts.files import CompiledFiles
from tests.helpers import ROOT
from tests.lib.runtime.conftest import changed, texts, values

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no CMake"),
]
FLAGS = "-Wall -Wextra -Werror"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    build = tmp_path_factory.mktemp("build")
    source = ROOT / "lib" / "runtime" / "example"
    options = [f"-DPython3_EXECUTABLE={sys.executable}", f"-DCMAKE_CXX_FLAGS={FLAGS}"]
    for command in (["cmake", "-S", source, "-B", build, *options], ["cmake", "--build", build]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "run"


@pytest.fixture
def copy(small, tmp_path):
    shutil.copytree(small.folder, tmp_path / "copy")
    return CompiledFiles(tmp_path / "copy")


def run(program, *folders):
    """Without what would help it to find Python or its packages."""
    return subprocess.run([program, *folders], env={}, cwd="/", capture_output=True, text=True, timeout=60)


def test_it_computes_what_the_reference_says_from_several_threads_and_sessions(program, small, pair):
    done = run(program, small.folder, pair.folder)

    assert done.returncode == 0, done.stderr
    assert f"{small.folder}: 1 inputs, 1 outputs" in done.stdout
    assert f"{pair.folder}: 2 inputs, 4 outputs" in done.stdout


def test_open_dimensions_are_padded_and_cut(program, ranged, ranged_file, tmp_path):
    """The reference of the bundle is shorter than what was compiled; then all extents, as ONNX Runtime has them."""
    done = run(program, ranged.folder)

    assert done.returncode == 0, done.stderr
    assert f"{ranged.folder}: 2 inputs, 1 outputs" in done.stdout
    session = onnxruntime.InferenceSession(ranged_file)
    copy = CompiledFiles(tmp_path / "copy")
    shutil.copytree(ranged.folder, copy.folder)
    facts = json.loads(copy.manifest.read_text())
    for batch, sequence in ((4, 16), (3, 5), (2, 9), (1, 1)):
        inputs = texts(batch, sequence)
        bundle.write_reference(inputs, session.run(None, dict(zip(("ids", "mask"), inputs, strict=True))), copy)
        named = [copy.folder / name for name in facts["files"]]
        manifest.write(
            copy.manifest, "", {k: v for k, v in facts.items() if k not in ("inputs", "files", "seal")}, named
        )
        done = run(program, copy.folder)
        assert done.returncode == 0, (batch, sequence, done.stdout, done.stderr)
    bundle.write_reference(texts(1, 17), [np.zeros((1, 17, 32), np.float32)], copy)
    manifest.write(copy.manifest, "", {k: v for k, v in facts.items() if k not in ("inputs", "files", "seal")}, named)
    assert "sequence is 17, and the model was compiled for 1 to 16" in run(program, copy.folder).stderr


def test_it_tells_a_bundle_that_computes_something_else(program, copy):
    bundle.write_reference([values()], [np.ones((1, 10), np.float32)], copy)
    changed(copy)

    assert run(program, copy.folder).returncode == 1


def test_it_says_what_is_wrong_with_a_bundle(program, copy, tmp_path):
    def complaint(folder):
        done = run(program, folder)
        assert done.returncode == 2
        return done.stderr

    whole = copy.params.read_bytes()
    assert "manifest.json cannot be read" in complaint(tmp_path)
    copy.params.write_bytes(whole[:-1])
    assert "weights.safetensors is damaged: its size" in complaint(copy.folder)
    copy.params.write_bytes(b"\xff" * len(whole))
    assert "its header is longer than the file" in complaint(copy.folder)
    copy.params.unlink()
    assert "weights.safetensors is missing" in complaint(copy.folder)
    copy.manifest.write_text("[]")
    assert "manifest.json is damaged: it is no JSON object" in complaint(copy.folder)


def test_inputs_that_do_not_fit_are_told_borrowed_ones_are_read_and_outputs_may_be_written_to(small, pair, tmp_path):
    """What the example does not do, in a program of its own, built as the example was."""
    source = tmp_path / "main.cpp"
    source.write_text(
        """
        #include <family_tuner_runtime.hpp>
        #include <cassert>
        #include <cstring>
        #include <iostream>
        using family_tuner::Error;
        template <typename Call>
        void told(Call call) {
          try {
            call();
            std::cout << "nothing" << std::endl;
          } catch (const Error& error) {
            std::cout << error.what() << std::endl;
          }
        }
        int main(int, char** words) {
          family_tuner::Model model(words[1]), other = model.session({1, {}});
          auto [inputs, expected] = model.reference();
          auto x = inputs[0];
          std::vector<char> memory(x.numel() * 4 + 64);
          char* odd = memory.data() + 4;
          std::memcpy(odd, x.data_ptr(), x.numel() * 4);
          auto one = model({x}), two = other({{"x", model.wrap(0, odd)}});
          size_t size = one[0].numel() * 4;
          std::cout << (std::memcmp(one[0].data_ptr(), two[0].data_ptr(), size) == 0) << std::endl;
          told([&] { model(std::vector<tvm::ffi::Tensor>{}); });
          told([&] { model({expected[0]}); });
          told([&] { model(std::map<std::string, tvm::ffi::Tensor>{{"y", x}}); });
          told([&] { model.session({-1, {}}); });
          told([&] { model.session({0, {100000}}); });
          family_tuner::Model pair(words[2]);
          auto [given, wanted] = pair.reference();
          for (auto& output : pair(given)) std::memset(output.data_ptr(), 1, 4 * output.numel());
          auto again = pair(given);
          for (int n : {2, 3}) std::cout << std::memcmp(again[n].data_ptr(), wanted[n].data_ptr(), 96) << std::endl;
        }
        """
    )
    build = tmp_path / "build"
    example = (ROOT / "lib" / "runtime" / "example" / "CMakeLists.txt").read_text()
    header = ROOT / "lib" / "runtime" / "family_tuner_runtime" / "include"
    (tmp_path / "CMakeLists.txt").write_text(
        example.replace("${CMAKE_CURRENT_SOURCE_DIR}/../family_tuner_runtime/include", str(header))
    )
    options = [f"-DPython3_EXECUTABLE={sys.executable}", f"-DCMAKE_CXX_FLAGS={FLAGS}"]
    for command in (["cmake", "-S", tmp_path, "-B", build, *options], ["cmake", "--build", build]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    lines = run(build / "run", small.folder, pair.folder).stdout.splitlines()

    assert lines[:2] == ["1", "0 inputs were given, and the model takes 1"]
    assert lines[2].startswith("x: float32[1, 8, 8, 8], contiguous and in the CPU's memory, is what the model takes")
    assert lines[3:] == [
        "there is no value for x: float32[1, 8, 8, 8]", "a session has at least one thread",
        "this process may not use core 100000", "0", "0",
    ]  # fmt: skip
