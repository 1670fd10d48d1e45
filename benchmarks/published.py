"""Files as hubs have them: models of the other modules in bytes, in halves, or rewritten by ONNX Runtime, and a
language model that its tools wrote.

Beside `model.onnx`, a folder there has `model_quantized` (weights in bytes, activations quantised when they are
known), `model_fp16`, `model_q4` (blocks of four bits), and files in which ONNX Runtime's optimiser fused what it knows.
They are made here of a file in float32 by the same tools.

NAME_bytes, NAME_half, NAME_fused and NAME_four are such files; `chat_step` and `chat_prompt` are a token and a prompt
of a decoder with grouped queries, a cache, rotations and weights of four bits, as exporters write one;
with `_half` in halves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Arrays = dict[str, np.ndarray]
Base = Callable[[Path, bool], None]  # writes a file in float32 to a folder

_BLOCK, _BITS = 32, 4
_IN_BYTES = ("distilbert", "llama_step", "whisper_tiny_encoder", "squeezenet", "mnasnet", "regnet_y")
_IN_HALVES = ("distilbert", "llama_step", "vit_base", "squeezenet", "resnet50")
_FUSED = {"vit_base": "vit", "whisper_tiny_encoder": "bart", "marian": "bart", "llama_step": "gpt2"}
_OF_FOUR_BITS = ("distilbert", "llama_step")


def makers(bases: dict[str, Base]) -> dict[str, Callable[[Path], Arrays]]:
    """What writes each file to a path, and gives inputs for it.

    Args:
        bases: By name, what writes the files in float32 that these are made of.
    """
    kinds: dict[str, tuple[tuple[str, ...], Callable[[str, Path, Path], None]]] = {
        "bytes": (_IN_BYTES, _bytes), "half": (_IN_HALVES, _half), "fused": (tuple(_FUSED), _fused),
        "four": (_OF_FOUR_BITS, _four),
    }  # fmt: skip
    found = {
        f"{name}_{kind}": partial(_of_base, name, bases[name], change)
        for kind, (names, change) in kinds.items() for name in names if name in bases
    }  # fmt: skip
    step, prompt = Chat(), Chat(seq=64, past=0)
    return found | {
        "chat_step": step.save,
        "chat_step_half": Chat(is_half=True).save,
        "chat_prompt": prompt.save,
    }


def _of_base(name: str, base: Base, change: Callable[[str, Path, Path], None], path: Path) -> Arrays:
    with TemporaryDirectory() as folder:
        base(Path(folder), False)
        made = Path(folder) / f"{name}.onnx"
        change(name, made, path)
    return inputs(path)


def inputs(path: Path) -> Arrays:
    """Some, for a file with static shapes: small numbers, ones for masks, and small integers."""
    graph, rng = onnx.load(path, load_external_data=False).graph, np.random.default_rng(0)
    weights, found = {tensor.name for tensor in graph.initializer}, {}
    for value in graph.input:
        if value.name in weights:
            continue
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if kind.kind == "f":
            found[value.name] = rng.normal(size=shape).astype(kind)
        elif "mask" in value.name:
            found[value.name] = np.ones(shape, kind)
        else:
            found[value.name] = rng.integers(0, 1000, shape).astype(kind)
    return found


def _bytes(name: str, base: Path, path: Path) -> None:
    """As transformers.js' scripts do it: signed weights, and unsigned ones with zero points where there are
    convolutions, since ONNX Runtime multiplies no others there."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    proto = onnx.load(base)
    del proto.graph.value_info[:]  # some of which name the types of before
    has_convolutions = any(node.op_type == "Conv" for node in proto.graph.node)
    kind = QuantType.QUInt8 if has_convolutions else QuantType.QInt8
    quantize_dynamic(proto, path, weight_type=kind)


def _half(name: str, base: Path, path: Path) -> None:
    from onnxruntime.transformers import float16

    onnx.save(float16.convert_float_to_float16(onnx.load(base)), path)


def _fused(name: str, base: Path, path: Path) -> None:
    from onnxruntime.transformers import optimizer

    made = optimizer.optimize_model(str(base), model_type=_FUSED[name], opt_level=0, use_gpu=False)
    made.save_model_to_file(str(path))


