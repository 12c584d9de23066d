"""A model from the files that ComfyUI's users have: one of its transformer, one of each text encoder, one of its VAE.

They are laid out as a diffusers folder in the cache, with configurations from their headers and, in place of
weights, a table of the files' paths; all that takes a folder takes them so. Nothing is copied or linked: Windows and
many disks allow no symbolic links.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..cache import folder_of, make_private
from ..errors import BadInputError, CheckpointError
from ..files import write_json
from .architectures import schedulers_of_transformers, write_tokenizer
from .split_kinds import Layout, SplitFile, layout_of, split_file, split_files_in
from .tokenizers import check_tokenizer_files

_TABLE = "split.json"
"""The name of the file that holds the paths of the parts; only folders that are laid out here have it."""

_LONGEST_NAME = 60
_AGAIN = "name the files of the model again, with --transformer and the options of its parts"

_FLUX_SCALE = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
_CLIP, _PROJECTED = "CLIPTextModel", "CLIPTextModelWithProjection"
_CLIP_TOKENIZERS = {
    "tokenizer": {"pad_token": "<|endoftext|>", "model_max_length": 77},
    "tokenizer_2": {"pad_token": "!", "model_max_length": 77},
}
_TITLES = {"t5": "T5", "qwen3": "Qwen3", "qwen2.5-vl": "Qwen2.5-VL"}


@dataclass(frozen=True)
class _Family:
    """The parts that belong to a transformer.

    Attributes:
        prefix: beginning of the class name of its pipeline.
        texts: kind of each text encoder, and the class that the pipeline requires (empty: the kind's own).
        widths: functions from the text encoders' configurations to the widths of the text, by the names of these
            widths in the transformer's configuration.
        vae: the kind of its autoencoder.
        scale: further facts on the latents.
    """

    prefix: str
    texts: tuple[tuple[str, str], ...]
    widths: Mapping[str, Callable[[Mapping[str, Mapping[str, Any]]], int]]
    vae: str = "kl"
    scale: Mapping[str, float] = field(default_factory=lambda: _FLUX_SCALE)


def _projection_width(texts: Mapping[str, Mapping[str, Any]]) -> int:
    return sum(int(config["projection_dim"]) for config in texts.values() if "projection_dim" in config)


def _wide(name: str, key: str, times: int = 1) -> Callable[[Mapping[str, Mapping[str, Any]]], int]:
    """The width of what a text encoder makes, or of so many of its layers together."""
    return lambda texts: times * int(texts[name].get("text_config", texts[name])[key])


_FAMILIES = {
    "flux1": _Family(
        "Flux",
        (("clip", _CLIP), ("t5", "")),
        {
            "pooled_projection_dim": _wide("text_encoder", "hidden_size"),
            "joint_attention_dim": _wide("text_encoder_2", "d_model"),
        },
    ),
    "sd3": _Family(
        "StableDiffusion3",
        (("clip", _PROJECTED), ("clip", _PROJECTED), ("t5", "")),
        {"pooled_projection_dim": _projection_width, "joint_attention_dim": _wide("text_encoder_3", "d_model")},
        scale={"scaling_factor": 1.5305, "shift_factor": 0.0609},
    ),
    "chroma": _Family("Chroma", (("t5", ""),), {"joint_attention_dim": _wide("text_encoder", "d_model")}),
    "z-image": _Family("ZImage", (("qwen3", "Qwen3Model"),), {"cap_feat_dim": _wide("text_encoder", "hidden_size")}),
    "flux2": _Family(
        "Flux2Klein",
        (("qwen3", "Qwen3ForCausalLM"),),
        {"joint_attention_dim": _wide("text_encoder", "hidden_size", 3)},
        "kl-flux2",
        {},
    ),
    "qwen-image": _Family(
        "QwenImage", (("qwen2.5-vl", ""),), {"joint_attention_dim": _wide("text_encoder", "hidden_size")}, "kl-qwen"
    ),
}


def split_model(
    transformer: Path | None, text_encoders: Sequence[Path], vae: Path | None, tokenizer: Path | None
) -> Path:
    """Return a folder that stands for split files like a diffusers folder; the same files give the same folder.

    Args:
        transformer: file of the transformer.
        text_encoders: files of the text encoders, in any order.
        vae: file of the VAE.
        tokenizer: folder of the tokenizer; None: the included one.

    Raises:
        BadInputError: a file is not given.
        CheckpointError: a file cannot be used, or is of another model.
    """
    if transformer is None or vae is None or not text_encoders:
        missing = [
            name
            for name, path in (("--transformer", transformer), ("--text-encoder", text_encoders), ("--vae", vae))
            if not path
        ]
        raise BadInputError(f"{' and '.join(missing)} missing: a model of split files takes all of its parts")
    model = split_file(transformer, "transformer")
    family = _FAMILIES[model.kind]
    read = [file for path in text_encoders for file in split_files_in(path, "text encoder")]
    texts = _texts(model, family, list({(file.path.resolve(), file.prefix): file for file in read}.values()))
    decoder = split_file(vae, "vae")
    if decoder.kind != family.vae:
        raise CheckpointError(f"{vae} is the autoencoder of another model than {transformer}, a {family.prefix}")
    if decoder.latents != model.latents:
        raise CheckpointError(
            f"{vae} decodes latents of {decoder.latents} channels, and {transformer}, a {family.prefix}, makes "
            f"{model.latents}: it is the autoencoder of another model; give the one of {family.prefix} with --vae"
        )
    parts = {"transformer": model, **texts, "vae": decoder}
    configs = {name: dict(part.config) for name, part in parts.items()}
    configs["vae"] |= family.scale
    tokenizers = _tokenizers(family, tokenizer, texts)
    return _lay_out(parts, configs, tokenizers, family, model)


def _names(count: int, what: str) -> list[str]:
    return [what if number == 1 else f"{what}_{number}" for number in range(1, count + 1)]


def _texts(model: SplitFile, family: _Family, files: list[SplitFile]) -> dict[str, SplitFile]:
    """The text encoders by the names that the pipeline has for them; of two CLIP the narrower is the first.

    Raises:
        CheckpointError: one is missing, or one too many.
    """
    left = sorted(files, key=lambda file: file.config.get("hidden_size", 0))
    parts: dict[str, SplitFile] = {}
    for name, (kind, made_as) in zip(_names(len(family.texts), "text_encoder"), family.texts, strict=True):
        text = next((file for file in left if file.kind == kind), None)
        if text is None:
            wanted = ", ".join(kind for kind, _ in family.texts)
            raise CheckpointError(
                f"{model.path}, a {family.prefix}, takes text encoders of the kinds {wanted}: one of {kind} is "
                "missing; give each with --text-encoder"
            )
        left.remove(text)
        parts[name] = replace(text, config=text.config | ({"architectures": [made_as]} if made_as else {}))
    if left:
        raise CheckpointError(f"{left[0].path}, a {left[0].kind}, is not part of {model.path}, a {family.prefix}")
    configs = {name: part.config for name, part in parts.items()}
    for name, width in family.widths.items():
        if model.config[name] != width(configs):
            raise CheckpointError(
                f"{model.path}, a {family.prefix}, takes text of width {model.config[name]} ({name}), and the text "
                f"encoders that were given make {width(configs)}: give those of this model with --text-encoder"
            )
    return parts


def _tokenizers(family: _Family, folder: Path | None, texts: Mapping[str, SplitFile]) -> dict[str, Path | None]:
    """Folder of each tokenizer by name; None for CLIP's, which is shipped.

    Raises:
        BadInputError: a required tokenizer was not given, or the folder is not a tokenizer.
        CheckpointError: its vocabulary is missing, or belongs to another model.
    """
    names = _names(len(family.texts), "tokenizer")
    foreign = [kind for kind, _ in family.texts if kind != "clip"]
    title = _TITLES[foreign[0]]
    if folder is None:
        raise BadInputError(
            f"such files hold no tokenizer: give the folder of {title}'s with --tokenizer (that of any diffusers "
            "folder which reads prompts with it)"
        )
    vocabularies = ("tokenizer.json", "tokenizer_config.json", "spiece.model", "vocab.json")
    if not any((folder / name).is_file() for name in vocabularies):
        raise BadInputError(
            f"--tokenizer {folder} is not a folder of a tokenizer: it has none of {', '.join(vocabularies)}"
        )
    check_tokenizer_files(folder, next(part.config for part in texts.values() if part.kind != "clip"))
    return {
        name: None if kind == "clip" else folder.resolve() for name, (kind, _) in zip(names, family.texts, strict=True)
    }


def _lay_out(
    parts: Mapping[str, SplitFile],
    configs: Mapping[str, dict[str, Any]],
    tokenizers: Mapping[str, Path | None],
    family: _Family,
    model: SplitFile,
) -> Path:
    table = {
        "parts": {name: _row(part) for name, part in parts.items()},
        "tokenizers": {name: str(path) for name, path in tokenizers.items() if path is not None},
    }
    stamps = [part.path.stat().st_mtime_ns for part in parts.values()]
    index: dict[str, Any] = {"_class_name": f"{family.prefix}Pipeline", **_options(model)}
    scheduler = _scheduler(model)
    said = json.dumps([table, stamps, index, scheduler, configs])
    digest = hashlib.sha256(said.encode()).hexdigest()[:16]
    name = f"{model.path.stem.replace('.', '_')[:_LONGEST_NAME]}-{digest}"
    files: dict[str, Any] = {f"{name}/config.json": config for name, config in configs.items()}
    files |= {"scheduler/scheduler_config.json": scheduler, _TABLE: table}
    files["model_index.json"] = index  # the last: a folder that has it is whole
    shipped = [name for name, path in tokenizers.items() if path is None]
    cache = folder_of("models")
    if cache is not None:
        with contextlib.suppress(OSError):  # a cache that cannot be written
            return _write(cache / name, files, shipped)
    try:
        return _write(_temporary() / name, files, shipped)
    except OSError as error:
        raise CheckpointError(
            f"the parts of {model.path} cannot be laid out as a folder, in the cache or in {tempfile.gettempdir()}: "
            f"{error.strerror or error}; name a folder that can be written with SD_LOWVRAM_CACHE"
        ) from error


def _write(folder: Path, files: Mapping[str, Any], tokenizers: Sequence[str]) -> Path:
    """``folder`` with these files and CLIP's ``tokenizers``; written anew where something else is there.

    Raises:
        OSError: it cannot be written.
    """
    if all(_holds(folder / name, content) for name, content in files.items()):
        return folder
    for place in (*tokenizers, *(name.rpartition("/")[0] for name in files)):
        make_private(folder / place)
    for name in tokenizers:
        write_tokenizer(_CLIP_TOKENIZERS[name], folder / name)
    for name, content in files.items():
        write_json(content, folder / name)
    return folder


def _holds(file: Path, content: Any) -> bool:
    try:
        return file.is_file() and json.loads(file.read_text(encoding="utf-8")) == json.loads(json.dumps(content))
    except (OSError, ValueError, RecursionError):
        return False


@functools.cache
def _temporary() -> Path:
    """A folder that only the user can read, until the program ends."""
    folder, owner = Path(tempfile.mkdtemp(prefix="sd-lowvram-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not at the end of a fork
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _row(part: SplitFile) -> dict[str, Any]:
    path = part.path.resolve()
    return {"file": str(path), "bytes": path.stat().st_size, "mark": part.layout.mark, "prefix": part.prefix}


def _options(model: SplitFile) -> dict[str, bool]:
    """Options of the pipeline. A distilled model and its base have equal headers, so the file's name decides."""
    return {"is_distilled": "base" not in model.path.stem.lower()} if model.kind == "flux2" else {}


def _scheduler(model: SplitFile) -> dict[str, Any]:
    schnell = model.kind == "flux1" and not model.config["guidance_embeds"]
    return schedulers_of_transformers()["flux1-schnell" if schnell else model.kind]


def is_split(folder: Path) -> bool:
    """True if :func:`split_model` has laid out the folder."""
    return (folder / _TABLE).is_file()


class Weights(NamedTuple):
    """Place of a part's weights: the file, the layout of its names, and their prefix."""

    path: Path
    layout: Layout
    prefix: str


def weights_of(part: Path) -> Weights:
    """Place of the weights of the part with this folder.

    Raises:
        CheckpointError: the file was moved or replaced, or the folder cannot be read.
    """
    table = _table(part.parent)
    try:
        row = table["parts"][part.name]
        weights = Weights(Path(row["file"]), layout_of(row["mark"]), str(row["prefix"]))
        held = int(row["bytes"])
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise CheckpointError(f"{part.parent / _TABLE} is damaged: {_AGAIN}") from error
    if not weights.path.is_file() or weights.path.stat().st_size != held:
        what = "was changed" if weights.path.is_file() else "is no longer there"
        raise CheckpointError(f"{weights.path}, the {part.name} of {part.parent}, {what}: {_AGAIN}")
    return weights


def tokenizers_of(folder: Path) -> dict[str, Path]:
    """The folders of the tokenizers of a folder that is laid out, by their names.

    Raises:
        CheckpointError: one was moved.
    """
    folders = {name: Path(path) for name, path in _table(folder).get("tokenizers", {}).items()}
    for name, path in folders.items():
        if not path.is_dir():
            raise CheckpointError(f"{path}, the {name} of {folder}, is no longer there: {_AGAIN}")
    return folders | {place.name: place for place in folder.glob("tokenizer*")}


def _table(folder: Path) -> dict[str, Any]:
    try:
        table = json.loads((folder / _TABLE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / _TABLE} cannot be read ({error}): {_AGAIN}") from error
    return table if isinstance(table, dict) else {}
