"""Kinds of ComfyUI's split files, and the configuration of their models, from the header.

Both follow from names and widths of the layers: heads from the norms of queries, which are as wide as a head, depths
from the numbers of blocks. Facts that no header has are those of the published models
(``data/architectures/transformers.json``). The names in a file of each kind are data too
(``data/architectures/split_files.json``): a file with a weight that the model lacks is of another model, and refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..progress import log_event
from .architectures import DATA, parts_of_transformers
from .gguf_files import gguf_header, is_gguf_file
from .inspection import describe
from .safetensors_header import Header, read_header
from .scaled_files import check_formats, weight_of

_PACKED = 4
"""Latent pixels that a transformer takes as one, 2x2."""

_CLIP_TOKENS = 77

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the weights in a file, by name."""


class Layout(NamedTuple):
    """The names that the weights of one kind have in files.

    Attributes:
        kind: "flux1", "t5", "kl".
        role: that such files have in a model.
        mark: the name that identifies the kind.
        names: of all weights that the model has.
        own: what to put in place of beginnings, for the names by which configurations are read.
        diffusers: the names are those of diffusers.
    """

    kind: str
    role: str
    mark: str
    names: re.Pattern[str]
    own: tuple[tuple[re.Pattern[str], str], ...]
    diffusers: bool


class _Known(NamedTuple):
    """Known files.

    Attributes:
        layouts: layouts in the order in which they are tried.
        prefixes: for each role, the prefixes that may precede the names of a layout.
        parts: for each role, the names of its parts in an all-in-one file.
        unused: names of weights that no model here needs.
        others: unsupported models, each with the marks in the names of its weights.
    """

    layouts: tuple[Layout, ...]
    prefixes: Mapping[str, re.Pattern[str]]
    parts: Mapping[str, re.Pattern[str]]
    unused: re.Pattern[str]
    others: Mapping[str, list[str]]


@lru_cache(maxsize=1)
def _read_kinds() -> _Known:
    table = json.loads((DATA / "architectures" / "split_files.json").read_text(encoding="utf-8"))
    layouts = tuple(
        Layout(
            row["kind"],
            row["role"],
            row["mark"],
            _pattern(row["names"]),
            tuple((_pattern([begin]), new) for begin, new in row.get("own", ())),
            row.get("diffusers", False),
        )
        for row in table["layouts"]
    )
    prefixes, parts = (
        {role: _pattern(pattern) for role, pattern in table[name].items()} for name in ("prefixes", "parts")
    )
    return _Known(layouts, prefixes, parts, _pattern(table["unused"]), table["others"])


def layout_of(mark: str) -> Layout:
    """The layout of a mark."""
    return next(layout for layout in _read_kinds().layouts if layout.mark == mark)


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Matches names as the data has them: # is a number, @ a weight or a bias, .* all that follows, a dot a dot."""
    parts = []
    for name in names:
        begin, rest = (name[:-2], r"\..*") if name.endswith(".*") else (name, "")
        plain = begin.replace(".", r"\.").replace("#", r"\d{1,4}").replace("@", "(weight|bias)")
        parts.append(f"(?:{plain}{rest})")
    return re.compile("|".join(parts), re.DOTALL)


@dataclass(frozen=True)
class SplitFile:
    """A model in a file.

    Attributes:
        config: configuration of the model, as diffusers or transformers write it.
        layout: layout of its weights' names.
        prefix: prefix of these names.
        latents: channels that a transformer makes or an autoencoder decodes; 0 for a text encoder.
        is_gguf: True for a GGUF file, False for .safetensors.
    """

    path: Path
    config: dict[str, Any]
    layout: Layout
    prefix: str = ""
    latents: int = 0
    is_gguf: bool = False

    @property
    def kind(self) -> str:
        """Kind of the model: "flux1", "t5", "kl"."""
        return self.layout.kind


def split_file(path: Path, role: str) -> SplitFile:
    """Return what the file at ``path`` is.

    Args:
        path: the file.
        role: "transformer" or "vae".

    Raises:
        CheckpointError: as :func:`split_files_in`.
    """
    return split_files_in(path, role)[0]


