"""Model files as quantisers write them: two small networks by ONNX Runtime's, NNCF's, PyTorch's (PT2E) and torchao's.

    pip install torch==2.13.0 torchao==0.18.0 nncf==3.4.0     # into an environment of its own, with onnxruntime
    python benchmarks/wall_quantized.py --out FILES
    python benchmarks/wall.py --files FILES --quick --out ROWS.parquet

Beside each file lie inputs, what ONNX Runtime (without optimisations, which round more) or torch makes of them, and how
far a library may be from that: where activations are rounded, one that is rounded to the next byte is right, too. Left
out are ONNX Runtime's operators on bytes: with AVX2 alone its products of them overflow.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime import quantization
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType
from onnxruntime.quantization import matmul_nbits_quantizer as few_bits
from torch import nn
from torchao import quantization as torchao
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
from torchao.utils import unwrap_tensor_subclass

ROUNDED, EXACT = 3e-2, 1e-3  # of the largest value
_WIDTH, _WORDS = 256, 1000
Arrays = dict[str, np.ndarray]


class Block(nn.Module):
    """Of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.heads, self.joined = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.wide, self.narrow = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        heads = self.heads(self.before(x)).reshape(n, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.joined(attended.transpose(1, 2).reshape(n, length, _WIDTH))
        return x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))


class Words(nn.Module):
    """Two such blocks between a table of words and their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(_WORDS, _WIDTH), nn.Sequential(Block(), Block())
        self.scores = nn.Linear(_WIDTH, _WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.scores(self.blocks(self.table(ids)))


class Image(nn.Module):
    """Convolutions of several kinds, a gate, and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU6(), nn.Conv2d(32, 32, 3, 1, 1, groups=32),
            nn.BatchNorm2d(32), nn.Hardswish(), nn.Conv2d(32, 64, 1), nn.SiLU(), nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 2, 2), nn.LeakyReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 48, 1), nn.Sigmoid(),
        )  # fmt: skip
        self.gate, self.scores = nn.Conv2d(48, 48, 1), nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return self.scores(x.mean((2, 3)))


def _words(length: int) -> torch.Tensor:
    return torch.randint(0, _WORDS, (1, length))


NETWORKS: dict[str, tuple[type[nn.Module], Callable[[], torch.Tensor]]] = {
    "image": (Image, partial(torch.randn, 1, 3, 64, 64)),
    "words": (Words, partial(_words, 16)),
    "word": (Words, partial(_words, 1)),
}


def network(name: str) -> tuple[nn.Module, torch.Tensor]:
    """With seeded random weights, and an input."""
    torch.manual_seed(0)
    kind, draw = NETWORKS[name]
    return kind().eval(), draw()


class Samples(CalibrationDataReader):
    """What ONNX Runtime asks for."""

    def __init__(self, name: str) -> None:
        self._left = iter([{"x": NETWORKS[name][1]().numpy()} for _ in range(4)])

    def get_next(self) -> Arrays | None:
        return next(self._left, None)


def of_onnx_runtime(name: str, plain: Path) -> Iterator[tuple[str, float, Callable[[Path], None]]]:
    """Name, tolerance, and what writes the file."""
    kinds = [
        (QuantType.QUInt8, QuantType.QInt8), (QuantType.QInt8, QuantType.QInt8), (QuantType.QUInt8, QuantType.QUInt8),
        (QuantType.QUInt16, QuantType.QInt8), (QuantType.QInt16, QuantType.QInt16),
        (QuantType.QUInt8, QuantType.QInt4), (QuantType.QUInt16, QuantType.QUInt4),
    ]  # fmt: skip
    for (activation, weight), by_channel in itertools.product(kinds, (False, True)):
        title = f"qdq_{activation.name}_{weight.name}{'_channels' if by_channel else ''}"
        yield title, ROUNDED, partial(_quantized, plain, name, activation, weight, by_channel)
    if name == "image":
        return
    for block, is_symmetric, (form, bits) in itertools.product(
        (32, 128), (True, False), ((QuantFormat.QDQ, 4), (QuantFormat.QOperator, 4), (QuantFormat.QOperator, 8))
    ):
        given = few_bits.DefaultWeightOnlyQuantConfig(
            block_size=block, is_symmetric=is_symmetric, quant_format=form, bits=bits
        )
        title = f"weights_{form.name}_{bits}_{block}{'' if is_symmetric else '_zeros'}"
        yield title, EXACT, partial(_few_bits, plain, given)


