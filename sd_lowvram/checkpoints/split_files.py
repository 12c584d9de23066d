"""A model from the files that ComfyUI's users have: one of its transformer, one of each text encoder, one of its VAE.

They are laid out as a diffusers folder in the cache, with configurations that their headers tell, and links in place of
weights; all that takes a folder takes them so. Nothing is copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..cache import cache_folder
from ..errors import BadInputError, CheckpointError
from ..files.whole import write_json
from .architectures import schedulers_of_transformers, write_tokenizer
from .split_kinds import SplitFile, split_file

_LINK, _GGUF_LINK = "split.safetensors", "split.gguf"
"""What a file is called in the folder of its part, by what is in it."""

_FLUX_SCALE = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
_CLIP, _PROJECTED = "CLIPTextModel", "CLIPTextModelWithProjection"
_CLIP_TOKENIZERS = {
    "tokenizer": {"pad_token": "<|endoftext|>", "model_max_length": 77},
    "tokenizer_2": {"pad_token": "!", "model_max_length": 77},
}
_TITLES = {"t5": "T5", "qwen3": "Qwen3", "qwen2.5-vl": "Qwen2.5-VL"}


@dataclass(frozen=True)
class _Family:
    """What belongs to a transformer.

    Attributes:
        prefix: of its pipeline.
        texts: of its text encoders, the kind and the class that the pipeline takes (empty: as the kind has it).
        vae: the kind of its autoencoder.
        scale: what is said of the latents besides.
    """

    prefix: str
    texts: tuple[tuple[str, str], ...]
    vae: str = "kl"
    scale: Mapping[str, float] = field(default_factory=lambda: _FLUX_SCALE)


_FAMILIES = {
    "flux1": _Family("Flux", (("clip", _CLIP), ("t5", ""))),
    "sd3": _Family(
        "StableDiffusion3",
        (("clip", _PROJECTED), ("clip", _PROJECTED), ("t5", "")),
        scale={"scaling_factor": 1.5305, "shift_factor": 0.0609},
    ),
    "chroma": _Family("Chroma", (("t5", ""),)),
    "z-image": _Family("ZImage", (("qwen3", "Qwen3Model"),)),
    "flux2": _Family("Flux2Klein", (("qwen3", "Qwen3ForCausalLM"),), "kl-flux2", {}),
    "qwen-image": _Family("QwenImage", (("qwen2.5-vl", ""),), "kl-qwen", {}),
}


def split_model(
    transformer: Path | None, text_encoders: Sequence[Path], vae: Path | None, tokenizer: Path | None
) -> Path:
    """A folder for these files, as a diffusers folder is one; the same for the same files.

    Raises:
        BadInputError: a file is not given.
        CheckpointError: one cannot be used, or is of another model.
    """
    if transformer is None or vae is None or not text_encoders:
        missing = [
            name
            for name, given in (("--transformer", transformer), ("--text-encoder", text_encoders), ("--vae", vae))
            if not given
        ]
        raise BadInputError(f"{' and '.join(missing)} missing: a model of split files takes all of its parts")
    model = split_file(transformer, "transformer")
    family = _FAMILIES[model.kind]
    texts = _texts(model, family, [split_file(path, "text encoder") for path in text_encoders])
    decoder = split_file(vae, "vae")
    if decoder.kind != family.vae:
        raise CheckpointError(f"{vae} is the autoencoder of another model than {transformer}, a {family.prefix}")
    parts = {"transformer": model, **texts, "vae": decoder}
    configs = {name: dict(part.config) for name, part in parts.items()}
    configs["vae"] |= family.scale
    tokenizers = _tokenizers(family, tokenizer)
    return _laid_out(parts, configs, tokenizers, family, model)


def _names(count: int, what: str) -> list[str]:
    return [what if number == 1 else f"{what}_{number}" for number in range(1, count + 1)]


def _texts(model: SplitFile, family: _Family, found: list[SplitFile]) -> dict[str, SplitFile]:
    """The text encoders by the names that the pipeline has for them; of two CLIP the narrower is the first.

    Raises:
        CheckpointError: one is missing, or one too many.
    """
    left = sorted(found, key=lambda one: one.config.get("hidden_size", 0))
    made: dict[str, SplitFile] = {}
    for name, (kind, made_as) in zip(_names(len(family.texts), "text_encoder"), family.texts, strict=True):
        one = next((one for one in left if one.kind == kind), None)
        if one is None:
            wanted = ", ".join(kind for kind, _ in family.texts)
            raise CheckpointError(
                f"{model.path}, a {family.prefix}, takes text encoders of the kinds {wanted}: one of {kind} is "
                "missing; give each with --text-encoder"
            )
        left.remove(one)
        made[name] = replace(one, config=one.config | ({"architectures": [made_as]} if made_as else {}))
    if left:
        raise CheckpointError(f"{left[0].path}, a {left[0].kind}, is no part of {model.path}, a {family.prefix}")
    return made


def _tokenizers(family: _Family, folder: Path | None) -> dict[str, Path | None]:
    """By name the folder of each tokenizer, None for CLIP's, which is shipped.

    Raises:
        BadInputError: it is needed and was not given, or is none.
    """
    names = _names(len(family.texts), "tokenizer")
    foreign = [kind for kind, _ in family.texts if kind != "clip"]
    title = _TITLES[foreign[0]]
    if folder is None:
        raise BadInputError(
            f"such files hold no tokenizer: give the folder of {title}'s with --tokenizer (that of any diffusers "
            "folder which reads prompts with it)"
        )
    known = ("tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.json")
    if not any((folder / name).is_file() for name in known):
        raise BadInputError(f"--tokenizer {folder} is no folder of a tokenizer: it has none of {', '.join(known)}")
    return {
        name: None if kind == "clip" else folder.resolve() for name, (kind, _) in zip(names, family.texts, strict=True)
    }


def _laid_out(
    parts: Mapping[str, SplitFile],
    configs: Mapping[str, dict[str, Any]],
    tokenizers: Mapping[str, Path | None],
    family: _Family,
    model: SplitFile,
) -> Path:
    facts = [(name, str(part.path.resolve()), *_stamp(part.path)) for name, part in parts.items()]
    index: dict[str, Any] = {"_class_name": f"{family.prefix}Pipeline", **_options(model)}
    scheduler = _scheduler(model)
    said = json.dumps([facts, index, scheduler, configs, {name: str(path) for name, path in tokenizers.items()}])
    digest = hashlib.sha256(said.encode()).hexdigest()[:16]
    above = cache_folder() or Path(tempfile.gettempdir()) / f"sd-lowvram-{os.getpid()}"
    folder = above / "models" / f"{model.path.stem.replace('.', '_')}-{digest}"
    if (folder / "model_index.json").is_file():
        return folder
    try:
        for name, part in parts.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            write_json(configs[name], folder / name / "config.json")
            _link(folder / name / (_GGUF_LINK if part.is_gguf else _LINK), part.path.resolve())
        for name, path in tokenizers.items():
            if path is None:
                (folder / name).mkdir(exist_ok=True)
                write_tokenizer(_CLIP_TOKENIZERS[name], folder / name)
            else:
                _link(folder / name, path)
        (folder / "scheduler").mkdir(exist_ok=True)
        write_json(scheduler, folder / "scheduler" / "scheduler_config.json")
        write_json(index, folder / "model_index.json")  # the last: a folder that has it is whole
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be laid out: {error.strerror or error}") from error
    return folder


def _stamp(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns


def _link(place: Path, target: Path) -> None:
    if not place.is_symlink():
        place.symlink_to(target, target_is_directory=target.is_dir())


def _options(model: SplitFile) -> dict[str, bool]:
    """What the pipeline is made with; a header does not tell a distilled model from its base, its name does."""
    return {"is_distilled": "base" not in model.path.stem.lower()} if model.kind == "flux2" else {}


def _scheduler(model: SplitFile) -> dict[str, Any]:
    schnell = model.kind == "flux1" and not model.config["guidance_embeds"]
    return schedulers_of_transformers()["flux1-schnell" if schnell else model.kind]


def is_split(folder: Path) -> bool:
    """Whether a folder is one that :func:`split_model` has laid out."""
    return weights_of(folder / "transformer").is_symlink()


def weights_of(part: Path) -> Path:
    """The link to its weights in the folder of a part."""
    blocks = part / _GGUF_LINK
    return blocks if blocks.is_symlink() else part / _LINK
