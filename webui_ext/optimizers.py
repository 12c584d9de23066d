"""Our attention backends among the host's attention optimisations (AUTOMATIC1111 only).

The host's own forward for scaled_dot_product_attention runs, so hypernetworks, masks and up-casting stay the host's;
its one call of torch's function goes to our backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sd_lowvram.hooks.numbers.attention import Redirect
from sd_lowvram.kernels.attention.choice import choose_backend
from sd_lowvram.kernels.attention.registry import backends, score_bytes
from sd_lowvram.settings import Settings


class _OneHead(Redirect):
    """The host's autoencoders call with (batch, pixels, channels)."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.dim() != 3:
            return super().attend(query, key, value, *args, **kwargs)
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return super().attend(query, key, value, *args, **kwargs).squeeze(1)


def add_optimizers(entries: list[Any]) -> None:
    """Append one optimisation for each backend; "Automatic" never takes them."""
    try:
        from modules import sd_hijack_optimizations as theirs

        base, sdp = theirs.SdOptimization, theirs.scaled_dot_product_attention_forward
        block = theirs.sdp_attnblock_forward
    except (ImportError, AttributeError):  # Forge and reForge
        return
    entries += [
        _optimization(base, name, backend.label, sdp, block) for name, backend in backends().items() if backend.label
    ]


def _optimization(
    base: type, backend: str, shown: str, sdp: Callable[..., Tensor], block: Callable[..., Tensor]
) -> Any:
    class Optimization(base):
        name = f"low-vram {backend}"
        label = shown
        priority = -1

        def apply(self) -> None:
            import ldm.modules.attention as ldm_attention
            import ldm.modules.diffusionmodules.model as ldm_model
            import sgm.modules.attention as sgm_attention
            import sgm.modules.diffusionmodules.model as sgm_model

            for module in (ldm_attention, sgm_attention):
                module.CrossAttention.forward = _redirect(sdp, backend)
            for module in (ldm_model, sgm_model):
                module.AttnBlock.forward = _redirect(block, backend)

    return Optimization()


def _redirect(forward: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    settings = Settings(attention=backend)

    def run(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with _OneHead(choose_backend(settings, x.device), score_bytes(settings)):
            return forward(self, x, *args, **kwargs)

    return run