def split_files_in(path: Path, role: str) -> list[SplitFile]:
    """Return the models of one role in a file; an all-in-one file may hold several text encoders.

    Args:
        path: the file.
        role: "transformer", "text encoder" or "vae".

    Raises:
        CheckpointError: the file is unreadable, truncated, stored in a way that is not served, for another role, or of
            a model that is not served.
    """
    blocks = is_gguf_file(path)
    header = gguf_header(path) if blocks else read_header(path)
    if blocks and role != "transformer":
        raise CheckpointError(f"{path} is a GGUF file: these are read of transformers; get the {role} as .safetensors")
    check_formats(path, header)
    shapes = {name: entry.shape for name, entry in header.tensors.items()}
    layouts = _layouts_in(shapes, role)
    if not layouts:
        other = next(
            (matches[0][0] for other in _read_kinds().prefixes if (matches := _layouts_in(shapes, other))), None
        )
        what = f"{_KINDS[other.kind].title}, a {other.role}" if other else title_of(header)
        served = ", ".join(
            dict.fromkeys(_KINDS[layout.kind].title for layout in _read_kinds().layouts if layout.role == role)
        )
        raise CheckpointError(
            f"{path} is not a {role} that is served: it looks like {what}. Served are those of {served}"
        )
    return [_read(path, shapes, layout, prefix, blocks) for layout, prefix in layouts]


def _layouts_in(shapes: Shapes, role: str) -> list[tuple[Layout, str]]:
    """The layouts of a role that are in a file with what stands before their names, one for each such prefix."""
    layouts: dict[str, Layout] = {}
    for layout in _read_kinds().layouts:
        if layout.role == role:
            before = (name.removesuffix(layout.mark) for name in shapes if name.endswith(layout.mark))
            for prefix in before:
                if _read_kinds().prefixes[role].fullmatch(prefix):
                    layouts.setdefault(prefix, layout)
    return [(layout, prefix) for prefix, layout in layouts.items()]


def _read(path: Path, shapes: Shapes, layout: Layout, prefix: str, blocks: bool) -> SplitFile:
    reader = _KINDS[layout.kind]
    _check_leftovers(path, shapes, layout, prefix)
    own = {
        _own_name(name.removeprefix(prefix), layout): tensor
        for name, tensor in shapes.items()
        if name.startswith(prefix)
    }
    try:
        config = reader.config(own)
        latents = _latents(layout, config, own)
    except (KeyError, IndexError, ValueError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{path} looks like {reader.title}, but its weights do not go together ({type(error).__name__}: {error})"
        ) from error
    return SplitFile(path, config, layout, prefix, latents, blocks)


def _own_name(name: str, layout: Layout) -> str:
    for begin, new in layout.own:
        if match := begin.match(name):
            return match.expand(new) + name[match.end() :]
    return name


def _latents(layout: Layout, config: Mapping[str, Any], shapes: Shapes) -> int:
    """Channels of the latents that a transformer makes or an autoencoder decodes, 0 of a text encoder.

    Raises:
        ValueError: a transformer is given more channels than it makes.
    """
    if layout.role != "transformer":
        return int(config.get("latent_channels") or config.get("z_dim") or 0)
    taken = int(config["in_channels"]) // (1 if _KINDS[layout.kind].by_pixel else _PACKED)
    last = next((shapes[name][0] for name in _LAST if name in shapes), None)
    out = taken if last is None else last // _PACKED
    if taken != out:
        raise ValueError(
            f"it is given {taken} channels of latents and makes {out}, as Fill, Depth, Canny and edit models do: give "
            "its diffusers folder with --model"
        )
    return out


def _check_leftovers(path: Path, shapes: Shapes, layout: Layout, prefix: str) -> None:
    """Look at the weights of a file that its model has no place for; those that nobody knows are logged in one line.

    Raises:
        CheckpointError: one is in a module or a list of blocks that the model has, or is the mark of another model.
    """
    title = _KINDS[layout.kind].title
    modules, left = _modules_and_leftovers(shapes, layout, prefix)
    for other, marks in _read_kinds().others.items():
        if leftover := next((name for name in left if any(mark in name for mark in marks)), None):
            raise CheckpointError(f"{path} looks like {title}, but {leftover} in it is of {other}, which is not served")
    strange = {name: inner for name, inner in left.items() if not _read_kinds().unused.fullmatch(inner)}
    inside = [name for name, inner in strange.items() if inner.split(".")[0] in modules]
    if inside:
        raise CheckpointError(
            f"{path} looks like {title}, but such a model has no place for {len(inside)} of its weights, {inside[0]} "
            "for one: it is of another model, which is not served"
        )
    if strange:
        log_event(
            __name__,
            f"{path} holds {len(strange)} weights that {title} has no use for, {next(iter(strange))} for one: they "
            "are left out",
        )


