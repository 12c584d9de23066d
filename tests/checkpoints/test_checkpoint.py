"""Loading models from disk: single files of every kind, diffusers folders, and files that must be refused."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small import narrow, save_single_file, single_file_state

from sd_lowvram import doors
from sd_lowvram.checkpoints import architectures, inspection
from sd_lowvram.checkpoints.architectures import build_components, vocabulary
from sd_lowvram.checkpoints.inspection import detect
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.checkpoints.safetensors_header import Header, TensorEntry, read_header
from sd_lowvram.errors import BadInputError, CheckpointError


@pytest.fixture
def small_world(monkeypatch):
    """Single files are read with narrow architectures of a small vocabulary."""
    monkeypatch.setattr(inspection, "architecture", lambda name: narrow(name, vocabulary=49408))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Name -> models and their single file, made once."""
    folder = tmp_path_factory.mktemp("single")
    made = {}

    def make(name: str):
        if name not in made:
            models = build_components(narrow(name, vocabulary=49408), torch.float16)
            made[name] = models, save_single_file(models, folder / f"{name}.safetensors")
        return made[name]

    return make


def equal_weights(loaded: torch.nn.Module, original: torch.nn.Module) -> None:
    theirs = original.state_dict()
    assert loaded.state_dict().keys() == theirs.keys()
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, theirs[key]), key


@pytest.mark.parametrize("name", ["sd15", "sd21", "sdxl"])
def test_single_file_round_trip(small_world, made, name):
    models, path = made(name)
    pipe = load_pipeline(path, dtype=torch.float16)
    for component, model in models.items():
        equal_weights(getattr(pipe, component), model)
    assert type(pipe).__name__ == architectures.architecture(name)["pipeline"] + "Pipeline"
    assert pipe.tokenizer("a red apple").input_ids == [49406, 320, 736, 3055, 49407]
    second = getattr(pipe, "tokenizer_2", None) or pipe.tokenizer
    assert second.pad_token == ("<|endoftext|>" if name == "sd15" else "!")


@pytest.mark.parametrize(("task", "kind"), [("txt2img", ""), ("img2img", "Img2Img"), ("inpaint", "Inpaint")])
def test_tasks(small_world, made, tmp_path, task, kind):
    _, path = made("sd15")
    single = load_pipeline(path, task)
    assert type(single).__name__ == f"StableDiffusion{kind}Pipeline"
    assert single.unet.dtype == torch.float32
    load_pipeline(path).save_pretrained(tmp_path / "folder")
    folder = load_pipeline(tmp_path / "folder", task)
    assert type(folder).__name__ == f"StableDiffusion{kind}Pipeline"
    equal_weights(folder.unet, single.unet)


def test_sd2_prediction(small_world, made, tmp_path):
    models = copy.deepcopy(made("sd21")[0])
    bias = models["unet"].up_blocks[3].attentions[2].transformer_blocks[0].norm1.bias
    for spread, prediction in ((0.2, "v_prediction"), (0.02, "epsilon")):
        torch.nn.init.normal_(bias, std=spread, generator=torch.Generator().manual_seed(0))
        path = save_single_file(models, tmp_path / "sd2.safetensors")
        assert load_pipeline(path).scheduler.config.prediction_type == prediction
    assert load_pipeline(path, prediction="v_prediction").scheduler.config.prediction_type == "v_prediction"


def test_base_and_768_differ_in_size():
    kind = inspection.CheckpointKind("sd21")
    assert inspection.single_file_config(kind, "epsilon")["unet"]["sample_size"] == 64
    assert inspection.single_file_config(kind, "v_prediction")["unet"]["sample_size"] == 96


def test_sdxl_that_says_it_predicts_v(small_world, made, tmp_path):
    _, path = None, save_single_file(made("sdxl")[0], tmp_path / "v.safetensors", v_pred=torch.zeros(0))
    assert load_pipeline(path).scheduler.config.prediction_type == "v_prediction"


