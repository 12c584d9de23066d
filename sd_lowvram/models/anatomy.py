"""Anatomy of a model: its parts, its sites, and the family whose methods use them.

A method reads a module at each call, because a LoRA replaces layers. It returns None if the module is built, or called,
in a way that the hook must leave alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .calls import Arguments, LatentsInCall, Predict, Shape, StepInputs, map_in_call
from .interfaces import MapAttention
from .joint import JointBlock
from .recorded import Rehearsal

HOST = "host"
"""Key of configurations for facts on the host's own code of a model, on which traces depend."""


@dataclass(frozen=True)
class Site:
    """A module that a hook can act on, with its path in the component for messages."""

    name: str
    module: nn.Module


@dataclass(frozen=True)
class Residual:
    """``(shortcut(x) + conv2(act(norm2(conv1(act(norm1(x))) + shift)))) / scale`` of maps (N, C, H, W).

    Attributes:
        act: the activation; an autoencoder's is SiLU.
        shift: from the embedding of time to what it adds (N, C, 1, 1), None where it adds nothing.
    """

    norm1: nn.GroupNorm
    conv1: nn.Module
    norm2: nn.GroupNorm
    conv2: nn.Module
    act: Callable[[Tensor], Tensor] = nn.functional.silu
    shift: Callable[[Tensor | None], Tensor | None] = lambda time: None
    shortcut: nn.Module | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class TokenAttention:
    """``x + attend(norm(x))`` of tokens (N, tokens, C), in which rows of queries do not see each other.

    Attributes:
        context: whose keys and values; None: those of the normed tokens.
        attend: from some rows of normed tokens, and keys, to these rows of the output, by the host's own attention. It
            is called while ``to_k`` and ``to_v`` answer with keys and values that are there already.
    """

    norm: nn.Module
    to_k: nn.Module
    to_v: nn.Module
    context: Tensor | None
    attend: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionOverMap:
    """``x + attention(norm(x))``, in which rows of queries see each other."""

    norm: nn.Module
    attention: MapAttention


@dataclass(frozen=True)
class Transformer:
    """A transformer block: its attentions one after the other, then ``x + feed_forward(norm(x))``."""

    attentions: tuple[TokenAttention | AttentionOverMap, ...]
    norm: nn.Module
    feed_forward: nn.Module


