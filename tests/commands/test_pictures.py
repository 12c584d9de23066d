"""PNG files: the parameters inside, the place checked before, whole or not at all."""

from __future__ import annotations

import errno
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from infotext import parse_parameters
from PIL import Image

from sd_lowvram.commands import pictures
from sd_lowvram.commands.pictures import check_writable, output_paths, parameters_text, save_picture
from sd_lowvram.errors import OutputError

VALUES = {"Steps": 20, "Sampler": "Euler a", "CFG scale": 7, "Seed": 1, "Size": "512x512", "Model": "sd"}


def test_the_text_that_the_webui_writes():
    text = parameters_text("a red apple", "blurry, dark", VALUES | {"Plan": "a=1, b: 2", "Nothing": None})
    assert text == (
        "a red apple\nNegative prompt: blurry, dark\n"
        'Steps: 20, Sampler: Euler a, CFG scale: 7, Seed: 1, Size: 512x512, Model: sd, Plan: "a=1, b: 2"'
    )
    assert parameters_text("x", "", {"Steps": 1}) == "x\nSteps: 1"


def test_reading_back():
    text = parameters_text("two\nlines", "no\nlines", VALUES | {"Plan": 'said "hi", left:\nnow \\'})
    prompt, negative, values = parse_parameters(text)
    assert (prompt, negative) == ("two\nlines", "no\nlines")
    assert values == {**{key: str(value) for key, value in VALUES.items()}, "Plan": 'said "hi", left:\nnow \\'}


def test_a_prompt_alone():
    assert parse_parameters("just a prompt, with: colon") == ("just a prompt, with: colon", "", {})


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1).filter(lambda t: t == t.strip()))
def test_any_value_survives(value):
    if value[0] == '"' and value[-1] == '"':
        return  # the WebUI takes it for one that was quoted
    text = parameters_text("p", "", VALUES | {"Last one": value})
    assert parse_parameters(text)[2].get("Last one") == value


@pytest.mark.parametrize("prompt", ["a red apple", "ein Äpfelchen", "红苹果 🍎"])
def test_saved_and_read_by_others(tmp_path, prompt):
    path = tmp_path / "a.png"
    text = parameters_text(prompt, "", VALUES)
    assert save_picture(Image.new("RGB", (16, 8), "red"), path, text) == path
    with Image.open(path) as image:
        assert image.size == (16, 8) and image.text["parameters"] == text
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def interrupt(monkeypatch, error: BaseException) -> None:
    """Let ``error`` come when the picture has been written and has not its name yet."""

    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(pictures.os, "fsync", fail)


def test_interrupted_while_writing(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"before")
    interrupt(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        save_picture(Image.new("RGB", (8, 8)), tmp_path / "a.png", "x")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.png", b"before")]


def test_disk_full_while_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures.tempfile, "gettempdir", lambda: str(tmp_path / "nowhere"))
    interrupt(monkeypatch, OSError(errno.ENOSPC, "No space left"))
    with pytest.raises(OutputError, match="free some space"):
        save_picture(Image.new("RGB", (8, 8)), tmp_path / "a.png", "x")
    assert list(tmp_path.rglob("*")) in ([], [tmp_path / "nowhere"])


def test_a_finished_picture_is_not_lost(tmp_path, monkeypatch):
    """A file took the folder's place while the picture was made."""
    (tmp_path / "gone").touch()
    rescue = tmp_path / "rescue"
    rescue.mkdir()
    monkeypatch.setattr(pictures.tempfile, "gettempdir", lambda: str(rescue))
    with pytest.raises(OutputError, match="rescue"):
        save_picture(Image.new("RGB", (8, 8)), tmp_path / "gone" / "a.png", "x")
    (saved,) = rescue.iterdir()
    with Image.open(saved) as image:
        assert image.size == (8, 8)


def test_symbolic_links_are_written_through(tmp_path):
    (tmp_path / "real.png").touch()
    (tmp_path / "link.png").symlink_to(tmp_path / "real.png")
    save_picture(Image.new("RGB", (8, 8)), tmp_path / "link.png", "x")
    assert (tmp_path / "link.png").is_symlink() and (tmp_path / "real.png").stat().st_size > 0


def test_check_leaves_nothing_behind(tmp_path):
    (tmp_path / "there").mkdir()
    for folder in ("a/b", "there", "there/c"):
        check_writable(tmp_path / folder / "c.png", 1000)
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
    saved = save_picture(Image.new("RGB", (8, 8)), tmp_path / "a" / "b" / "c.png", "x")
    assert saved.is_file()


def test_check_finds_what_cannot_work(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        check_writable(tmp_path / "file" / "a.png", 1000)
    with pytest.raises(OutputError, match="not a regular file"):
        check_writable(tmp_path, 1000)
    with pytest.raises(OutputError, match=r"free and .* needed"):
        check_writable(tmp_path / "a.png", 1 << 60)

    def refuse(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(pictures.os, "posix_fallocate", refuse, raising=False)
    with pytest.raises(OutputError, match="quota"):
        check_writable(tmp_path / "a.png", 1000)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_names(tmp_path):
    assert output_paths(str(tmp_path / "x.png"), 1, 7) == [tmp_path / "x.png"]
    assert output_paths(str(tmp_path / "x.png"), 2, 7) == [tmp_path / "x-1.png", tmp_path / "x-2.png"]
    (tmp_path / "00009-1.png").touch()
    assert [path.name for path in output_paths(str(tmp_path), 2, 7)] == ["00010-7.png", "00011-8.png"]
    assert [path.name for path in output_paths(None, 1, 7, tmp_path / "new")] == ["00000-7.png"]
    assert output_paths(f"{tmp_path}/new/", 1, 7) == [tmp_path / "new" / "00000-7.png"]
    with pytest.raises(OutputError, match=r"\.png"):
        output_paths(str(tmp_path / "x.jpg"), 1, 7)
