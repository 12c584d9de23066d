"""Attention by torch's fused kernels, one of them chosen or one forced, and by xformers.

The fused kernels keep scores and softmax in float32 registers whatever the type of q, so up-cast attention needs
nothing more from them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ...compat import restrict_kernel
from ...compat.private import BUILTIN_ATTENTION, attention_choice
from ...devices.this_machine import knows_cudnn_attention
from ...errors import SettingsError
from ...memory.threads import Redirected, Switch
from .backend import SCORE_BYTES
from .bounded import attend_sliced, mask_4d
from .problem import Problem, capability, empty_output, has_bf16, is_planned_elsewhere, problem_of

TORCHS_ATTENTION = Redirected(torch.nn.functional, "scaled_dot_product_attention")

SWITCHES = Switch()
"""Lock for torch's kernel switches, which are process-wide and read by models on other devices at the same time."""

_is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)
"""Function that returns True under torch's compiler, which cannot trace locks; absent before torch 2.2."""


def attend_fused(
    forced: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    upcast: bool = False,
    score_bytes: int = SCORE_BYTES,
) -> Tensor:
    """Run one of torch's kernels. Fidelity: ``rounding``.

    Source: torch's scaled_dot_product_attention; FlashAttention, Dao 2022; memory-efficient attention, Rabe and Staats
    2021; the choice by matrix size is consciencia's.

    Args:
        forced: "flash", "efficient" or "cudnn", which `why_not` has accepted; None: the fastest that can run (see
            `choose_kernel`).
        q, k, v, mask, scale, upcast, score_bytes: as for `attend_sliced`.

    Returns:
        As `attend_sliced`.
    """
    kernel = forced or choose_kernel(problem_of(q, k, v, mask, upcast), score_bytes)
    if kernel == "sliced":
        return attend_sliced(q, k, v, mask, scale, upcast=upcast, score_bytes=score_bytes)
    return _run(kernel, q, k, v, mask, scale)


def xformers(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    upcast: bool = False,
    score_bytes: int = SCORE_BYTES,
) -> Tensor:
    """xformers' memory-efficient attention, by the kernel that it picks itself.

    Raises:
        SettingsError: it refuses the shape, type or device.
    """
    import xformers.ops

    problem = problem_of(q, k, v, mask, upcast)
    bias = None if mask is None else _aligned_bias(mask, problem)
    try:
        out: Tensor = xformers.ops.memory_efficient_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_bias=bias, p=0.0, scale=scale
        )
    except (NotImplementedError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"attention='xformers' cannot run {problem}: {reason}. {REMEDY}") from error
    return out.transpose(1, 2)


REMEDY = "Choose attention='sdpa', which picks a kernel for every layer, or 'fused-softmax', which runs everywhere"


def choose_kernel(problem: Problem, score_bytes: int) -> str:
    """Return the first kernel that can run ``problem`` in bounded memory.

    cuDNN's kernel is included if torch chooses it by itself and its memory was measured on the GPU. torch's math kernel
    never gets a large score matrix, because it would hold it whole. On devices other than CUDA and the CPU the kernel
    is unknown, so torch's own choice ("torch") gets small matrices only.

    Args:
        problem: the call.
        score_bytes: the most bytes of scores held at once.

    Returns:
        "cudnn", "flash", "efficient", "torch" or "sliced".
    """
    if problem.device.type not in ("cuda", "cpu"):
        return "torch" if 2 * problem.scores * problem.score_dtype.itemsize <= score_bytes else "sliced"
    cudnn = ("cudnn",) * (own_kernel(problem) == "cudnn" and knows_cudnn_attention(problem.device))
    return next((kernel for kernel in (*cudnn, "flash", "efficient") if why_not(kernel, problem) is None), "sliced")


def own_kernel(problem: Problem) -> str:
    """Return the kernel that torch chooses by itself on this GPU for these widths and this type; "" if unknown."""
    if problem.device.type != "cuda" or not torch.cuda.is_available() or _is_compiling() or is_planned_elsewhere():
        return ""
    with SWITCHES.hold_unset():
        enabled = getattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)()  # torch 2.4
        shape = problem.width, problem.value_width, problem.dtype, problem.device, problem.mask is not None
        return _own_kernel(*shape) if enabled else ""


@functools.lru_cache(maxsize=256)
def _own_kernel(width: int, value_width: int, dtype: torch.dtype, device: torch.device, masked: bool) -> str:
    def choice() -> str:
        return _choice(*_small(width, value_width, dtype, device, masked), None)

    return str(call_in_clean_thread(choice))