@dataclass(frozen=True)
class UNetPath:
    """The modules between which a UNet's maps (N, C, H, W) travel.

    Attributes:
        modules: the first convolution, residual blocks, transformers and samplers, in the order of their calls.
        makers: the modules whose maps become skip connections.
        tail: what takes the last map.
    """

    modules: tuple[nn.Module, ...]
    makers: tuple[nn.Module, ...]
    tail: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Family:
    """A kind of models: data, and functions that find the parts of its models and call them as a run does.

    A family whose denoiser has none of the sites below is still planned, by placing its weights and tracing its calls.

    Attributes:
        components_of: ``(target)`` -> its models by name, in the order in which a run uses them; empty if the target is
            of another family. Raises UnsupportedModelError for a part that cannot be planned.
        step_inputs: ``(anatomy, shape)`` -> the inputs of a denoising step, for the target's current state; None if
            ``arguments`` states the calls.
        predict: ``(denoiser, x, inputs)`` -> the prediction; None as ``step_inputs``.
        decode: ``(vae, latents)``, unscaled -> pixels.
        encode: ``(vae, pixels)`` -> moments: mean and log-variance.
        arguments: ``(anatomy, name, shape)`` -> the arguments of a model of diffusers, and those by name; None if
            nobody states them. A pipeline's own call is rehearsed instead, if that is possible.
        forget: ``(denoiser)``; removes what a denoiser keeps from its first call on, so that every trace has it.
        unchecked_components_of: like ``components_of`` without its checks; called at every call of a planned run, whose
            models may have been replaced.
        entry_methods: names of the target's methods that a run enters before it calls a model.
        denoiser, autoencoder: names of these among the components.
        latents_in_call: ``(denoiser, args, kwargs)`` -> the latents in a call of the denoiser, and the size of their
            picture.
        latent_multiple: both sides of a picture must be multiples of this number of latent pixels.
        guidance_scale: name of the pipeline's argument for the guidance scale.
        guides_above: the pipeline guides at scales above this.
        configs: for components without a configuration, their configuration in diffusers' words.
        anatomy_fields: ``(target, anatomy)`` -> fields of the anatomy that depend on the target's kind or state:
            ``passes``, ``encodes``, ``joined``.
        conditions: ``(denoiser)`` -> an object that represents everything that its calls depend on, except arguments.
            If it is another object, earlier measurements and recordings are invalid.
        is_attention, is_feed_forward, is_residual_block, is_transformer_block: ``(module)`` -> True if it is such a
            site; a diffusion transformer as a whole counts as an attention.
        unet_path: ``(unet)`` -> the path of its maps.
        residual: ``(block, *more)`` -> its parts; ``more`` are its arguments after map and time.
        transformer: ``(block, *args, **kwargs)`` -> its parts; the arguments are those after the tokens.
        joint: ``(block)`` -> how a diffusion transformer's block is called with some of its tokens; None if it is not
            such a block.
        upcasts: ``(attention)`` -> True if its scores are requested in float32.
        attend: ``(attention, original, *args, **kwargs)`` -> the result of the attention's own forward, computed with
            torch's scaled_dot_product_attention; None if that forward uses it already.
        known: True if the call signature of the models is known. Otherwise their weights are placed, and only the
            autoencoder's calls are planned.
        hosted: True if a host runs these models, with code of its own between their layers.
        left_out: attributes of a hosted model's modules that a copy to be traced does without: by them the host finds
            their weights.
        mixes_rows: ``(attention)`` -> True if it reads several rows of a batch together. A host other than diffusers
            passes the conditions of the rows to what it puts into an attention.
    """

    components_of: Callable[[Any], dict[str, nn.Module]]
    step_inputs: Callable[[Anatomy, Shape], StepInputs] | None
    predict: Predict | None
    decode: Callable[[Any, Tensor], Tensor]
    encode: Callable[[Any, Tensor], Tensor]
    arguments: Callable[[Anatomy, str, Shape], Arguments | None] | None = None
    forget: Callable[[Any], None] = lambda denoiser: None
    unchecked_components_of: Callable[[Any], dict[str, nn.Module]] = lambda target: {}
    entry_methods: tuple[str, ...] = ()
    denoiser: str = "unet"
    autoencoder: str = "vae"
    latents_in_call: Callable[[Any, tuple[Any, ...], dict[str, Any]], LatentsInCall | None] = map_in_call
    latent_multiple: int = 1
    guidance_scale: str = "guidance_scale"
    guides_above: float = 1
    configs: Callable[[Mapping[str, Any]], Mapping[str, Mapping[str, Any]]] = lambda components: {}
    anatomy_fields: Callable[[Any, Anatomy], dict[str, Any]] = lambda target, anatomy: {}
    conditions: Callable[[Any], object] = lambda denoiser: None
    is_attention: Callable[[nn.Module], bool] = lambda module: False
    is_feed_forward: Callable[[nn.Module], bool] = lambda module: False
    is_residual_block: Callable[[nn.Module], bool] = lambda module: False
    is_transformer_block: Callable[[nn.Module], bool] = lambda module: False
    unet_path: Callable[[Any], UNetPath] | None = None
    residual: Callable[..., Residual | None] = lambda *inputs, **more: None
    transformer: Callable[..., Transformer | None] = lambda *inputs, **more: None
    joint: Callable[[nn.Module], JointBlock | None] = lambda block: None
    upcasts: Callable[[Any], bool] = lambda attention: False
    attend: Callable[..., Tensor] | None = None
    known: bool = True
    hosted: bool = False
    left_out: tuple[str, ...] = ()
    mixes_rows: Callable[[Any], bool] = lambda attention: False


