"""Whole runs for ARM on this machine: compiled and verified without a device, and measured on an emulated one."""

import os
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime

from lib.contracts import manifest, tables
from lib.contracts.files import RunFiles
from lib.contracts.schemas import MEASUREMENTS
from lib.measure.emulator import Emulator
from tests.emulated import FOLDER, emulated_farm, needs_emulator, needs_linker
from tests.helpers import ROOT, SMALL, environment, luigi_command

pytestmark = [needs_linker, needs_emulator]


def tuned(tmp_path: Path, *arguments: str, tuner: str = "") -> tuple[RunFiles, str]:
    """The run of a command, and what it printed.

    Args:
        tuner: A line more for that section of the configuration.
    """
    chosen = environment(tmp_path)
    config = Path(chosen["LUIGI_CONFIG_PATH"])
    config.write_text(config.read_text().replace("[tuner]\n", f"[tuner]\n{tuner}\n"))
    command = luigi_command("TuneModel", "--model", str(SMALL), *arguments)
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **chosen}, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [folder] = (tmp_path / "artifacts").glob("llvm-*-128b/*/runs/*")
    return RunFiles(folder), done.stdout


def on_an_emulated_cpu(run: RunFiles, cpu: str, tmp_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The output of a run's library on random inputs, and what ONNX Runtime makes of its file here."""
    x = np.random.default_rng(7).standard_normal((1, 8, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "inputs.npz", x)
    files = run.compiled.library, run.compiled.params, tmp_path / "inputs.npz", tmp_path / "out.npz"
    Emulator(FOLDER, cpu).infer(*files, threads=2, timeout_s=120)
    [found] = np.load(tmp_path / "out.npz").values()
    [expected] = onnxruntime.InferenceSession(SMALL, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    return found, expected


def test_without_a_device_a_library_is_compiled_checked_here_and_run_by_an_emulator(tmp_path):
    options = ["--trials", "0", "--target", "arm/cortex-a76", "--threads", "2"]

    run, told = tuned(tmp_path, *options, tuner=f"emulator = {FOLDER}")

    facts = manifest.read(run.compiled.manifest)
    assert facts["target"]["mcpu"] == "cortex-a76"
    assert not facts["ran"]
    assert facts["device"] == "no device"
    assert facts["latencies_s"] == {"tuned": [], "untuned": []}
    assert facts["compared_with"].startswith("ONNX Runtime")
    assert facts["emulated"]["by"].endswith("-cpu cortex-a76")
    assert facts["emulated"]["max_error"] <= 1e-5
    assert "on which it never ran: nothing was timed" in " ".join(told.split())
    assert "the library itself by qemu-aarch64" in run.page.read_text()
    found, expected = on_an_emulated_cpu(run, "cortex-a76", tmp_path)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_device_behind_a_tracker_is_measured_on(tmp_path):
    with emulated_farm(threads=2) as farm:
        options = ["--trials", "6", "--target", "arm/neoverse-n1", "--threads", "2", "--devices", farm.address]
        run, _ = tuned(tmp_path, *options)

    facts = manifest.read(run.compiled.manifest)
    measured = tables.read(run.round(0).measurements, MEASUREMENTS).to_pylist()
    assert facts["ran"]
    assert facts["device"] == "rpc test"
    assert facts["latencies_s"]["tuned"]
    assert len(measured) >= 6
    assert {row["status"] for row in measured} == {"ok"}
    found, expected = on_an_emulated_cpu(run, "neoverse-n1", tmp_path)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
