"""Pipelines of many classes with their calls, the record of a real call, and a pipeline of no known class."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import families
import todays
import torch
from torch import Tensor, nn

from sd_lowvram.checkpoints.architectures import architecture, empty_model
from sd_lowvram.checkpoints.meta_model import with_words
from sd_lowvram.models.recorded import Given

METHODS = ("forward", "encode", "decode", "generate", "get_image_features", "get_text_features")
Calls = list[tuple[Any, ...]]


def shapes(tree: Any) -> tuple[Any, ...]:
    """Shapes and types of all tensors in containers."""
    if isinstance(tree, (Tensor, Given)):
        return ((tuple(tree.shape), tree.dtype),)
    inside = list(tree.values()) if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return tuple(shape for each in inside for shape in shapes(each))


@contextlib.contextmanager
def recorded(pipe: Any) -> Iterator[Calls]:
    """Record the calls of a pipeline's models, those within a call left out: name, module, method and shapes."""
    calls: Calls = []
    undo: list[tuple[nn.Module, str]] = []
    busy: list[str] = []

    def call(name: str, path: str, method: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not busy:
            calls.append((name, path, method, shapes((args, kwargs))))
        busy.append(name)
        try:
            return original(*args, **kwargs)
        finally:
            busy.pop()

    seen = set[nn.Module]()
    for name, part in pipe.components.items():
        for path, module in part.named_modules(seen) if isinstance(part, nn.Module) else ():
            for method in METHODS if not path else ("forward",):
                if hasattr(module, method) and method not in vars(module):
                    vars(module)[method] = functools.partial(call, name, path, method, getattr(module, method))
                    undo.append((module, method))
    try:
        yield calls
    finally:
        for module, method in undo:
            del vars(module)[method]


def real(pipe: Any, **call: Any) -> Calls:
    with recorded(pipe) as calls, torch.no_grad():
        pipe(**call)
    return calls


def rehearsal(record: Any) -> Calls:
    """The calls of a rehearsal, as :func:`recorded` has them."""
    return [(row.component, row.path, row.method, given_shapes(row)) for row in record.calls]


def given_shapes(row: Any) -> tuple[Any, ...]:
    """Shapes and types of the tensors in a recorded call."""
    return shapes((row.args, row.kwargs))


def lumina2_call() -> dict[str, Any]:
    text = {"prompt_embeds": todays.noise(1, 24, 64), "negative_prompt_embeds": -todays.noise(1, 24, 64)}
    masks = ("prompt_attention_mask", "negative_prompt_attention_mask")
    return text | dict.fromkeys(masks, torch.ones(1, 24, dtype=torch.bool)) | {"guidance_scale": 3.0}


def _of_families(name: str) -> tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]:
    kind = families.KINDS[name]
    sized = {"width": families.SIZE, "height": families.SIZE} if kind.sized else {}
    return kind.make, lambda pipe: {"prompt": "a red apple", "guidance_scale": 5.0, **sized, **kind.options}


def _of_today(make: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]:
    return make, lambda pipe: {**todays.prompts(pipe), "width": todays.SIZE, "height": todays.SIZE}


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_TEXT = {**_HEADS, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
_QWEN = _TEXT | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}}
_SEES = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
_QWEN_SEES = {**_SEES, "deepstack_visual_indexes": [0]}
_PIXTRAL = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
_PIXTRAL |= {"head_dim": 8, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_MINISTRAL = {**_TEXT, "model_type": "ministral3", "num_hidden_layers": 3}
_KL = {"block_out_channels": [32] * 4, "norm_num_groups": 8}
_DIT = {"num_layers": 2, "num_attention_heads": 4}
_IDEOGRAM = {**_DIT, "attention_head_dim": 16, "intermediate_size": 96, "adaln_dim": 32, "mrope_section": (4, 2, 2)}
_IDEOGRAM |= {"llm_features_dim": 13 * 64}

_NARROW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen-image-2.1": (
        {
            "text_encoder": {"text_config": {**_QWEN, "num_hidden_layers": 3}, "vision_config": _QWEN_SEES},
            "transformer": {**_DIT, "attention_head_dim": 16, "context_in_dim": 64, "axes_dims_rope": (4, 6, 6)},
            "vae": {"base_dim": 8, "decoder_base_dim": 8},
        },
        {},
    ),
    "ideogram4": (
        {
            "text_encoder": {"text_config": {**_QWEN, "num_hidden_layers": 36}, "vision_config": _QWEN_SEES},
            "transformer": _IDEOGRAM,
            "unconditional_transformer": _IDEOGRAM,
            "vae": _KL,
        },
        {"max_sequence_length": 64},
    ),
    "ernie-image": (
        {
            "text_encoder": {"text_config": _MINISTRAL, "vision_config": _PIXTRAL},
            "transformer": {
                **_DIT,
                "hidden_size": 64,
                "ffn_hidden_size": 96,
                "text_in_dim": 64,
                "rope_axes_dim": (4, 6, 6),
            },
            "vae": _KL,
        },
        {},
    ),
}
"""Pipelines by name: changes that make their models small, and of their call."""