def why_not(kernel: str, problem: Problem) -> str | None:
    """Return the reason why a kernel cannot run ``problem``; None if it can.

    Rules name what is known of the kernels. If the device is present a small trial decides, because builds of torch
    differ.

    Args:
        kernel: "flash", "efficient" or "cudnn".
        problem: the call.
    """
    why = _RULES[kernel](problem)
    if why is None and problem.real:
        shape = problem.width, problem.value_width, problem.dtype, problem.device, problem.mask is not None
        why = _trial(kernel, *shape)
    return why


def _flash_rules(problem: Problem) -> str | None:
    if problem.width != problem.value_width:
        return f"head width {problem.width} of q and k is not the {problem.value_width} of v"
    if problem.device.type == "cpu":
        return None
    if problem.device.type != "cuda":
        return f"torch has it for CUDA and the CPU, not for {problem.device.type}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in fp16 and bf16, not in {str(problem.dtype).removeprefix('torch.')}"
    if problem.mask:
        return "it takes no mask"
    if problem.width > 256:
        return f"head width {problem.width} is above 256"
    if capability(problem.device) < (8, 0):
        return "it needs an Ampere GPU or newer"
    return None


def _efficient_rules(problem: Problem) -> str | None:
    if problem.device.type != "cuda":
        return f"torch has it for CUDA, not for {problem.device.type}"
    if problem.dtype == torch.float64:
        return "it does not compute in float64"
    if problem.dtype == torch.bfloat16 and not has_bf16(problem.device):
        return "it computes in bf16 on an Ampere GPU or newer"
    step = 4 if problem.dtype == torch.float32 else 8
    if problem.width % step or problem.value_width % step:
        return f"head widths {problem.width} and {problem.value_width} must be multiples of {step}"
    return None


def _cudnn_rules(problem: Problem) -> str | None:
    if problem.device.type != "cuda":
        return f"torch has it for CUDA, not for {problem.device.type}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in fp16 and bf16, not in {str(problem.dtype).removeprefix('torch.')}"
    card = capability(problem.device)
    if card < (8, 0):
        return "it needs an Ampere GPU or newer"
    widest = 256 if card == (9, 0) else 128
    if max(problem.width, problem.value_width) > widest or problem.width % 8 or problem.value_width % 8:
        return f"head widths {problem.width} and {problem.value_width} must be multiples of 8, at most {widest}"
    return "it needs more than one key" if problem.keys == 1 else None


_RULES = {"flash": _flash_rules, "efficient": _efficient_rules, "cudnn": _cudnn_rules}


@functools.lru_cache(maxsize=256)
def _trial(
    kernel: str, width: int, value_width: int, dtype: torch.dtype, device: torch.device, masked: bool
) -> str | None:
    """Run the kernel on sixteen tokens; what it said when it could not."""

    def attempt() -> None:
        _run(kernel, *_small(width, value_width, dtype, device, masked), None)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # why torch did not take the other kernels
            call_in_clean_thread(attempt)
    except RuntimeError as error:
        return f"this build of torch refuses it ({str(error).splitlines()[0].rstrip('.')})"
    return None


