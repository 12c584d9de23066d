"""Checks of tokenizers: transformers 5 makes one of two to four words where the vocabulary is missing, and every prompt
then reads alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

_SPARE_ROWS = 1024
"""Rows of an encoder's table that may be without a word: tables are padded, and special words come and go."""

_FEWEST = 16
"""Words that any tokenizer knows besides special ones, such as letters."""

_CLIP_TOKENS = 77

_CONTENT = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }} {% else %}"
    "{% for part in message['content'] %}{{ part['text'] }} {% endfor %}{% endif %}{% endfor %}"
)
"""Chat template without words of its own, so that the longest prompt stays the longest."""

_BYTE_PAIRS = (("tokenizer.json",), ("vocab.json", "merges.txt"))
_VOCABULARIES = {"clip": _BYTE_PAIRS, "qwen": _BYTE_PAIRS, "t5": (("tokenizer.json",), ("spiece.model",))}
"""Sets of files that form a vocabulary, one set a row, by the beginning of an encoder's class name."""


def check_tokenizer_files(folder: Path, encoder: Mapping[str, Any]) -> None:
    """Look at the files of the tokenizer in ``folder``, before anything is loaded.

    Args:
        encoder: the configuration of the text encoder that reads what the tokenizer makes.

    Raises:
        CheckpointError: one is missing or damaged, or there are fewer words than the encoder needs.
    """
    kind = _kind(encoder)
    if kind is None:
        return
    files = _VOCABULARIES[kind]
    missing = [[name for name in row if not (folder / name).is_file()] for row in files]
    if all(missing):
        raise CheckpointError(
            f"the tokenizer in {folder} lacks its vocabulary: {', or '.join(' and '.join(row) for row in missing)} is "
            "missing; download the folder again"
        )
    if kind == "clip" and not (folder / "tokenizer_config.json").is_file():
        raise CheckpointError(
            f"the tokenizer in {folder} lacks tokenizer_config.json, which states the length of a prompt; download the "
            "folder again"
        )
    file = folder / next(row for row, gone in zip(files, missing, strict=True) if not gone)[0]
    if file.suffix == ".json":
        _check_words(_words_in(file), encoder, folder)


def check_tokenizer(tokenizer: Any, encoder: Mapping[str, Any], folder: Path) -> None:
    """Look at a tokenizer as it was loaded from ``folder``.

    Args:
        encoder: the configuration of the text encoder that reads what the tokenizer makes.

    Raises:
        CheckpointError: it knows fewer words than its encoder needs, states no length of a prompt, or has no template
            of a chat where prompts are put as one.
    """
    named, kind = _class_of(encoder), _kind(encoder)
    if kind is None or tokenizer is None:
        return
    plain = len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens))
    _check_words(len(tokenizer) if plain >= _FEWEST else plain, encoder, folder)
    longest = int(encoder.get("max_position_embeddings", _CLIP_TOKENS))
    if kind == "clip" and tokenizer.model_max_length > longest:
        raise CheckpointError(
            f"the tokenizer in {folder} makes prompts of {tokenizer.model_max_length} tokens where its encoder reads "
            f"{longest}: tokenizer_config.json is missing or of another model; download the folder again"
        )
    if named.startswith(("qwen3model", "qwen3for")) and not tokenizer.chat_template:
        raise CheckpointError(
            f"the tokenizer in {folder} lacks the template of a chat, as which prompts are put: tokenizer_config.json "
            "or chat_template.jinja is missing; download the folder again"
        )


def _class_of(encoder: Mapping[str, Any]) -> str:
    return str((encoder.get("architectures") or [encoder.get("model_type")])[0]).lower()


def _kind(encoder: Mapping[str, Any]) -> str | None:
    return next((kind for kind in _VOCABULARIES if _class_of(encoder).startswith(kind)), None)


def _check_words(count: int, encoder: Mapping[str, Any], folder: Path) -> None:
    rows = (encoder.get("text_config") or encoder).get("vocab_size")
    if not isinstance(rows, int) or max(rows - _SPARE_ROWS, _FEWEST) <= count <= rows + _SPARE_ROWS:
        return
    files = ", or ".join(" and ".join(row) for row in _VOCABULARIES[str(_kind(encoder))])
    raise CheckpointError(
        f"the tokenizer in {folder} knows {count} words, and its encoder reads {rows}: its vocabulary ({files}) is "
        "missing, damaged or of another model; download the folder again"
    )


def _words_in(file: Path) -> int:
    """Number of words in a vocabulary.

    Raises:
        CheckpointError: the file cannot be read, or lacks the pairs of which words consist.
    """
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        if file.name != "tokenizer.json":
            count, merges = len(dict(table)), file.with_name("merges.txt")
            if count > _SPARE_ROWS and merges.stat().st_size < count:
                raise ValueError(f"{merges} has too few merges")
            return count
        words = table["model"]["vocab"]
        added = [token for token in table.get("added_tokens") or () if token["content"] not in words]
        if table["model"].get("type") == "BPE" and not table["model"].get("merges") and len(words) > _SPARE_ROWS:
            raise ValueError("it has no merges")
        return len(words) + len(added)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as the vocabulary of a tokenizer: {error}") from error


def stand_in(part: str) -> Any:
    """Return a tokenizer that makes one token of each word, for a pipeline that is planned without its own.

    Args:
        part: its name in the pipeline; a "processor" takes words by name and holds its tokenizer.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    numbers = {word: number for number, word in enumerate((*special.values(), "<|image_pad|>"))}
    words = Tokenizer(models.WordLevel(numbers, special["unk_token"]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=_CONTENT, **special)
    return _Processor(made) if part == "processor" else made


class _Processor:
    """A stand-in for a model's processor, which reads prompts only."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, **options: Any) -> Any:
        return self.tokenizer(**options)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        return self.tokenizer.apply_chat_template([conversation], **options)
