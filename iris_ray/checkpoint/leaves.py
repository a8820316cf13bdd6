"""The leaves of a JAX program's state: which boxes a process has of them, their bytes, and leaves made from bytes."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from iris_ray.checkpoint.boxes import Box, box_of, shape_of, whole
from iris_ray.checkpoint.parts import Leaf
from iris_ray.checkpoint.shares import HeldArray
from iris_ray.checkpoint.store import Bytes
from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import shown


@dataclass(frozen=True, slots=True)
class StateLeaf:
    """A leaf of a state, or of the target of a restore.

    Attributes:
        leaf: its name, type and shape.
        held: the processes that have each box of its array; None for a plain value.
        wanted: the boxes that this process needs to restore the leaf.
        shards: returns the arrays of this process, by box.
        lasting: whether the bytes of these arrays stay as they are while they are used. Those of JAX's arrays do: on a
            CPU, XLA copies a donated array that is in use; from other devices, the bytes are a copy.
        build: makes the leaf from the value that was saved and the bytes of each wanted box.
    """

    leaf: Leaf
    held: HeldArray | None
    wanted: Sequence[Box]
    shards: Callable[[], Mapping[Box, Any]]
    build: Callable[[Any, Mapping[Box, Bytes]], Any]
    lasting: bool = False


def state_leaves(tree: Any, processes: int) -> tuple[list[StateLeaf], Any]:
    """Return the leaves of a state and the structure of its tree.

    Args:
        tree: of arrays of JAX and NumPy, random keys, numbers, bools and str. For a restore, arrays of JAX may be
            ``jax.ShapeDtypeStruct``.
        processes: how many processes have such a state.

    Raises:
        InvalidRequestError: a leaf is something else.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    names = _names(structure)
    return [_state_leaf(name, leaf, processes) for name, leaf in zip(names, leaves, strict=True)], structure


@functools.lru_cache(maxsize=16)
def _names(structure: Any) -> list[str]:
    numbered = jax.tree_util.tree_unflatten(structure, range(structure.num_leaves))
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]]


def _state_leaf(name: str, leaf: Any, processes: int) -> StateLeaf:
    if type(leaf) in (bool, int, float, str):
        kind = type(leaf)
        return StateLeaf(Leaf(name, value=leaf), None, (), dict, lambda value, _: kind(value))
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return _keys(name, leaf, processes)
        return _jax_array(name, leaf, processes)
    if isinstance(leaf, (np.ndarray, np.generic)) and not leaf.dtype.hasobject:
        return _numpy_array(name, leaf, processes)
    raise InvalidRequestError(
        f"{name or 'the state'} is {shown(leaf)}, which can't be kept; give arrays of JAX or NumPy, random keys,"
        " numbers, bools and str, and leave functions and other objects out"
    )


def _numpy_array(name: str, leaf: Any, processes: int) -> StateLeaf:
    box, dtype = whole(leaf.shape), leaf.dtype

    def build(_: Any, boxes: Mapping[Box, Bytes]) -> Any:
        array = boxes[box].view(dtype).reshape(leaf.shape)
        return array if isinstance(leaf, np.ndarray) else array[()]

    about, held = Leaf(name, _dtype_name(dtype), leaf.shape), _everywhere(box, dtype, processes)
    return StateLeaf(about, held, (box,), lambda: {box: leaf}, build)


def _jax_array(name: str, leaf: Any, processes: int) -> StateLeaf:
    shape, dtype, sharding = leaf.shape, np.dtype(leaf.dtype), leaf.sharding
    about = Leaf(name, _dtype_name(dtype), shape)
    if sharding is None or not getattr(leaf, "committed", True):  # JAX may place it where it likes
        box = whole(shape)

        def on_default_device(_: Any, boxes: Mapping[Box, Bytes]) -> Any:
            return jax.numpy.asarray(boxes[box].view(dtype).reshape(shape))

        held = _everywhere(box, dtype, processes)
        return StateLeaf(about, held, (box,), lambda: {box: leaf}, on_default_device, lasting=True)
    here, holders = _layout(sharding, shape)
    if sharding.is_fully_addressable:  # each process has an array of its own
        holders = dict.fromkeys(holders, tuple(range(processes)))

    def build(_: Any, boxes: Mapping[Box, Bytes]) -> Any:
        places = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device, _ in here]
        contents, used = [], set()
        for _, box in here:
            content = boxes[box].copy() if box in used else boxes[box]  # on a CPU, JAX takes the memory over
            used.add(box)
            contents.append(content.view(dtype).reshape(shape_of(box)))
        arrays = jax.device_put(contents, places)
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)

    def shards() -> Mapping[Box, Any]:
        return {box_of(shard.index, shape): shard.data for shard in leaf.addressable_shards}

    wanted = tuple(dict.fromkeys(box for _, box in here))
    return StateLeaf(about, HeldArray(dtype.itemsize, holders), wanted, shards, build, lasting=True)


def _keys(name: str, leaf: Any, processes: int) -> StateLeaf:
    if isinstance(leaf, jax.Array):
        impl, data = jax.random.key_impl(leaf), jax.random.key_data(leaf)
    else:
        impl, data = _of_keys_to_come(leaf)
    inner = _jax_array(name, data, processes)
    about = Leaf(name, inner.leaf.dtype, inner.leaf.shape, str(impl))

    def build(value: Any, boxes: Mapping[Box, Bytes]) -> Any:
        return jax.random.wrap_key_data(inner.build(value, boxes), impl=impl)

    return StateLeaf(about, inner.held, inner.wanted, inner.shards, build, inner.lasting)


def _of_keys_to_come(keys: Any) -> tuple[Any, Any]:
    """Return the implementation of keys, and what their data will be."""
    impls = []

    def data_of(given: Any) -> Any:
        impls.append(jax.random.key_impl(given))
        return jax.random.key_data(given)

    data = jax.eval_shape(data_of, keys)
    return impls[0], jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=keys.sharding)  # type: ignore[no-untyped-call]


def _everywhere(box: Box, dtype: np.dtype[Any], processes: int) -> HeldArray:
    return HeldArray(dtype.itemsize, {box: tuple(range(processes))})


@functools.lru_cache(maxsize=4096)
def _layout(sharding: Sharding, shape: tuple[int, ...]) -> tuple[list[tuple[Any, Box]], dict[Box, tuple[int, ...]]]:
    """Return the box of each device of this process, and the processes that have each box."""
    holders: dict[Box, set[int]] = {}
    here = []
    devices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in devices.items():
        box = box_of(index or (), shape) if shape else ()
        holders.setdefault(box, set()).add(device.process_index)
        if device.process_index == jax.process_index():
            here.append((device, box))
    return here, {box: tuple(sorted(processes)) for box, processes in holders.items()}


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """Return a unique name of a type, also of ml_dtypes' types and of structures."""
    name = dtype.name if dtype.names is None else str(dtype.descr)
    return name if dtype.isnative else f"{name} of the other byte order"