def _quantized(plain: Path, name: str, activation: QuantType, weight: QuantType, by_channel: bool, out: Path) -> None:
    quantization.quantize_static(
        plain, out, Samples(name), quant_format=QuantFormat.QDQ, activation_type=activation, weight_type=weight,
        per_channel=by_channel,
    )  # fmt: skip


def _few_bits(plain: Path, given: Any, out: Path) -> None:
    quantizer = few_bits.MatMulNBitsQuantizer(onnx.load(plain), algo_config=given)
    quantizer.process()
    quantizer.model.save_model_to_file(str(out))


def of_nncf(name: str, plain: Path) -> Iterator[tuple[str, float, Callable[[Path], None]]]:
    """The same."""
    for preset in (nncf.QuantizationPreset.PERFORMANCE, nncf.QuantizationPreset.MIXED):
        yield f"nncf_{preset.value}", ROUNDED, partial(_by_nncf, plain, name, {"preset": preset})
    if name == "image":
        return  # scales of its compressed convolutions have more axes than ONNX allows
    yield "nncf_transformer", ROUNDED, partial(_by_nncf, plain, name, {"model_type": nncf.ModelType.TRANSFORMER})
    for mode, given in (("int8_asym", {}), ("int8_sym", {}), ("int4_sym", {"group_size": 64})):
        more = {"mode": nncf.CompressWeightsMode(mode), **given}
        yield f"nncf_weights_{mode}", EXACT, partial(_compressed, plain, more)


def _by_nncf(plain: Path, name: str, given: Mapping[str, Any], out: Path) -> None:
    samples = nncf.Dataset([{"x": NETWORKS[name][1]().numpy()} for _ in range(4)])
    onnx.save(nncf.quantize(onnx.load(plain), samples, subset_size=4, **given), out)


def _compressed(plain: Path, given: Mapping[str, Any], out: Path) -> None:
    onnx.save(nncf.compress_weights(onnx.load(plain), **given), out)


def of_torch(name: str) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Name, and what makes the module."""
    yield "pt2e", partial(_pt2e, name, is_dynamic=False)
    yield "pt2e_dynamic", partial(_pt2e, name, is_dynamic=True)
    if name == "image":
        return
    for config in (
        torchao.Int8WeightOnlyConfig(), torchao.Int8DynamicActivationInt8WeightConfig(),
        torchao.Int8DynamicActivationIntxWeightConfig(), torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4),
        torchao.Float8WeightOnlyConfig(),
    ):  # fmt: skip
        yield f"torchao_{type(config).__name__.removesuffix('Config')}", partial(_unwrapped, name, config)


def _pt2e(name: str, *, is_dynamic: bool) -> nn.Module:
    model, x = network(name)
    config = x86.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic)
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), x86.X86InductorQuantizer().set_global(config))
    prepared(x)
    made: nn.Module = convert_pt2e(prepared)
    return made


def _unwrapped(name: str, config: Any) -> nn.Module:
    model, _ = network(name)
    torchao.quantize_(model, config)
    made: nn.Module = unwrap_tensor_subclass(model)
    return made


def save_beside(path: Path, x: np.ndarray, made: np.ndarray, within: float) -> None:
    """What `wall.py` reads."""
    np.savez(path.with_suffix(".npz"), input_000=x, output_000=made, within=within)


def write_onnx(name: str, folder: Path) -> None:
    """All that ONNX Runtime and NNCF make of a network."""
    model, x = network(name)
    plain = folder / f"{name}.onnx"
    torch.onnx.export(model, (x,), plain, input_names=["x"], dynamo=True, external_data=False)
    for title, within, write in (*of_onnx_runtime(name, plain), *of_nncf(name, plain)):
        path = folder / f"{name}_{title}.onnx"
        try:
            write(path)
            options = onnxruntime.SessionOptions()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            [made] = onnxruntime.InferenceSession(path, options).run(None, {"x": x.numpy()})
            save_beside(path, x.numpy(), made, within)
        except Exception as error:  # of a quantiser, or of ONNX Runtime with what it made
            path.unlink(missing_ok=True)
            print(f"{path.name}: not written: {type(error).__name__} {str(error)[:120]!r}", flush=True)
    plain.unlink()


def write_torch(name: str, folder: Path) -> None:
    """All that torch makes of it."""
    _, x = network(name)
    for title, make in of_torch(name):
        path = folder / f"{name}_{title}.pt2"
        with torch.no_grad():
            model = make()
            torch.export.save(torch.export.export(model, (x,)), path)
            save_beside(path, x.numpy(), model(x).numpy(), ROUNDED)


def main() -> None:
    """Write them all; says which were not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in NETWORKS:
        write_onnx(name, options.out)
        write_torch(name, options.out)


if __name__ == "__main__":
    main()
