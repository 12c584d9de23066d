"""Models of split files, as ComfyUI's users have them: the picture of the diffusers folder, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import split_models
import torch
from command_line import MAIN
from diffusers.quantizers.gguf import utils
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter, dequantize_gguf_tensor
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.checkpoints.meta_model import meta_components
from sd_lowvram.checkpoints.split_files import split_model
from sd_lowvram.errors import BadInputError, CheckpointError
from sd_lowvram.kernels.scaled import ScaledLinear
from sd_lowvram.streaming.mapped_files import MappedFiles
from sd_lowvram.weight_parts import is_gguf

SIZE = ("--width", 64, "--height", 64, "--steps", 2, "--seed", 5, "--device", "cpu", "--vram", "2GB")
FAMILIES = list(split_models.TRANSFORMERS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[str]]]:
    """By family the place of a folder and of split files of one model, and the options that give the latter."""
    known: dict[str, tuple[Path, list[str]]] = {}

    def make(family: str) -> tuple[Path, list[str]]:
        if family not in known:
            place = tmp_path_factory.mktemp(family)
            pipe = getattr(split_models, family)()
            split_models.save(pipe, place / "folder")
            known[family] = place, split_models.write(pipe, family, place / "files")
        return known[family]

    return make


def given(options: list[str], **others: Path | None) -> dict[str, Any]:
    """What the options say, for :func:`split_model`."""
    told: dict[str, Any] = {"text_encoders": []}
    for name, value in zip(options[::2], options[1::2], strict=True):
        if name == "--text-encoder":
            told["text_encoders"].append(Path(value))
        else:
            told[name[2:]] = Path(value)
    return told | others


@pytest.mark.slow(15)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_has_the_weights_and_the_bits_of_the_folder(family: str, made: Callable[..., Any]) -> None:
    place, options = made(family)
    folder = split_model(**given(options))
    assert folder == split_model(**given(options))
    wanted, found = load_pipeline(place / "folder"), load_pipeline(folder)
    planned = meta_components(str(folder), torch.float32)
    for name, part in wanted.components.items():
        if isinstance(part, nn.Module):
            states = [one.state_dict() for one in (part, found.components[name], planned[name])]
            assert states[0].keys() == states[1].keys() == states[2].keys()
            assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())
            assert all(tensor.shape == states[2][key].shape for key, tensor in states[0].items())
    told = [
        {name: one.scheduler.config[name] for name in one.scheduler.config if name[0] != "_"} for one in (wanted, found)
    ]
    assert told[0] == told[1]
    first, second = (aligned_picture(one) for one in (wanted, found))
    assert (first == second).all()


def aligned_picture(pipe: Any) -> Any:
    """A picture, computed with weights at addresses that are alike: by how they lie in a mapped file, matrix kernels of
    processors sum in another order."""
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            for weight in part.parameters():
                weight.data = weight.data.clone()
    pipe.set_progress_bar_config(disable=True)
    seed = torch.Generator().manual_seed(3)
    return numpy.asarray(
        pipe(prompt="a cat", width=64, height=64, num_inference_steps=2, generator=seed, output_type="np").images
    )


@pytest.mark.slow(8)
@pytest.mark.parametrize("family", ["flux1", "qwen_image"])
def test_a_process_of_its_own_makes_the_folders_picture(
    family: str, made: Callable[..., Any], forked: Any, tmp_path: Path
) -> None:
    place, options = made(family)
    assert call("generate", "a cat", "--model", place / "folder", "-o", tmp_path / "a.png", *SIZE).exit_code == 0
    split = forked(MAIN, "generate", "a cat", *options, "-o", "b.png", *SIZE, "--json", folder=tmp_path)
    assert split.returncode == 0, split.stderr
    assert near(tmp_path / "a.png", tmp_path / "b.png")


def near(one: Path, other: Path) -> bool:
    """Whether two pictures are the same but for the last bits of how their files are mapped."""
    a, b = (numpy.asarray(Image.open(file)).astype(int) for file in (one, other))
    return bool(abs(a - b).max() <= 1 and abs(a - b).mean() < 0.01)


def call(*arguments: object) -> Any:
    """The command line in this process."""
    from typer.testing import CliRunner

    from sd_lowvram.cli import app

    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_weights_in_8_bits_are_loaded_and_planned_as_they_are(made: Callable[..., Any], tmp_path: Path) -> None:
    _, options = made("flux1")
    state = load_file(given(options)["transformer"])
    eight = {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}
    for name, tensor in state.items():
        if "_blocks." in name and tensor.dim() == 2:
            scale = tensor.abs().max() / 448
            eight |= {name: (tensor / scale).to(torch.float8_e4m3fn), name[:-7] + ".scale_weight": scale}
    save_file(state | eight, tmp_path / "flux.safetensors")
    folder = split_model(**given(options, transformer=tmp_path / "flux.safetensors"))
    plain, scaled = (load_pipeline(one).transformer for one in (split_model(**given(options)), folder))
    planned = meta_components(str(folder), torch.float32, ("transformer",))["transformer"]
    kept = [module for module in scaled.modules() if isinstance(module, ScaledLinear)]
    assert len(kept) == len([module for module in planned.modules() if isinstance(module, ScaledLinear)]) == 40
    query, wanted = (one.single_transformer_blocks[1].attn.to_k for one in (scaled, plain))
    x = torch.randn(3, query.in_features)
    assert (query(x) - wanted(x)).norm() < 0.05 * wanted(x).norm()
    taken = [sum(tensor.nbytes for tensor in (*one.parameters(), *one.buffers())) for one in (plain, scaled, planned)]
    assert taken[1] <= taken[2] < 1.01 * taken[1] and taken[1] < taken[0] / 2


def write_gguf(state: dict[str, torch.Tensor], path: Path, kind: str) -> dict[str, torch.Tensor]:
    """Write weights as a GGUF file, its matrices in blocks of a ``kind``; returns what they are when widened."""
    writer = gguf.GGUFWriter(path, "any")
    wide = {}
    for name, tensor in state.items():
        blocks = tensor.dim() == 2 and tensor.shape[1] % 32 == 0
        known = gguf.GGMLQuantizationType[kind if blocks else "F32"]
        stored = gguf.quants.quantize(tensor.numpy(), known)
        writer.add_tensor(name.removeprefix("model.diffusion_model."), stored, raw_dtype=known)
        held = torch.from_numpy(stored)
        wide[name] = dequantize_gguf_tensor(GGUFParameter(held, quant_type=known)).float() if blocks else held
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wide


@pytest.mark.slow(15)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformer_in_gguf_is_loaded_and_planned_in_its_blocks(
    family: str, made: Callable[..., Any], tmp_path: Path
) -> None:
    _, options = made(family)
    told = given(options)
    wide = write_gguf(load_file(told["transformer"]), tmp_path / "small.gguf", "Q8_0")
    save_file(wide, tmp_path / "wide.safetensors")
    found, wanted = (
        split_model(**{**told, "transformer": tmp_path / name}) for name in ("small.gguf", "wide.safetensors")
    )
    blocks, plain = (load_pipeline(folder).transformer for folder in (found, wanted))
    planned = meta_components(str(found), torch.float32, ("transformer",))["transformer"]
    inner = {name: one for name, one in blocks.named_modules() if isinstance(one, GGUFLinear)}
    assert len(inner) > 20
    weights = dict(plain.named_parameters())
    for name, tensor in blocks.named_parameters():
        same = dequantize_gguf_tensor(tensor) if is_gguf(tensor) else tensor
        assert torch.equal(same, weights[name]), name
    taken = [sum(tensor.nbytes for tensor in (*one.parameters(), *one.buffers())) for one in (blocks, plain, planned)]
    assert taken[0] == taken[2] < taken[1] / 2
    mapped = MappedFiles()
    assert any(mapped.kind(one.weight) == "mapped" for one in inner.values())


def test_a_gguf_file_that_is_no_use_is_told(
    made: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = given(made("z_image")[1])
    state = load_file(told["transformer"])
    write_gguf(state, tmp_path / "whole.gguf", "Q4_0")
    whole = (tmp_path / "whole.gguf").read_bytes()
    wrong = {"cut.gguf": (whole[:5000], "truncated or damaged"), "tail.gguf": (whole[:-500], "truncated or damaged")}
    for name, (content, message) in wrong.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            split_model(**{**told, "transformer": tmp_path / name})
    with pytest.raises(CheckpointError, match="these are read of transformers"):
        split_model(**{**told, "vae": tmp_path / "whole.gguf"})
    monkeypatch.delitem(utils.dequantize_functions, gguf.GGMLQuantizationType.Q4_0)
    with pytest.raises(CheckpointError, match=r"Q4_0.*diffusers.*Q8_0"):
        split_model(**{**told, "transformer": tmp_path / "whole.gguf"})


def test_generate_takes_gguf(made: Callable[..., Any], tmp_path: Path) -> None:
    _, options = made("z_image")
    write_gguf(load_file(given(options)["transformer"]), tmp_path / "z.gguf", "Q8_0")
    place = options.index("--transformer") + 1
    done = call("generate", "a cat", *options[:place], tmp_path / "z.gguf", *options[place + 1 :],
                "-o", tmp_path / "z.png", *SIZE)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert Image.open(tmp_path / "z.png").size == (64, 64)


WRONG: dict[str, tuple[str, str]] = {
    "transformer": ("vae", "looks like FLUX.1, SD3, Z-Image and Chroma, a vae"),
    "vae": ("transformer", "looks like FLUX.1, a transformer"),
}


@pytest.mark.parametrize("role", WRONG)
def test_a_file_of_another_kind_is_named(role: str, made: Callable[..., Any]) -> None:
    _, options = made("flux1")
    told = given(options)
    with pytest.raises(CheckpointError, match=WRONG[role][1]):
        split_model(**{**told, role: told[WRONG[role][0]]})


def test_what_does_not_go_together_is_told(made: Callable[..., Any]) -> None:
    told, other = given(made("flux1")[1]), given(made("flux2")[1])
    with pytest.raises(CheckpointError, match="autoencoder of another model"):
        split_model(**{**told, "vae": other["vae"]})
    with pytest.raises(CheckpointError, match="t5 "):
        split_model(**{**told, "text_encoders": [path for path in told["text_encoders"] if "_2" not in path.name]})
    with pytest.raises(CheckpointError, match="is not part of"):
        split_model(**{**told, "text_encoders": [*told["text_encoders"], *other["text_encoders"]]})


@pytest.mark.parametrize(("missing", "message"), [("vae", "--vae"), ("tokenizer", "--tokenizer")])
def test_a_missing_part_is_asked_for(missing: str, message: str, made: Callable[..., Any]) -> None:
    with pytest.raises(BadInputError, match=message):
        split_model(**given(made("flux1")[1], **{missing: None}))


def test_a_folder_without_a_tokenizer_is_none(made: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="not a folder of a tokenizer"):
        split_model(**given(made("flux1")[1], tokenizer=tmp_path))


def test_a_file_that_lacks_weights_is_told(made: Callable[..., Any], tmp_path: Path) -> None:
    told = given(made("flux1")[1])
    text = next(path for path in told["text_encoders"] if "_2" in path.name)
    state = load_file(text)
    state.pop("encoder.block.1.layer.0.SelfAttention.q.weight")
    save_file(state, tmp_path / "t5.safetensors")
    others = [path for path in told["text_encoders"] if path != text]
    folder = split_model(**{**told, "text_encoders": [*others, tmp_path / "t5.safetensors"]})
    with pytest.raises(CheckpointError, match=r"1.*T5EncoderModel: .*SelfAttention\.q\.weight"):
        load_pipeline(folder)


def test_bad_input_has_its_exit_code_before_anything_is_loaded(made: Callable[..., Any], tmp_path: Path) -> None:
    _, options = made("flux1")
    told = given(options)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(told["transformer"].read_bytes()[:-100])
    shortened = [str(cut) if value == str(told["transformer"]) else value for value in options]
    wrong = {
        "is truncated": shortened,
        "exclude each other": [*options, "--model", "folder"],
        "--text-encoder and --vae missing": options[options.index("--transformer") :][:2],
        "--tokenizer": options[:-2],
    }
    for message, given_options in wrong.items():
        for command in (["generate", "a cat"], ["plan"]):
            done = call(*command, *given_options)
            assert done.exit_code == 2 and message in " ".join(done.output.split()), (message, done.output)


def test_plan_takes_them_too(made: Callable[..., Any]) -> None:
    _, options = made("flux1")
    done = call("plan", *options, "--width", 64, "--height", 64, "--vram", "1GB", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["stages"][-1]["component"] == "vae"