@pytest.mark.parametrize("gone", ["input_blocks.4.", "output_blocks.11.", "middle_block."])
def test_a_unet_without_one_of_its_blocks_is_refused(small_world, made, tmp_path, monkeypatch, gone):
    """Where nobody else knows such a UNet."""
    monkeypatch.setattr(doors, "UNETS", {})
    state = single_file_state(made("sd15")[0])
    path = tmp_path / "damaged.safetensors"
    save_file({key: value for key, value in state.items() if f"diffusion_model.{gone}" not in key}, path)
    with pytest.raises(CheckpointError, match="blocks do not go together"):
        load_pipeline(path)


def test_a_class_that_nobody_knows_is_told():
    with pytest.raises(CheckpointError, match=r"Foreign2DModel.*diffusers"):
        build_components({"unet": {"_class_name": "Foreign2DModel"}}, only=("unet",))


def test_pickle_is_refused_then_read_without_running_it(small_world, made, tmp_path):
    models, _ = made("sd15")
    path = tmp_path / "model.ckpt"
    torch.save({"state_dict": single_file_state(models)}, path)
    with pytest.raises(CheckpointError, match=r"pickle.*--allow-pickle"):
        load_pipeline(path)
    equal_weights(load_pipeline(path, dtype=torch.float16, allow_pickle=True).unet, models["unet"])


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def test_pickle_that_runs_a_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Evil()}, "evil.ckpt")
    with pytest.raises(CheckpointError, match="cannot be loaded safely"):
        load_pipeline("evil.ckpt", allow_pickle=True)
    assert not Path("ran").exists()


def test_folder_with_pickles_only(small_world, made, tmp_path):
    _, path = made("sd15")
    load_pipeline(path).save_pretrained(tmp_path / "folder", safe_serialization=False)
    with pytest.raises(CheckpointError, match="pickle"):
        load_pipeline(tmp_path / "folder")
    assert load_pipeline(tmp_path / "folder", allow_pickle=True).unet.dtype == torch.float32


def test_folder_of_the_fp16_variant(small_world, made, tmp_path):
    models, path = made("sd15")
    load_pipeline(path, dtype=torch.float16).save_pretrained(tmp_path / "folder", variant="fp16")
    equal_weights(load_pipeline(tmp_path / "folder", dtype=torch.float16).unet, models["unet"])


def test_folder_with_a_truncated_part(small_world, made, tmp_path):
    _, path = made("sd15")
    load_pipeline(path).save_pretrained(tmp_path / "folder")
    weights = tmp_path / "folder" / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"vae.*truncated"):
        load_pipeline(tmp_path / "folder")


def test_a_file_with_other_layers(made):
    """The single file says nothing of its widths: diffusers takes those of the full model."""
    with pytest.raises(CheckpointError, match=r"\[\d.*\[.*diffusers"):
        load_pipeline(made("sd15")[1])


def test_missing_things(tmp_path):
    with pytest.raises(CheckpointError, match="no model at"):
        load_pipeline(tmp_path / "nothing.safetensors")
    with pytest.raises(CheckpointError, match="never fetched"):
        load_pipeline("somebody/some-model")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"model_index.json \(it.*notes.txt\)"):
        load_pipeline(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    with pytest.raises(CheckpointError, match="WanPipeline"):
        load_pipeline(tmp_path)
    (tmp_path / "model_index.json").write_text("[")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_pipeline(tmp_path)


def write_raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


F16 = {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        ({"a": F16}, b"x" * 5, None, "truncated"),
        ({"a": F16}, b"x" * 20, None, "follow its last tensor"),
        ({"a": F16}, b"x" * 12, 10**6, "truncated"),
        ({"a": F16}, b"x" * 12, 2**60, "announces a header"),
        ({"a": F16, "b": {**F16, "data_offsets": [6, 18]}}, b"x" * 18, None, "does not begin where"),
        ({"a": {**F16, "data_offsets": [4, 16]}}, b"x" * 16, None, "does not begin where"),
        ({"a": {**F16, "data_offsets": [12, 0]}}, b"x" * 12, None, "does not take"),
        ({"a": {**F16, "shape": [2, 4]}}, b"x" * 12, None, "does not take"),
        ({"a": {**F16, "shape": [-2, -3]}}, b"x" * 12, None, "whole numbers"),
        ({"a": {**F16, "shape": [2.0, 3]}}, b"x" * 12, None, "whole numbers"),
        ({"a": {**F16, "dtype": "F17"}}, b"x" * 12, None, "F17"),
        ({"a": {"dtype": "F16"}}, b"", None, "cannot be understood"),
        ({"a": 3}, b"", None, "cannot be understood"),
        ([], b"", None, "cannot be understood"),
        (b'{"a": {}, "a": {}}', b"", None, "twice"),
        (b"[" * 100000, b"", None, "cannot be understood"),
        (b"\xff\xfe{}", b"", None, "cannot be understood"),
        (b"", b"", None, "cannot be understood"),
    ],
)
def test_hostile_headers(tmp_path, header, data, length, message):
    path = write_raw(tmp_path / "m.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=message):
        load_pipeline(path)


def test_files_that_are_no_safetensors(tmp_path):
    for content in (b"", b"abc", b"\x80\x02}q\x00." * 100, b"<!doctype html><html>" * 20):
        (tmp_path / "m.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError):
            load_pipeline(tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path)


def test_good_header(tmp_path):
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(0), "c": torch.zeros((), dtype=torch.bool)}, tmp_path / "m")
    header = read_header(tmp_path / "m")
    assert header.shape("a") == (3, 5) and header.shape("none") == ()
    assert (tmp_path / "m").stat().st_size == header.data_offset + max(e.end for e in header.tensors.values())


