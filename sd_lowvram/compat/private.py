"""All that the package uses of torch's private parts, in one place to look at when torch changes.

Nothing public does these things: make fake tensors without their slow constructor, follow operators and take their
arguments apart, step out of modes that are entered, and ask the compiler what it has done.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _ExtraFields_Allocation as AllocationFields
from torch._ops import HigherOrderOperator
from torch._prims_common import compute_elementwise_output_strides as elementwise_strides
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten, treespec_dumps, treespec_loads

__all__ = [
    "BUILTIN_ATTENTION",
    "COMPILER",
    "AllocationFields",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "TorchDispatchMode",
    "attention_choice",
    "compiled_graphs",
    "decompose",
    "default_compiler_folder",
    "disable_fakes",
    "dispatch_modes",
    "dumped_spec",
    "elementwise_strides",
    "exclude_from_graphs",
    "followed_by_jit",
    "free_matrix_workspaces",
    "free_pinned",
    "has_context",
    "is_compilers",
    "is_composite",
    "is_loaded",
    "loaded_spec",
    "made_fake",
    "may_use",
    "more_versions",
    "operators_of",
    "reset_compiler",
    "resize_storage",
    "storage_expired",
    "storage_key",
    "take_matrix_workspaces",
    "tree_flatten",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "without_modes",
    "writes",
]

BUILTIN_ATTENTION = torch._C._nn.scaled_dot_product_attention
"""torch's own function, whatever somebody has put into ``torch.nn.functional``."""


COMPILER = "torch._dynamo"


def operators_of(function: HigherOrderOperator) -> Callable[..., Any]:
    """The function that computes an operator of operators, such as flex attention, by plain ones."""
    kernel: Callable[..., Any] = function.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
    return kernel


def made_fake(meta: Tensor, device: torch.device) -> Any:
    """A FakeTensor around ``meta`` on ``device``, without its mode and other attributes."""
    return Tensor._make_subclass(
        FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )


def may_use(instructions: str) -> bool:
    """False where the processor is known to lack "avx2" or "amx_tile", whatever kernels torch was set to use."""
    supports = getattr(torch.cpu, f"_is_{instructions}_supported", None)  # torch 2.6
    if supports is not None:
        return bool(supports())
    capability = torch.backends.cpu.get_cpu_capability()
    return capability == "AVX512" if instructions == "amx_tile" else capability != "DEFAULT"


def disable_fakes() -> contextlib.AbstractContextManager[Any]:
    """Disable dispatch modes and tensor subclasses within the block."""
    return torch._C._DisableTorchDispatch()


def storage_key(tensor: Tensor | torch.UntypedStorage) -> int:
    """A key that identifies a storage among all live ones."""
    storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor
    key: int = storage._cdata
    return key


storage_expired: Any = torch.UntypedStorage._expired
"""Return True if the storage with this key is gone. A ``StorageWeakRef`` to it must exist, so that its key is not
reused.
"""


resize_storage: Any = torch._C.StorageBase.resize_  # type: ignore[attr-defined]
"""Change the bytes of a storage, unseen by a trace."""


def stream_handle(index: int) -> int:
    """CUDA's handle of the current stream of a device, without an object for it."""
    return int(torch._C._cuda_getCurrentRawStream(index))


writes: Callable[[Tensor], int] = operator.attrgetter("_version")
"""A number that rises when a tensor is written to in place. Tensors from inference mode have none."""


def is_composite(func: Any) -> bool:
    """True if an operator consists of other operators, under autograd too."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def decompose(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A composite operator by the operators that it is made of."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def attention_choice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> int:
    """The number of the attention kernel that torch would take."""
    return torch._fused_sdp_choice(q, k, v, mask, 0.0, False, scale=scale)


def followed_by_jit() -> bool:
    """True if torch.jit.trace follows the caller."""
    return torch._C._is_tracing()


def dumped_spec(spec: Any) -> str | None:
    """A tree's structure as text; None: some of it has no name in other processes."""
    try:
        dumped: str = treespec_dumps(spec)
        return dumped if treespec_loads(dumped) == spec else None
    except (NotImplementedError, TypeError, ValueError, AssertionError):
        return None


def loaded_spec(dumped: str) -> Any:
    """The structure that :func:`dumped_spec` returned.

    Raises:
        ValueError: the structure holds an unknown type.
    """
    return treespec_loads(dumped)


def has_context(index: int) -> bool:
    """True if this process has a context on the CUDA device."""
    runtime: Any = torch._C
    return bool(runtime._cuda_hasPrimaryContext(index))


def take_matrix_workspaces(device: torch.device) -> None:
    """Make cuBLAS and cuBLASLt (products with a bias) allocate their workspaces for the current stream from torch's
    allocator, as they otherwise do at their first product."""
    square = torch.zeros(8, 8, dtype=torch.float16, device=device)
    torch.mm(square, square)
    torch.addmm(square[0], square, square)


def free_matrix_workspaces() -> None:
    """Give back what these libraries keep for any stream; the next product takes it again. Nothing happens where torch
    has no such function."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def free_pinned() -> None:
    """Give pinned memory that torch keeps for later back; versions before 2.5 keep it."""
    getattr(torch._C, "_host_emptyCache", lambda: None)()


def is_loaded() -> bool:
    """True if the compiler was imported; otherwise nothing can have been compiled."""
    return COMPILER in sys.modules


def reset_compiler() -> None:
    """Give up what was compiled in this process."""
    if is_loaded():
        torch._dynamo.reset()


def compiled_graphs() -> int:
    """Number of graphs that were compiled in this process so far."""
    utils = sys.modules.get(f"{COMPILER}.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils else 0


def is_compilers(error: Exception) -> bool:
    """True if ``error`` is from the compiler, not from the compiled code."""
    return any(kind.__module__.startswith(("torch._dynamo", "torch._inductor")) for kind in type(error).__mro__)


def exclude_from_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which the compiler leaves out of its graphs."""
    outside: Callable[..., Any] = torch._dynamo.disable(function)
    return outside


def more_versions(least: int) -> contextlib.AbstractContextManager[Any]:
    """Raise the compiler's limit of versions of a piece of code to ``least`` within the block."""
    from torch._dynamo import config

    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    return config.patch({limit: max(least, getattr(config, limit))})  # type: ignore[no-any-return]


def default_compiler_folder() -> str:
    """The folder in which the compiler writes its code by default."""
    from torch._inductor.runtime.runtime_utils import default_cache_dir  # type: ignore[attr-defined]

    return str(default_cache_dir())