def _four(name: str, base: Path, path: Path) -> None:
    """With the level at which ONNX Runtime may round what is multiplied to bytes, as such files have it."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(
        onnx.load(base), bits=_BITS, block_size=_BLOCK, is_symmetric=True, accuracy_level=4
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(path), False)


@dataclass(frozen=True)
class Chat:
    """A decoder with random weights, whose products are of four bits."""

    seq: int = 1
    past: int = 255
    is_half: bool = False
    layers: int = 8
    width: int = 1024
    heads: int = 16
    groups: int = 4  # heads of keys and values
    hidden: int = 2816
    words: int = 32000

    def save(self, path: Path) -> Arrays:
        """Write it; gives inputs for it."""
        writer = _Writer(self)
        writer.model()
        onnx.save(writer.proto(), path)
        return inputs(path)


class _Writer:
    """Nodes and weights of a `Chat`, as they are written."""

    def __init__(self, chat: Chat) -> None:
        self._chat, self._rng = chat, np.random.default_rng(0)
        self._kind = TensorProto.FLOAT16 if chat.is_half else TensorProto.FLOAT
        self._dtype = np.float16 if chat.is_half else np.float32
        self._nodes: list[onnx.NodeProto] = []
        self._weights: Arrays = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def proto(self) -> onnx.ModelProto:
        weights = [numpy_helper.from_array(value, name) for name, value in self._weights.items()]
        graph = helper.make_graph(self._nodes, "chat", self._inputs, self._outputs, weights)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def model(self) -> None:
        chat = self._chat
        total = chat.past + chat.seq
        self._inputs += [helper.make_tensor_value_info("input_ids", TensorProto.INT64, (1, chat.seq)),
                         helper.make_tensor_value_info("attention_mask", TensorProto.INT64, (1, total))]  # fmt: skip
        self._outputs.append(helper.make_tensor_value_info("logits", self._kind, (1, chat.seq, chat.words)))
        self._lengths()
        self._tables()
        extent = chat.width // chat.heads
        x = self._fused("GatherBlockQuantized", ["table", "input_ids", "table_scales"], bits=_BITS, block_size=_BLOCK,
                        gather_axis=0, quantize_axis=1)  # fmt: skip
        self._weights["norm"] = np.ones(chat.width, self._dtype)
        norm = self._plain("SimplifiedLayerNormalization", [x, "norm"], axis=-1, epsilon=1e-6)
        for layer in range(chat.layers):
            packed = self._product(norm, f"{layer}_qkv", chat.width, (chat.heads + 2 * chat.groups) * extent)
            attended = self._attention(packed, layer, extent)
            added = self._product(attended, f"{layer}_out", chat.width, chat.width)
            norm, x = self._skip(x, added)
            gate, up = (self._product(norm, f"{layer}_{name}", chat.width, chat.hidden) for name in ("gate", "up"))
            opened = self._plain("Mul", [self._plain("Mul", [gate, self._plain("Sigmoid", [gate])]), up])
            norm, x = self._skip(x, self._product(opened, f"{layer}_down", chat.hidden, chat.width))
        logits = self._product(norm, "head", chat.width, chat.words)
        self._nodes.append(helper.make_node("Identity", [logits], ["logits"]))

    def _lengths(self) -> None:
        """How many tokens there are, of the mask's values and of its shape, as exporters write it."""
        self._weights |= {"axis": np.array([1]), "one": np.array([1]), "second": np.array(1)}
        last = self._plain("Sub", [self._plain("ReduceSum", ["attention_mask", "axis"], keepdims=0), "one"])
        extent = self._plain("Gather", [self._plain("Shape", ["attention_mask"]), "second"], axis=0)
        for name, value in (("last", last), ("total", extent)):
            self._nodes.append(helper.make_node("Cast", [value], [name], to=TensorProto.INT32))

    def _tables(self) -> None:
        chat, rng = self._chat, self._rng
        half = chat.width // chat.heads // 2
        angles = np.arange(4096)[:, None] / 10000.0 ** (np.arange(half) / half)
        self._weights |= {
            "cos": np.cos(angles).astype(self._dtype),
            "sin": np.sin(angles).astype(self._dtype),
            "table": rng.integers(0, 256, (chat.words, chat.width * _BITS // 8)).astype(np.uint8),
            "table_scales": (rng.uniform(0.5, 1.5, (chat.words, chat.width // _BLOCK)) / 8).astype(self._dtype),
        }

    def _attention(self, packed: str, layer: int, extent: int) -> str:
        chat = self._chat
        caches = {name: f".{layer}.{name}" for name in ("key", "value")}
        past = [f"past_key_values{each}" if chat.past else "" for each in caches.values()]
        for name, each in zip(past, caches.values(), strict=True):
            if name:
                past_shape = (1, chat.groups, chat.past, extent)
                self._inputs.append(helper.make_tensor_value_info(name, self._kind, past_shape))
            shape = (1, chat.groups, "total", extent)  # ONNX Runtime takes that of the past for a number
            self._outputs.append(helper.make_tensor_value_info(f"present{each}", self._kind, shape))
        names = [packed, "", "", *past, "last", "total", "cos", "sin"]
        outputs = [f"attended_{layer}", *(f"present{each}" for each in caches.values())]
        self._nodes.append(
            helper.make_node("GroupQueryAttention", names, outputs, domain="com.microsoft", num_heads=chat.heads,
                             kv_num_heads=chat.groups, do_rotary=1, scale=float(extent**-0.5))
        )  # fmt: skip
        return outputs[0]

    def _product(self, x: str, name: str, k: int, n: int) -> str:
        blocks, rng = k // _BLOCK, self._rng
        self._weights[name] = rng.integers(0, 256, (n, blocks, _BLOCK * _BITS // 8)).astype(np.uint8)
        scales = rng.uniform(0.5, 1.5, (n, blocks)) * 0.2 / np.sqrt(k)  # numbers of -8 to 7 have a deviation of 4.6
        self._weights[f"{name}_scales"] = scales.astype(self._dtype)
        return self._fused("MatMulNBits", [x, name, f"{name}_scales"], K=k, N=n, bits=_BITS, block_size=_BLOCK,
                           accuracy_level=4)  # fmt: skip

    def _skip(self, x: str, added: str) -> tuple[str, str]:
        """The norm of a sum, and the sum."""
        name = f"norm_{len(self._nodes)}"
        self._weights[name] = np.ones(self._chat.width, self._dtype)
        outputs = [f"{name}_norm", "", "", f"{name}_sum"]
        self._nodes.append(
            helper.make_node("SkipSimplifiedLayerNormalization", [x, added, name], outputs, domain="com.microsoft",
                             epsilon=1e-6)
        )  # fmt: skip
        return outputs[0], outputs[3]

    def _plain(self, operator: str, names: list[str], domain: str = "", **attrs: object) -> str:
        name = f"{operator}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, names, [name], domain=domain, **attrs))
        return name

    def _fused(self, operator: str, names: list[str], **attrs: object) -> str:
        return self._plain(operator, names, "com.microsoft", **attrs)