def _modules_and_leftovers(shapes: Shapes, layout: Layout, prefix: str) -> tuple[set[str], dict[str, str]]:
    """Modules of the model that have weights, and names in it of the weights that it has no place for."""
    modules, left = set(), {}
    for name in shapes:
        inner = _inner(name, prefix, layout.role)
        if (inner_name := weight_of(inner)) and name.startswith(prefix) and layout.names.fullmatch(inner_name):
            modules.add(inner_name.split(".")[0])
        elif inner_name and not _is_other_part(name, prefix, layout.role):
            left[name] = inner
    return modules, left


def _is_other_part(name: str, prefix: str, role: str) -> bool:
    """True for a weight of another part of an all-in-one file, which may have several text encoders."""
    several = role == "text encoder" and prefix and not name.startswith(prefix)
    return any(pattern.fullmatch(name) for of, pattern in _read_kinds().parts.items() if of != role or several)


def _inner(name: str, prefix: str, role: str) -> str:
    """A name without the prefix of its model, or without another that such files have."""
    if prefix and name.startswith(prefix):
        return name.removeprefix(prefix)
    before = _read_kinds().prefixes[role].match(name)
    return name[before.end() :] if before else name


def title_of(header: Header) -> str:
    """Words for the kind of an unsupported file."""
    if any(name.startswith("first_stage_model.") for name in header.tensors):
        return "a whole checkpoint (give it with --model)"
    marks_by_title = _read_kinds().others.items()
    titles = (
        title for title, marks in marks_by_title if any(mark in name for name in header.tensors for mark in marks)
    )
    return next(titles, None) or describe(header)


def _count(shapes: Shapes, before: str) -> int:
    """Number of blocks whose names begin with ``before``."""
    number = re.compile(rf"{re.escape(before)}\.(\d{{1,4}})\.")
    numbers = {int(match[1]) for name in shapes if (match := number.match(name))}
    if numbers != set(range(len(numbers))):
        raise ValueError(f"of {before} some are missing")
    return len(numbers)


