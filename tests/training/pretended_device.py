"""A device that is not there: its tensors are of device `lazy` to whoever looks, and are computed on the CPU.

An operation that mixes its tensors with others fails, as it would on a GPU. Left out are what CUDA allows, too: a
number in a tensor without dimensions, indices on the CPU, and copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

PRETENDED = torch.device("lazy")
CPU = torch.device("cpu")
_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_INDEXED = (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default)


class PretendedTensor(Tensor):
    """Holds a CPU tensor."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendedTensor:
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=PRETENDED, requires_grad=held.requires_grad,
        )  # fmt: skip
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.held.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: the pretended device is not entered")


class _Factory(TorchFunctionMode):
    """`torch.tensor` moves what it made to a device without telling a dispatch mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") == PRETENDED:
            return func(*args, **kwargs | {"device": CPU}).to(PRETENDED)
        return func(*args, **kwargs)


class PretendedDevice(TorchDispatchMode):
    """While it is entered, tensors made on, or copied to, `PRETENDED` are `PretendedTensor`."""

    def __enter__(self) -> Any:
        self._factory = _Factory()
        self._factory.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._factory.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        here = [each for each in given if isinstance(each, PretendedTensor)]
        if here and func not in _COPIES:
            checked = given if func not in _INDEXED else [args[0], *args[2:3]]
            strangers = [x for x in checked if isinstance(x, Tensor) and not isinstance(x, PretendedTensor) and x.ndim]
            if strangers or (func in _INDEXED and not isinstance(args[0], PretendedTensor)):
                raise RuntimeError(f"{func}: tensors on two devices, of shapes {[tuple(x.shape) for x in strangers]}")
        device = kwargs.get("device")
        to_pretended = bool(here) if device is None else torch.device(device).type == PRETENDED.type
        if func is _aten.copy_.default:
            to_pretended = isinstance(args[0], PretendedTensor)
        if func is _aten._local_scalar_dense.default:
            to_pretended = False
        if device is not None and torch.device(device).type == PRETENDED.type:
            kwargs["device"] = CPU
        inner = tree_map(lambda x: x.held if isinstance(x, PretendedTensor) else x, (args, kwargs))
        result = func(*inner[0], **inner[1])
        wrappers = {id(x.held): x for x in here}

        def outer(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) in wrappers:
                return wrappers[id(x)]
            return PretendedTensor(x) if to_pretended else x

        return tree_map(outer, result)