def meta_header(name: str) -> Header:
    state = single_file_state(build_components(narrow(name), torch.float16, "meta"))
    return Header({key: TensorEntry("F16", tuple(value.shape), 0, 0) for key, value in state.items()}, {}, 0)


def without(header: Header, prefix: str) -> Header:
    return Header({k: v for k, v in header.tensors.items() if not k.startswith(prefix)}, {}, 0)


def no_read(name: str) -> float:
    raise AssertionError(f"{name} was read")


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_detect_needs_no_weights(name):
    assert detect(meta_header(name), Path("m"), no_read) == inspection.CheckpointKind(name)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [("first_stage_model.", "without VAE"), ("cond_stage_model.", "without text encoder")],
)
def test_a_part_is_missing(prefix, message):
    with pytest.raises(CheckpointError, match=message):
        detect(without(meta_header("sd15"), prefix), Path("m"), no_read)


def test_inpainting_file(small_world, tmp_path):
    config = narrow("sd15", vocabulary=49408)
    config["unet"]["in_channels"] = 9
    path = save_single_file(build_components(config, torch.float16), tmp_path / "inpaint.safetensors")
    assert load_pipeline(path, "inpaint").unet.config.in_channels == 9
    with pytest.raises(CheckpointError, match="inpainting model"):
        load_pipeline(path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["lora_unet_down_blocks_0.lora_down.weight"], "LoRA"),
        (["double_blocks.0.img_attn.qkv.weight"], "FLUX.*--transformer"),
        (["down_blocks.0.resnets.0.conv1.weight"], "one diffusers component"),
        (["banana"], "banana"),
    ],
)
def test_other_kinds_are_named(tmp_path, names, message):
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_pipeline(tmp_path / "m.safetensors")


def test_vocabulary():
    tokens = vocabulary()
    assert len(tokens) == 49408 and sorted(tokens.values()) == list(range(49408))
    # Numbers that every user of CLIP knows by their effect.
    assert {word: tokens[word + "</w>"] for word in ("a", "photo", "of", "cat")} == {
        "a": 320,
        "photo": 1125,
        "of": 539,
        "cat": 2368,
    }


@pytest.mark.parametrize(
    ("name", "unet", "texts"),
    [
        ("sd15", 859_520_964, [123_060_480]),
        ("sd21", 865_910_724, [340_387_840]),
        ("sdxl", 2_567_463_684, [123_060_480, 694_659_840]),
    ],
)
def test_architectures_have_the_published_sizes(name, unet, texts):
    models = build_components(name, device="meta")
    counts = {component: sum(p.numel() for p in model.parameters()) for component, model in models.items()}
    assert counts["unet"] == unet and counts["vae"] == 83_653_863
    assert [counts[text] for text in ("text_encoder", "text_encoder_2") if text in counts] == texts


def test_unknown_architecture():
    with pytest.raises(BadInputError, match="sd15, sd21, sdxl"):
        build_components("sd16")
