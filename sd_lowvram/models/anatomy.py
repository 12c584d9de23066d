"""The sites of a model that hooks act on, the same for every family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Site:
    """A module that a hook can act on, with its path in the component for messages."""

    name: str
    module: nn.Module


@dataclass(frozen=True)
class Anatomy:
    """What a target is made of.

    Attributes:
        family: whose modules these are: "diffusers".
        components: the target's models by the host's own names, in the order in which a run uses them.
        entries: for each component, the methods through which the host calls it.
        denoiser: the name of the UNet among the components, None when there is none.
        autoencoder: the name of the VAE, None when there is none.
        attentions: attention modules of denoiser, ControlNet and autoencoder.
        feed_forwards: the denoiser's feed-forward modules.
        residual_blocks: the denoiser's residual blocks.
    """

    family: str
    components: Mapping[str, nn.Module]
    entries: Mapping[str, tuple[str, ...]]
    denoiser: str | None
    autoencoder: str | None
    attentions: tuple[Site, ...]
    feed_forwards: tuple[Site, ...]
    residual_blocks: tuple[Site, ...]

    @property
    def unet(self) -> nn.Module | None:
        return self.components[self.denoiser] if self.denoiser else None

    @property
    def vae(self) -> nn.Module | None:
        return self.components[self.autoencoder] if self.autoencoder else None

    def config(self, component: str) -> Mapping[str, Any]:
        """The component's own configuration; empty when it has none."""
        config = getattr(self.components[component], "config", {})
        return config if isinstance(config, Mapping) else vars(config)


def sites(prefix: str, root: nn.Module, is_site: Callable[[nn.Module], bool]) -> tuple[Site, ...]:
    """Every module below ``root`` for which ``is_site`` holds, named by its path."""
    return tuple(Site(f"{prefix}.{name}", module) for name, module in root.named_modules() if is_site(module))