def _of_name(name: str) -> tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]:
    changes, call = _NARROW[name]
    config = {part: {**stated, **changes[part]} if part in changes else stated
              for part, stated in architecture(name).items()}  # fmt: skip

    def make() -> Any:
        torch.manual_seed(0)
        pipe = with_words(config, {part: empty_model(config[part]).eval().requires_grad_(False) for part in changes})
        pipe.set_progress_bar_config(disable=True)
        return pipe

    size = {"width": 128, "height": 128}
    return make, lambda pipe: {"prompt": "a red apple on a table", **size, **config.get("call", {}), **call}


_FAMILIES = ("sd15", "sdxl", "img2img", "inpaint, 9 channels", "controlnet", "refiner")

KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]] = {
    **{name: _of_families(name) for name in _FAMILIES},
    **{make.__name__: _of_today(make) for make in (todays.flux, todays.sd3, todays.z_image, todays.chroma)},
    **{make.__name__: _of_today(make) for make in (todays.klein, todays.krea2)},
    **{name: _of_name(name) for name in _NARROW},
    "lumina2": (todays.lumina2, lambda pipe: {**lumina2_call(), "width": todays.SIZE, "height": todays.SIZE}),
}
"""Pipelines, each with the call that it is rehearsed with, without steps."""


def narrowed(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """``call`` with its embeddings in another type; pictures stay, as users give them."""

    def narrow(value: Any) -> Any:
        if isinstance(value, list):
            return [narrow(each) for each in value]
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return {name: narrow(value) if "embeds" in name else value for name, value in call.items()}


class Expert(nn.Module):
    """A denoiser of its own kind: maps (N, 4, h, w) with a text (N, tokens, 32)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Conv2d(4, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.text = nn.Linear(32, width)
        self.out = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor, words: Tensor) -> Tensor:
        x = self.into(noisy) + self.text(words).mean(1)[:, :, None, None] + time
        for block in self.blocks:
            x = x + torch.tanh(block(x.movedim(1, -1))).movedim(-1, 1)
        return self.out(x)


class TwoExperts:
    """A pipeline that nobody has written down: a denoiser for the first steps, another one for the last, a loop of its
    own."""

    def __init__(self, width: int = 256) -> None:
        torch.manual_seed(0)
        self.reader = nn.Embedding(100, 32)
        self.early, self.late = Expert(width), Expert(width)
        self.vae = todays.vae(channels=4)
        for part in self.components.values():
            part.eval().requires_grad_(False)

    @property
    def components(self) -> dict[str, nn.Module]:
        return {"reader": self.reader, "early": self.early, "late": self.late, "vae": self.vae}

    def __call__(
        self,
        prompt: str,
        height: int = 64,
        width: int = 64,
        num_inference_steps: int = 4,
        boundary: float = 0.5,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        tokens = torch.tensor([[ord(letter) % 100 for letter in prompt[:16].ljust(16)]])
        words = self.reader(tokens)
        latents = torch.randn(1, 4, height // 8, width // 8, generator=generator)
        for step in range(num_inference_steps):
            expert = self.early if step < boundary * num_inference_steps else self.late
            time = torch.tensor(1 - step / num_inference_steps)
            both = expert(torch.cat([latents] * 2), time, torch.cat([words, -words]))
            first, other = both.chunk(2)
            latents = latents - 0.1 * (other + 2 * (first - other))
        picture: Tensor = self.vae.decode(latents, return_dict=False)[0]
        return picture
