"""The distribution, built and installed as its README says, in an environment that has nothing of the tuner."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.acceptance


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the distribution and what it needs: TVM's runtime without its compiler, and NumPy."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    shutil.copytree(ROOT / "lib" / "runtime", source)  # building leaves files there
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", folder, source], check=True, timeout=300)
    [wheel] = folder.glob("*.whl")
    site = folder / "site"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", site, wheel], check=True, timeout=300)
    tvm, copied = Path(find_spec("tvm").origin).parent, site / "tvm"
    for name in ("numpy", "numpy.libs", "tvm_ffi", "ml_dtypes", "typing_extensions.py"):
        if (tvm.parent / name).exists():
            (site / name).symlink_to(tvm.parent / name)
    (copied / "lib").mkdir(parents=True)
    for name in ("_version.py", "lib/libtvm_runtime.so", "lib/libtvm_runtime_extra.so"):
        (copied / name).symlink_to(tvm / name)
    (copied / "__init__.py").write_text("raise ImportError('TVM itself is not to be imported')")
    return wheel, site


def test_it_has_its_types_and_the_header_and_nothing_of_the_tuner(installed):
    wheel, _ = installed

    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [archive.read(name).decode() for name in names if name.endswith("METADATA")]

    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"family_tuner_runtime"}
    assert {"family_tuner_runtime/py.typed", "family_tuner_runtime/include/family_tuner_runtime.hpp"} <= set(names)
    needed = [line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert {name.split("<")[0].split(">")[0] for name in needed} == {"apache-tvm", "apache-tvm-ffi", "numpy"}


def test_it_checks_and_runs_a_bundle_without_tvms_compiler(installed, small):
    _, site = installed
    environment = {**os.environ, "PYTHONPATH": str(site)}
    code = (
        "import sys, numpy as np\nfrom family_tuner_runtime import Model, include_dir\n"
        "assert (include_dir() / 'family_tuner_runtime.hpp').exists()\n"
        f"print(Model({str(small.folder)!r})(np.ones((1, 8, 8, 8), np.float32)).shape)\n"
        "assert 'tvm' not in sys.modules and 'luigi' not in sys.modules"
    )

    def run(*arguments):
        # -S: without the packages of this environment
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, timeout=60)

    ran, checked = run("-c", code), run("-m", "family_tuner_runtime", "check", str(small.folder))

    assert (ran.returncode, ran.stdout.strip()) == (0, "(1, 10)"), ran.stderr
    assert checked.returncode == 0, checked.stderr
    assert "whole, and fits this machine" in checked.stdout
