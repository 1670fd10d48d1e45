"""A compiled model that is called like a function."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from . import native
from .bundle import Bundle, Value
from .errors import InputError
from .ranges import cut, settled
from .rest import Rest
from .session import Driver, placed
from .weights import ALIGNMENT, Mapped, as_type, numpy_type, stored, tensor_at

_CPU = int(tvm_ffi.DLDeviceType.kDLCPU)
_IN_DLPACK = {  # of NumPy's types
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)), "float16", "float32", "float64", "bool",
}  # fmt: skip
_BOUND = "with its weights"  # name of the function that has them as its last arguments


class Model:
    """A model of a bundle, ready to run.

        model = Model("compiled/")
        y = model(x)                          # one input, one output
        found = model(ids=ids, mask=mask)     # or model({"ids": ids, ...}), or model(ids, mask)
        other = model.session(threads=1)      # with the same library and weights

    Several threads may call one session: calls run one after the other. Sessions run beside each other. After a fork
    the child may go on calling, if no call was running.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        threads: int | None = None,
        cores: Sequence[int] | None = None,
        check: bool = True,
        rest: bool = True,
    ) -> None:
        """Load a bundle; its weights are mapped, not read.

        Args:
            threads: Of an inference; by default as many as there are `cores`, else as the model was tuned for, at most
                as many as this process may use.
            cores: The numbers of those that they may use, by default all that this process may use. Linux only.
            check: Refuse a bundle that does not fit this machine, or whose files are missing or cut short. (Digests
                are compared by `python -m family_tuner_runtime check`.)
            rest: Of a model whose end depends on values, have ONNX Runtime compute that; else the outputs are the
                library's.

        Raises:
            BundleError: See `Bundle.read` and `Bundle.misfits`.
            InputError: See `session.placed`.
        """
        bundle = Bundle.read(folder)
        if check:
            bundle.require_fit()
        native.load()
        self._begin(_Loaded(bundle), threads, cores, rest and bundle.rest is not None)

    def session(self, *, threads: int | None = None, cores: Sequence[int] | None = None) -> "Model":
        """Another session of the same model: it shares library and weights, and has threads and activations of its
        own. See `__init__`."""
        made = Model.__new__(Model)
        made._begin(self._loaded, threads, cores, self._rest is not None)
        return made

    def _begin(self, loaded: "_Loaded", threads: int | None, cores: Sequence[int] | None, has_rest: bool) -> None:
        self._loaded = loaded
        self._inputs, self._outputs = loaded.bundle.inputs, loaded.bundle.outputs
        self._places = {value.name: n for n, value in enumerate(self._inputs)}
        self.threads, self.cores = placed(loaded.bundle.threads, threads, cores)
        self._driver = Driver(self.threads, self.cores)
        self._rest = Rest(loaded.bundle.rest, self.threads) if has_rest and loaded.bundle.rest else None
        self._machines: dict[int, tuple[Any, Callable[..., Any]]] = {}  # by bucket, each made when it is first needed
        self._making = threading.Lock()
        if not loaded.ranges.limits:
            self._infer_of(0)

    def _infer_of(self, bucket: int) -> Callable[..., Any]:
        """What computes a bucket's shape."""
        with self._making:
            if bucket not in self._machines:
                executable, weights = self._loaded.executable(bucket)
                machine = native.machine(executable)
                machine["save_function"](self._loaded.bundle.facts["entry"], _BOUND, True, *weights)
                self._machines[bucket] = machine, machine[_BOUND]
            return self._machines[bucket][1]

    @property
    def bundle(self) -> Bundle:
        """What the manifest says."""
        return self._loaded.bundle

    @property
    def inputs(self) -> list[Value]:
        """In the order in which they are given. Names in a shape are dimensions that are open: see `ranges`."""
        return list(self._inputs)

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The lowest and the highest extent of each open dimension, by name; empty for a model of one shape."""
        return dict(self._loaded.ranges.limits)

    @property
    def outputs(self) -> list[Value]:
        """In the order in which they are returned. Names in a shape are extents that are open, or depend on values."""
        return list(self._outputs) if self._rest is None else self.bundle.whole_outputs

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Compute.

        Args:
            args: The inputs in their order, or one mapping from their names; NumPy arrays, or anything with DLPack
                (`torch.Tensor`) on the CPU. They are used as they are, without a copy, if they are contiguous and
                begin at a multiple of 64 bytes (`empty` makes such arrays, and torch does), and copied otherwise. They
                must not change until this returns. Of a model with open dimensions, the smallest compiled shape in
                which they fit is used: where it is larger, inputs are copied and padded, and outputs are views of what
                was computed.
            named: Or the inputs by their names.

        Returns:
            The output as a NumPy array, or a dict of them by name if the model has several. Each call returns memory
            of its own, which nobody else reads or writes then; `torch.from_dlpack` takes it without a copy.

        Raises:
            InputError: Names, number, shapes or types are not the model's, or an extent is out of its range.
        """
        ordered, ranges = self._ordered(args, named), self._loaded.ranges
        extents: Mapping[str, int] = {}
        if ranges.limits:
            extents = ranges.extents(self._inputs, [_shape(given) for given in ordered])
        bucket = ranges.smallest(extents)
        tensors = [
            _padded(given, value, extents, ranges.buckets[bucket].extents)
            for given, value in zip(ordered, self._inputs, strict=True)
        ]
        infer, arrays = self._infer_of(bucket), []
        others = {tensor.data_ptr() for tensor in tensors}
        for tensor, value in zip(_flat(self._driver.run(lambda: infer(*tensors))), self._outputs, strict=True):
            is_shared = tensor.data_ptr() in others or tensor in self._loaded.weights
            array = _array(tensor).copy() if is_shared else _array(tensor)
            arrays.append(cut(array, value.shape, extents) if extents else array)
        computed = {value.name: array for value, array in zip(self._outputs, arrays, strict=True)}
        if self._rest is not None:
            given = {value.name: np.asarray(each) for value, each in zip(self._inputs, ordered, strict=True)}
            computed |= self._rest({**given, **computed})
            computed = {value.name: computed[value.name] for value in self.outputs}
        return next(iter(computed.values())) if len(computed) == 1 else computed

    def empty(self, name: str, **extents: int) -> np.ndarray:
        """An array for an input, to be filled by the caller: one that is used without a copy.

        Args:
            extents: Of the dimensions that are open, by name.

        Raises:
            InputError: There is no such input, or an extent is missing.
        """
        value = self._inputs[self._place(name)]
        if absent := [dim for dim in value.shape if isinstance(dim, str) and dim not in extents]:
            raise InputError(f"{value}: say how much {', '.join(absent)} is, as in empty({name!r}, {absent[0]}=...).")
        return aligned_empty(settled(value.shape, extents), value.dtype)

    def _ordered(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Sequence[Any]:
        """The inputs in their order."""
        if len(args) == 1 and isinstance(args[0], Mapping) and not named:
            return self._ordered((), args[0])
        if args and named:
            raise InputError(f"Give inputs in their order or by their names, not both. {self._expected()}")
        if named:
            found: list[Any] = [None] * len(self._inputs)
            for name, given in named.items():
                found[self._place(name)] = given
            if absent := [value.name for value in self._inputs if value.name not in named]:
                raise InputError(f"There is no value for {', '.join(absent)}. {self._expected()}")
            return found
        if len(args) != len(self._inputs):
            raise InputError(f"{len(args)} inputs were given. {self._expected()}")
        return args

    def _place(self, name: str) -> int:
        if name not in self._places:
            raise InputError(f"The model has no input {name!r}. {self._expected()}")
        return self._places[name]

    def _expected(self) -> str:
        return f"The model takes {len(self._inputs)}: " + "; ".join(map(str, self._inputs))


class _Loaded:
    """What sessions share."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.ranges, self.weights = bundle, bundle.ranges, Mapped(bundle.weights)
        self._executables: dict[int, tuple[Any, list[Any]]] = {}
        self._loading = threading.Lock()

    def executable(self, bucket: int) -> tuple[Any, list[Any]]:
        """The library of a bucket, and the weights as it takes them; loaded once."""
        with self._loading:
            if bucket not in self._executables:
                wanted = self.ranges.buckets[bucket].weights
                weights = self.weights.tensors if wanted is None else [self.weights.view(*each) for each in wanted]
                library = tvm_ffi.load_module(str(self.bundle.libraries[bucket].absolute()))
                self._executables[bucket] = library, weights
            return self._executables[bucket]


def aligned_empty(shape: Sequence[int], dtype: str) -> np.ndarray:
    """A new array that begins with a cache line."""
    typed = numpy_type(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * typed.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size].view(typed).reshape(tuple(shape))


def _shape(given: Any) -> tuple[int, ...]:
    return tuple(given.shape) if hasattr(given, "shape") else np.shape(given)


def _padded(given: Any, value: Value, extents: Mapping[str, int], most: Mapping[str, int]) -> Any:
    """A tensor of TVM for an input of some extents, in the shape of a bucket."""
    own = replace(value, shape=settled(value.shape, extents))
    tensor, shape = _tensor(given, own), settled(value.shape, most)
    if shape == own.shape:
        return tensor
    array = np.from_dlpack(as_type(tensor, stored(value.dtype)))
    padded = aligned_empty(shape, stored(value.dtype))
    padded[...] = value.fill
    padded[tuple(map(slice, array.shape))] = array
    return tensor_at(padded.ctypes.data, shape, value.dtype, padded)


def _tensor(given: Any, value: Value) -> Any:
    """A tensor of TVM over an input's memory, or over a copy where TVM cannot use that."""
    is_shown, expected = hasattr(given, "__dlpack__"), settled(value.shape, {})
    if isinstance(given, np.ndarray):
        is_shown = given.flags.writeable and given.dtype.name in _IN_DLPACK
    if is_shown:
        kind, _ = given.__dlpack_device__()
        if kind != _CPU:
            raise InputError(f"{value.name} is not in the CPU's memory.")
        tensor = tvm_ffi.from_dlpack(given)
        _require(value, tuple(tensor.shape), str(tensor.dtype))
        if tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT:
            return tensor
        array = np.from_dlpack(as_type(tensor, stored(value.dtype)))
    else:
        array = np.asarray(given)
        _require(value, array.shape, array.dtype.name)
        array = array.view(stored(value.dtype))
    if array.size and (not array.flags.c_contiguous or array.ctypes.data % ALIGNMENT):
        copy = aligned_empty(expected, stored(value.dtype))
        copy[...] = array
        array = copy
    return tensor_at(array.ctypes.data, expected, value.dtype, array)


def _require(value: Value, shape: tuple[int, ...], dtype: str) -> None:
    if shape != value.shape or dtype != value.dtype:
        raise InputError(f"{value} is what the model takes, and {dtype}{list(shape)} was given for it.")


def _array(tensor: Any) -> np.ndarray:
    """An output as an array, which keeps its memory."""
    dtype = str(tensor.dtype)
    return np.from_dlpack(as_type(tensor, stored(dtype))).view(numpy_type(dtype))


def _flat(value: Any) -> list[Any]:
    """The tensors of a result, in order."""
    if isinstance(value, tvm_ffi.Tensor):
        return [value]
    return [tensor for item in value for tensor in _flat(item)]