@dataclass(frozen=True)
class Anatomy:
    """The parts and sites of a target.

    Attributes:
        family: the family of the modules.
        components: the target's models by name, in the order in which a run uses them.
        entries: for each component, the methods through which the host calls it.
        denoiser: the name of the denoiser among the components ("unet", "transformer"), None when there is none.
        autoencoder: the name of the VAE, None when there is none.
        attentions: attention modules of denoiser, ControlNet and autoencoder.
        feed_forwards: the denoiser's feed-forward modules.
        residual_blocks: the denoiser's residual blocks.
        transformer_blocks: a UNet's transformer blocks.
        joint_blocks: a diffusion transformer's blocks.
        unet_path: the path of a UNet's maps; None if the denoiser is not a UNet.
        configs: configurations, in diffusers' words, of components that have none of their own.
        computes: the type in which the host lets a component compute, if it is not the weights' own.
        passes: rows of the denoiser's batch for each picture, with the target's guidance.
        calls: calls of the denoiser in each step: two if the target guides by a second call.
        joined: number of reference pictures whose latents are joined to those of every row.
        encodes: True if a run of the target starts from a picture.
        moved: True if the host moves components itself when they run, and has no other copy of their weights.
        kept: bytes of a component's weights that stay on the device while it runs, in hosts that move them in parts.
        processors: attention processors that the target sets on its denoiser during a run, by path.
        rehearsal: the calls that the target makes, if its own call was rehearsed; they are planned then.
    """

    family: Family
    components: Mapping[str, nn.Module]
    entries: Mapping[str, tuple[str, ...]]
    denoiser: str | None
    autoencoder: str | None
    attentions: tuple[Site, ...]
    feed_forwards: tuple[Site, ...]
    residual_blocks: tuple[Site, ...]
    transformer_blocks: tuple[Site, ...]
    joint_blocks: tuple[Site, ...] = ()
    unet_path: UNetPath | None = None
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    computes: Mapping[str, torch.dtype] = field(default_factory=dict)
    passes: int = 2
    calls: int = 1
    joined: int = 0
    encodes: bool = False
    moved: bool = False
    kept: Mapping[str, int] = field(default_factory=dict)
    processors: Mapping[str, Any] = field(default_factory=dict)
    rehearsal: Rehearsal | None = None

    @property
    def steps(self) -> tuple[tuple[str, ...], ...]:
        """Models that run in every step, in groups that take turns within a step."""
        if self.rehearsal is not None:
            groups = (tuple(name for name in group if name in self.components) for group in self.rehearsal.steps)
            return tuple(group for group in groups if group)
        if self.denoiser not in self.components:
            return ()
        return (tuple(name for name in self.components if name.startswith("controlnet") or name == self.denoiser),)

    @property
    def denoiser_module(self) -> nn.Module | None:
        """The denoiser; None if there is none."""
        return self.components[self.denoiser] if self.denoiser else None

    @property
    def vae(self) -> nn.Module | None:
        """The autoencoder; None if there is none."""
        return self.components[self.autoencoder] if self.autoencoder else None

    def config(self, component: str | None) -> Mapping[str, Any]:
        """The component's configuration in diffusers' words; empty when nothing is known of it, or it is not there."""
        name = component or ""
        if name in self.configs:
            return self.configs[name]
        config = getattr(self.components.get(name), "config", {})
        return config if isinstance(config, Mapping) else vars(config)


def sites(prefix: str, root: nn.Module, is_site: Callable[[nn.Module], bool]) -> tuple[Site, ...]:
    """Every module below ``root`` for which ``is_site`` holds, named by its path."""
    return tuple(
        Site(f"{prefix}.{name}".rstrip("."), module) for name, module in root.named_modules() if is_site(module)
    )


def has(module: Any, *names: str) -> bool:
    """True if ``module`` has all these attributes. Families are recognised so, without importing their classes."""
    return all(hasattr(module, name) for name in names)


def having(*names: str) -> Callable[[Any], bool]:
    """Function that returns True if a module has all these attributes."""
    return lambda module: has(module, *names)


def layer(module: nn.Module) -> Any:
    """The layer itself where a LoRA is wrapped around it: to look at, not to call."""
    return getattr(module, "base_layer", module)


def geglu_of(feed_forward: Any) -> nn.Module | None:
    """The layer of a feed-forward that multiplies half of its ``proj`` with the GELU of the other half, if there."""
    net = getattr(feed_forward, "net", None)
    first: Any = net[0] if net is not None else None
    return first if type(first).__name__ == "GEGLU" and hasattr(first, "proj") else None


def is_3x3(conv: nn.Module) -> bool:
    """True for a convolution that preserves the map's size and reads the direct neighbours."""
    inner = layer(conv)
    sizes = [getattr(inner, name, None) for name in ("kernel_size", "padding", "stride", "dilation")]
    return sizes == [(3, 3), (1, 1), (1, 1), (1, 1)] and inner.padding_mode in ("zeros", "circular")


def is_pointwise(conv: nn.Module) -> bool:
    """True for a convolution of single pixels."""
    return getattr(layer(conv), "kernel_size", None) == (1, 1)