def _small(
    width: int, value_width: int, dtype: torch.dtype, device: torch.device, masked: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and mask of sixteen tokens."""
    q = torch.zeros(1, 1, 16, width, dtype=dtype, device=device)
    v = torch.zeros(1, 1, 16, value_width, dtype=dtype, device=device)
    return q, q, v, torch.zeros(1, 1, 16, 16, dtype=dtype, device=device) if masked else None


def call_in_clean_thread(function: Any) -> Any:
    """Call ``function`` outside of the caller's modes, such as fake tensors: they belong to threads."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(torch.inference_mode()(function)).result()


def xformers_why_not(device: torch.device) -> str | None:
    """Why xformers cannot run on ``device``; None when it should."""
    if device.type != "cuda":  # where installing it would not help
        return f"xformers runs on CUDA, not on {device.type}"
    try:
        import xformers.ops  # noqa: F401
    except ImportError:
        return "xformers is not installed (pip install xformers)"
    except Exception as error:  # a build against another torch fails in its own ways
        return f"xformers is broken here ({error})"
    return None


def _run(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    problem = problem_of(q, k, v, mask)
    if not problem.real:
        return emulate(kernel, q, k, v, mask, scale)
    if mask is not None:
        mask = _torch_mask(mask, problem)
    with contextlib.nullcontext() if _is_compiling() else SWITCHES.hold_unset():
        if kernel == "torch" or kernel == _choice(q, k, v, mask, scale):
            return BUILTIN_ATTENTION(q, k, v, attn_mask=mask, scale=scale)
    with SWITCHES.set_by(restrict_kernel(kernel)):
        return BUILTIN_ATTENTION(q, k, v, attn_mask=mask, scale=scale)


def _choice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> str:
    """The kernel that torch chooses by itself; "" if torch does not report it."""
    try:
        return _KERNELS.get(attention_choice(q, k, v, mask, scale), "")
    except (AttributeError, RuntimeError, TypeError):
        return ""


_KERNELS = {1: "flash", 2: "efficient", 3: "cudnn"}


def emulate(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Fake tensors have no fused kernels: a trace that answers for torch's function books them, else nothing is."""
    if not TORCHS_ATTENTION.is_redirected():
        return empty_output(q, v)
    token = _to_book.set("" if kernel == "torch" else kernel)
    try:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    finally:
        _to_book.reset(token)


_to_book: ContextVar[str] = ContextVar("kernel to book", default="")


def kernel_to_book() -> str:
    """Return the kernel whose memory a trace in this thread books now; "" if torch chooses."""
    return _to_book.get()


def _torch_mask(mask: Tensor, problem: Problem) -> Tensor:
    """A mask as the fused kernels want it: bool or of q's type, finite where it was, and not broadcast over keys."""
    mask = mask_4d(mask)
    if mask.dtype not in (torch.bool, problem.dtype):
        mask = mask.clamp(min=torch.finfo(problem.dtype).min).to(problem.dtype)
    if mask.shape[-1] != problem.keys:
        mask = mask.expand(*mask.shape[:3], problem.keys).contiguous()
    return mask


def _aligned_bias(mask: Tensor, problem: Problem) -> Tensor:
    """A mask as xformers wants it: additive, rows aligned to 8 elements, expanded over batch and heads."""
    mask = mask_4d(mask)
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=problem.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    lowest = torch.finfo(problem.dtype).min
    if mask.dtype != problem.dtype:
        mask = mask.clamp(min=lowest).to(problem.dtype)
    shape = (*mask.shape[:2], problem.queries, problem.keys)
    space = torch.empty((*shape[:3], -(-problem.keys // 8) * 8), dtype=problem.dtype, device=mask.device)
    bias = space[..., : problem.keys].copy_(mask.expand(shape))
    return bias.expand(problem.batch, problem.heads, problem.queries, problem.keys)


def flash_bytes(problem: Problem) -> int:
    """Bytes that FlashAttention holds in addition to its output, as torch allocates them."""
    rows = problem.batch * problem.heads * problem.queries
    row_sums = 4 * rows
    if problem.device.type == "cpu":
        # Each thread holds a block of scores, their row maxima and sums, and a block of the output.
        block = min(problem.queries, 256 if problem.queries >= 768 else 64 if problem.queries >= 192 else 32)
        keys = min(problem.keys, 512)
        thread = 4 * block * (keys + 2 + problem.width)
        if problem.dtype.itemsize > 2:
            return row_sums + torch.get_num_threads() * thread
        # In half types also scores and keys in the order that the matrix unit wants, keys rounded up to pairs.
        thread += 2 * block * (keys + keys % 2) + 2 * keys * problem.width
        pairs = problem.keys + problem.keys % 2
        repacked = 2 * problem.batch * problem.heads * pairs * (problem.width + problem.value_width)
        return row_sums + torch.get_num_threads() * thread + repacked
    return row_sums + 4 * rows * (problem.width + 1) * _splits(problem)


def _splits(problem: Problem) -> int:
    """Number of parts of the keys in FlashAttention if queries alone leave a GPU idle; 0 if keys are not split."""
    if not torch.cuda.is_available():
        return 0
    busy = 2 * torch.cuda.get_device_properties(problem.device).multi_processor_count
    blocks = problem.batch * problem.heads * -(-problem.queries // 64)
    key_block = 256 if problem.width <= 64 else 128 if problem.width <= 128 else 64
    splits = min(busy // blocks + 1, 128, -(-problem.keys // key_block))
    return splits if blocks < 0.8 * busy and splits > 1 else 0


def cudnn_bytes(problem: Problem) -> int:
    """Bytes that cuDNN's kernel holds in addition to its output: the mask in the type of the queries.

    Its workspace is measured with those of the libraries (:class:`Overhead`)."""
    return problem.mask_elements * problem.dtype.itemsize


def efficient_bytes(problem: Problem) -> int:
    """Bytes that the memory-efficient kernel holds in addition to its output, as allocated without gradients.

    Heads wider than 128 do not fit into registers: the output is summed up in a float32 buffer.
    """
    rows = problem.batch * problem.heads * problem.queries
    sums = 4 * rows * problem.value_width if problem.value_width > 128 and problem.dtype.itemsize == 2 else 0
    mask = problem.mask_elements * problem.dtype.itemsize
    return sums + mask
