"""Tokenizers that lack something: refused before a picture is made, as every prompt would read alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import split_models
from tokenizers import Tokenizer, models

from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.checkpoints.split_files import split_model
from sd_lowvram.checkpoints.tokenizers import check_tokenizer_files
from sd_lowvram.errors import CheckpointError

Change = Callable[[Path], None]


def without(*names: str) -> Change:
    """Remove files of a tokenizer."""

    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)

    return change


def emptied(folder: Path) -> None:
    """Leave a vocabulary of no words but the special ones."""
    file = folder / "tokenizer.json"
    table = json.loads(file.read_text(encoding="utf-8"))
    special = {one["content"]: one["id"] for one in table["added_tokens"]}
    table["model"] |= {"merges": []} if "merges" in table["model"] else {}
    words = table["model"]["vocab"]
    table["model"]["vocab"] = special if isinstance(words, dict) else [one for one in words if one[0] in special]
    file.write_text(json.dumps(table), encoding="utf-8")


def cut(folder: Path) -> None:
    """Leave the first half of a vocabulary's file."""
    file = folder / "tokenizer.json"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt", "spiece.model")
CHANGES: dict[str, tuple[Change, str]] = {
    "no vocabulary": (without(*VOCABULARY), "lacks its vocabulary: tokenizer.json, or "),
    "nothing but special words": (emptied, "knows . words"),
    "half a file": (cut, "tokenizer.json cannot be read as the vocabulary"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By family a diffusers folder, and split files next to it."""
    known: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in known:
            known[family] = tmp_path_factory.mktemp(family)
            pipe = getattr(split_models, family)()
            split_models.save(pipe, known[family] / "folder")
            split_models.write(pipe, family, known[family] / "files")
        return known[family]

    return make


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("family", "name"), [("flux1", "tokenizer_2"), ("z_image", "tokenizer"), ("qwen_image", "tokenizer")]
)
def test_a_folders_tokenizer_without_its_words_is_refused(
    family: str, name: str, change: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    damage, message = CHANGES[change]
    folder = Path(shutil.copytree(saved(family) / "folder", tmp_path / "folder"))
    damage(folder / name)
    with pytest.raises(CheckpointError, match=message) as told:
        load_pipeline(folder)
    assert str(folder / name) in str(told.value)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", ["flux1", "z_image", "qwen_image"])
def test_a_tokenizer_of_split_files_without_its_words_is_refused(
    family: str, change: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    damage, message = CHANGES[change]
    given = options(saved(family) / "files")
    given["tokenizer"] = Path(shutil.copytree(given["tokenizer"], tmp_path / "tokenizer"))
    split_model(**given)
    damage(given["tokenizer"])
    with pytest.raises(CheckpointError, match=message) as told:
        load_pipeline(split_model(**given))
    assert str(given["tokenizer"]) in str(told.value)


def options(files: Path) -> dict[str, Any]:
    """Arguments of :func:`split_model` for a folder of split files."""
    texts = sorted(files.glob("text_encoder*"))
    parts = {name: files / f"{name}.safetensors" for name in ("transformer", "vae")}
    return {**parts, "text_encoders": texts, "tokenizer": files / "tokenizer"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "model"
    load_pipeline(None).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without(*VOCABULARY), r"tokenizer\.json, .*vocab\.json and merges\.txt"),
        (without("tokenizer_config.json"), "tokenizer_config.json"),
        (emptied, r"\d words"),
    ],
)
def test_clips_tokenizer_without_a_file_is_refused(damage: Change, message: str, demo: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo, tmp_path / "model"))
    damage(folder / "tokenizer")
    with pytest.raises(CheckpointError, match=message):
        load_pipeline(folder)


CLIP = {"architectures": ["CLIPTextModel"], "vocab_size": 49408}
T5 = {"architectures": ["T5EncoderModel"], "vocab_size": 32128}
QWEN = {"architectures": ["Qwen3Model"], "vocab_size": 151936}


def test_merges_belong_to_a_vocabulary_of_pairs(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({str(number): number for number in range(151643)}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*merges\.txt"):
        check_tokenizer_files(tmp_path, QWEN)
    (tmp_path / "merges.txt").touch()
    with pytest.raises(CheckpointError, match="has too few merges"):
        check_tokenizer_files(tmp_path, QWEN)
    (tmp_path / "merges.txt").write_text("a b\n" * 151387)
    check_tokenizer_files(tmp_path, QWEN)


@pytest.mark.parametrize(("words", "encoder"), [(32100, QWEN), (49408, T5), (3, T5), (32100, CLIP)])
def test_a_vocabulary_of_another_model_is_refused(words: int, encoder: dict[str, Any], tmp_path: Path) -> None:
    def write(count: int) -> None:
        table = [("<unk>", 0.0), *((f"w{number}", -1.0) for number in range(count - 1))]
        Tokenizer(models.Unigram(table, unk_id=0)).save(str(tmp_path / "tokenizer.json"))

    (tmp_path / "tokenizer_config.json").write_text("{}")
    write(words)
    with pytest.raises(CheckpointError, match=rf"{words} words, .*{encoder['vocab_size']}"):
        check_tokenizer_files(tmp_path, encoder)
    write({32128: 32100, 49408: 49408, 151936: 151669}[encoder["vocab_size"]])
    check_tokenizer_files(tmp_path, encoder)


@pytest.mark.parametrize("family", ["z_image", "flux2"])
def test_prompts_that_are_put_as_a_chat_need_its_template(
    family: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    given = options(saved(family) / "files")
    given["tokenizer"] = Path(shutil.copytree(given["tokenizer"], tmp_path / "tokenizer"))
    (given["tokenizer"] / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="lacks the template of a chat"):
        load_pipeline(split_model(**given))