def _axes(head: int, parts: tuple[int, ...]) -> list[int]:
    """Channels of a head that rotate with each axis; for published heads, 128 wide, ``parts``."""
    return [head * part // 128 for part in parts]


def _heads(width: int, head: int) -> dict[str, int]:
    return {"attention_head_dim": head, "num_attention_heads": width // head}


def _double_stream(shapes: Shapes) -> dict[str, Any]:
    """Common configuration of the transformers of Black Forest Labs and their descendants."""
    norm = "double_blocks.0.img_attn.norm.query_norm"
    head = shapes[f"{norm}.scale" if f"{norm}.scale" in shapes else f"{norm}.weight"][0]
    width, channels = shapes["img_in.weight"]
    return {
        "in_channels": channels,
        "num_layers": _count(shapes, "double_blocks"),
        "num_single_layers": _count(shapes, "single_blocks"),
        "joint_attention_dim": shapes["txt_in.weight"][1],
        **_heads(width, head),
    }


def _flux1(shapes: Shapes) -> dict[str, Any]:
    config = _double_stream(shapes)
    return parts_of_transformers()["flux1-dev"] | config | {
        "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "axes_dims_rope": _axes(config["attention_head_dim"], (16, 56, 56)),
    }  # fmt: skip


def _chroma(shapes: Shapes) -> dict[str, Any]:
    config = _double_stream(shapes)
    hidden, channels = shapes["distilled_guidance_layer.in_proj.weight"]
    return parts_of_transformers()["chroma1"] | config | {
        "approximator_num_channels": channels,
        "approximator_hidden_dim": hidden,
        "approximator_layers": _count(shapes, "distilled_guidance_layer.layers"),
        "axes_dims_rope": _axes(config["attention_head_dim"], (16, 56, 56)),
    }  # fmt: skip


def _flux2(shapes: Shapes) -> dict[str, Any]:
    config = _double_stream(shapes)
    width = shapes["img_in.weight"][0]
    return parts_of_transformers()["klein-4b"] | config | {
        "mlp_ratio": shapes["double_blocks.0.img_mlp.2.weight"][1] / width,
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
        "axes_dims_rope": _axes(config["attention_head_dim"], (32, 32, 32, 32)),
    }  # fmt: skip


def _sd3(shapes: Shapes) -> dict[str, Any]:
    width, channels = shapes["x_embedder.proj.weight"][:2]
    normed = "joint_blocks.0.x_block.attn.ln_q.weight" in shapes
    dual = re.compile(r"joint_blocks\.(\d{1,4})\.x_block\.attn2\.qkv\.weight")
    return {
        "_class_name": "SD3Transformer2DModel",
        "sample_size": 128,
        "in_channels": channels,
        "out_channels": channels,
        "num_layers": _count(shapes, "joint_blocks"),
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "caption_projection_dim": width,
        "pooled_projection_dim": shapes["y_embedder.mlp.0.weight"][1],
        "pos_embed_max_size": math.isqrt(shapes["pos_embed"][1]),
        "qk_norm": "rms_norm" if normed else None,
        "dual_attention_layers": sorted(int(match[1]) for name in shapes if (match := dual.fullmatch(name))),
        **_heads(width, shapes["joint_blocks.0.x_block.attn.ln_q.weight"][0] if normed else 64),
    }


def _z_image(shapes: Shapes) -> dict[str, Any]:
    head = shapes["layers.0.attention.q_norm.weight"][0]
    width, texts = shapes["cap_embedder.1.weight"]
    return parts_of_transformers()["z-image"] | {
        "in_channels": shapes["x_embedder.weight"][1] // 4,
        "dim": width,
        "n_layers": _count(shapes, "layers"),
        "n_refiner_layers": _count(shapes, "noise_refiner"),
        "n_heads": width // head,
        "n_kv_heads": width // head,
        "cap_feat_dim": texts,
        "axes_dims": _axes(head, (32, 48, 48)),
    }


def _qwen_image(shapes: Shapes) -> dict[str, Any]:
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    width, channels = shapes["img_in.weight"]
    return parts_of_transformers()["qwen-image"] | {
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // 4,
        "num_layers": _count(shapes, "transformer_blocks"),
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "axes_dims_rope": _axes(head, (16, 56, 56)),
        **_heads(width, head),
    }


def _t5(shapes: Shapes) -> dict[str, Any]:
    layer = "encoder.block.0.layer"
    buckets, heads = shapes[f"{layer}.0.SelfAttention.relative_attention_bias.weight"]
    tokens, width = shapes.get("shared.weight") or shapes["encoder.embed_tokens.weight"]
    return parts_of_transformers()["t5-xxl"] | {
        "vocab_size": tokens,
        "d_model": width,
        "d_kv": shapes[f"{layer}.0.SelfAttention.q.weight"][0] // heads,
        "d_ff": shapes[f"{layer}.1.DenseReluDense.wi_0.weight"][0],
        "num_layers": _count(shapes, "encoder.block"),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
    }


def _clip(shapes: Shapes) -> dict[str, Any]:
    """Heads are 64 wide in both that are in use; the wider of them is OpenCLIP's, of another activation."""
    tokens, width = shapes["text_model.embeddings.token_embedding.weight"]
    projection = shapes.get("text_projection.weight", (width, width))[0]
    positions = shapes.get("text_model.embeddings.position_embedding.weight", (_CLIP_TOKENS, width))[0]
    if positions != _CLIP_TOKENS:
        raise ValueError(f"it reads {positions} tokens, as Long-CLIP does, where CLIP reads {_CLIP_TOKENS}")
    return parts_of_transformers()["clip-g" if width >= 1280 else "clip-l"] | {
        "vocab_size": tokens,
        "hidden_size": width,
        "intermediate_size": shapes["text_model.encoder.layers.0.mlp.fc1.weight"][0],
        "num_hidden_layers": _count(shapes, "text_model.encoder.layers"),
        "num_attention_heads": width // 64,
        "projection_dim": projection,
    }


def _decoder_only(shapes: Shapes, head: int) -> dict[str, Any]:
    layer = "model.layers.0"
    tokens, width = shapes["model.embed_tokens.weight"]
    return {
        "vocab_size": tokens,
        "hidden_size": width,
        "intermediate_size": shapes[f"{layer}.mlp.gate_proj.weight"][0],
        "num_hidden_layers": _count(shapes, "model.layers"),
        "num_attention_heads": shapes[f"{layer}.self_attn.q_proj.weight"][0] // head,
        "num_key_value_heads": shapes[f"{layer}.self_attn.k_proj.weight"][0] // head,
    }


def _qwen3(shapes: Shapes) -> dict[str, Any]:
    """Configuration of Qwen3. Pipelines never use its second table, which replaces the first in files without one."""
    head = shapes["model.layers.0.self_attn.q_norm.weight"][0]
    tied = not {"lm_head.weight", "model.lm_head.weight"} & shapes.keys()
    own = {"head_dim": head, "tie_word_embeddings": tied}
    return parts_of_transformers()["qwen3-4b"] | _decoder_only(shapes, head) | own


def _qwen25_vl(shapes: Shapes) -> dict[str, Any]:
    """Heads are 128 wide, those of what sees pictures 80."""
    whole = parts_of_transformers()["qwen2.5-vl-7b"]
    width = shapes["visual.patch_embed.proj.weight"][0]
    seen = {
        "depth": _count(shapes, "visual.blocks"),
        "hidden_size": width,
        "intermediate_size": shapes["visual.blocks.0.mlp.gate_proj.weight"][0],
        "num_heads": width // 80,
        "out_hidden_size": shapes["model.embed_tokens.weight"][1],
    }
    text = whole["text_config"] | _decoder_only(shapes, 128)
    tied = not {"lm_head.weight", "model.lm_head.weight"} & shapes.keys()
    return whole | {"text_config": text, "vision_config": whole["vision_config"] | seen, "tie_word_embeddings": tied}


def _kl(shapes: Shapes) -> dict[str, Any]:
    levels = range(_count(shapes, "decoder.up"))
    widths = [shapes[f"decoder.up.{level}.block.0.conv2.weight"][0] for level in levels]
    return parts_of_transformers()["kl-16"] | {
        "block_out_channels": widths,
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
        "layers_per_block": _count(shapes, "encoder.down.0.block"),
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
    }


def _kl_flux2(shapes: Shapes) -> dict[str, Any]:
    config = _kl(shapes)
    quantised = any(name.endswith(".quant_conv.weight") or name == "quant_conv.weight" for name in shapes)
    both = {"use_quant_conv": quantised, "use_post_quant_conv": quantised}
    return config | both | {"_class_name": "AutoencoderKLFlux2"}


def _kl_qwen(shapes: Shapes) -> dict[str, Any]:
    base = shapes["encoder.conv1.weight"][0]
    return parts_of_transformers()["kl-qwen"] | {"base_dim": base, "z_dim": shapes["conv2.weight"][0]}


@dataclass(frozen=True)
class _Kind:
    """Name of a kind of file, and the function that reads the configuration of its model.

    Attributes:
        by_pixel: True if its configuration counts the channels of one latent pixel, not of 2x2.
    """

    title: str
    config: Callable[[Shapes], dict[str, Any]]
    by_pixel: bool = False


_LAST = ("final_layer.linear.weight", "proj_out.weight")
"""Names of a transformer's last layer."""

_KINDS = {
    "flux2": _Kind("FLUX.2 Klein", _flux2),
    "chroma": _Kind("Chroma", _chroma),
    "flux1": _Kind("FLUX.1", _flux1),
    "sd3": _Kind("SD3", _sd3, by_pixel=True),
    "z-image": _Kind("Z-Image", _z_image, by_pixel=True),
    "qwen-image": _Kind("Qwen-Image", _qwen_image),
    "t5": _Kind("T5", _t5),
    "clip": _Kind("CLIP", _clip),
    "qwen3": _Kind("Qwen3", _qwen3),
    "qwen2.5-vl": _Kind("Qwen2.5-VL", _qwen25_vl),
    "kl-flux2": _Kind("FLUX.2", _kl_flux2),
    "kl": _Kind("FLUX.1, SD3, Z-Image and Chroma", _kl),
    "kl-qwen": _Kind("Qwen-Image and Wan 2.1", _kl_qwen),
}
