"""A simulated NPU: tensors of device "npu" with torch_npu's own allocator, streams and events, and every operator computed on the CPU.

The stand-ins for CANN keep device memory in the host's, so that a CPU tensor can be laid over a device tensor's storage. Each operator
that torch_npu has for the device is replaced by one that runs the CPU's on such tensors. Allocation, copies between host and device,
streams, events and views stay torch_npu's. What has no CPU implementation fails. Everything is done at once: a missing wait is not found.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ascendenv import operators
from ascendenv.errors import SimulationError

KEPT = frozenset(
    (
        "empty", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_", "record_stream", "is_pinned", "pin_memory",
        "_pin_memory", "_reshape_alias", "as_strided", "_to_copy",
    )
)  # fmt: skip
"""Operators that make storage, or only describe it."""
MIXED = frozenset(("copy_", "_copy_from", "index", "index_put", "index_put_", "_index_put_impl_"))
"""Operators that take tensors of the host beside those of the device."""
NAMESPACES = ("aten", "npu")

_libraries: list[torch.library.Library] = []


def install() -> int:
    """Replace the device's operators; how many. Once for a process."""
    if _libraries:
        raise SimulationError("the simulated device is installed already")
    operators.register()
    count = 0
    with warnings.catch_warnings():
        # Each operator that is replaced is one that torch_npu has registered.
        warnings.simplefilter("ignore")
        libraries = {namespace: torch.library.Library(namespace, "IMPL", "PrivateUse1") for namespace in NAMESPACES}
        for name in torch._C._dispatch_get_all_op_names():
            namespace, _, rest = name.partition("::")
            base, _, overload = rest.partition(".")
            if namespace not in libraries or base in KEPT or not _computable(name):
                continue
            operator = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
            if any(found.alias_info and not found.alias_info.is_write for found in operator._schema.returns):
                continue
            kernel = _copy if name == "aten::copy_" else _on_cpu(operator, base in MIXED)
            libraries[namespace].impl(name, kernel, allow_override=True)
            count += 1
    _libraries.extend(libraries.values())
    return count


def _computable(name: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    anywhere = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return has(name, "PrivateUse1") and any(has(name, key) for key in anywhere)


def _is_on_device(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "npu"


def _is_on_host(x: Any) -> bool:
    # One without dimensions is a number to torch, wherever it lives.
    return isinstance(x, Tensor) and x.device.type == "cpu" and x.dim() > 0


def _over(tensor: Tensor) -> Tensor:
    """A CPU tensor on the memory of one of the device's."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    raw = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    host = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(host, tensor.storage_offset(), tensor.size(), tensor.stride())


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    (_over(target) if _is_on_device(target) else target).copy_(_over(source) if _is_on_device(source) else source)
    return target


def _on_cpu(operator: Callable[..., Any], mixed: bool) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        given = list(_flat((args, tuple(kwargs.values()))))
        if not mixed and any(_is_on_device(x) for x in given) and any(_is_on_host(x) for x in given):
            raise RuntimeError(f"{operator}: all tensors must be on one device, there are npu and cpu")
        seen: list[tuple[Tensor, Tensor]] = []
        on_cpu = [_to_cpu(x, seen) for x in args]
        named = {name: _to_cpu(x, seen) for name, x in kwargs.items()}
        asked = next((x for x in given if isinstance(x, torch.device)), None)
        device = asked or next((original.device for _, original in seen), torch.device("npu"))
        sizes = [laid.size() for laid, _ in seen]
        answer = operator(*on_cpu, **named)
        for (laid, original), size in zip(seen, sizes, strict=True):
            if laid.size() != size:
                # An out= tensor that the operator made larger.
                original.resize_(laid.size())
                _over(original).copy_(laid)
        return _to_device(answer, seen, device)

    return compute


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, (list, tuple)):
        for one in x:
            yield from _flat(one)
    else:
        yield x


def _to_cpu(x: Any, seen: list[tuple[Tensor, Tensor]]) -> Any:
    if _is_on_device(x):
        laid = _over(x)
        seen.append((laid, x))
        return laid
    if isinstance(x, (list, tuple)):
        return type(x)(_to_cpu(one, seen) for one in x)
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == "npu" else x


def _to_device(x: Any, seen: list[tuple[Tensor, Tensor]], device: torch.device) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_to_device(one, seen, device) for one in x)
    if not isinstance(x, Tensor) or x.device.type != "cpu":
        return x
    for laid, original in seen:
        if x is laid:
            return original
    if device.type == "cpu":
        return x
    moved = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    _over(moved).copy_(x)
    return moved
