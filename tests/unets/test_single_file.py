"""Single files of smaller UNets: what is written loads again, bit for bit, and what a file cannot hold is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import narrow, save_single_file, single_file_state
from typer.testing import CliRunner

from sd_lowvram.checkpoints import inspection
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.checkpoints.safetensors_header import read_header
from sd_lowvram.cli import app
from sd_lowvram.errors import CheckpointError
from sd_lowvram.unets.checkpoints.load_stored import load_as_stored
from sd_lowvram.unets.checkpoints.save import save_pipeline
from sd_lowvram.unets.checkpoints.unet_layout import CutLayout, layout_of_names
from sd_lowvram.unets.cuts import recorded_layers

UNET = "model.diffusion_model."
LAYERS = {"base": [1, 1, 1, 1], "small": [1, 1, 1, 1], "tiny": [1, 1, 1], "M2": [1, 1, 2, 2]}


@pytest.fixture(autouse=True)
def small_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "architecture", lambda name: narrow(name, vocabulary=49408))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name -> the single file of a whole model."""
    made: dict[str, str] = {}

    def make(name: str) -> str:
        if name not in made:
            file = tmp_path_factory.mktemp("whole") / f"{name}.safetensors"
            made[name] = str(save_single_file(build_components(narrow(name, 49408), torch.float16), file))
        return made[name]

    return make


def told(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["unet", *arguments])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def cut_to(kind: str, model: str, out: Path) -> Path:
    if kind != "M2":
        told("unet", "prune", "--model", model, "--kind", kind, "--out", str(out))
        return out
    base = out.with_name("base")
    if not base.exists():
        cut_to("base", model, base)
    told("unet", "combine", "--model", model, "--compressed", str(base), "--out", str(out))
    return out


def drawn(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    text = pipe.text_encoder(torch.arange(154).reshape(2, 77))[0]
    options = {"num_inference_steps": 2, "output_type": "np", "width": 64, "height": 64}
    given = {"prompt_embeds": text[:1], "negative_prompt_embeds": text[1:]}
    return pipe(**given, generator=torch.Generator().manual_seed(1), **options).images


@pytest.mark.parametrize(("name", "kind"), [*(("sd15", kind) for kind in LAYERS), ("sd21", "M2")])
def test_a_cut_model_loads_from_its_file_as_from_its_folder(name: str, kind: str, whole: Any, tmp_path: Path) -> None:
    file = cut_to(kind, whole(name), tmp_path / "cut.safetensors")
    folder = cut_to(kind, whole(name), tmp_path / "cut")
    assert {entry.dtype for entry in read_header(file).tensors.values()} == {"F16"}
    pipes = [load_pipeline(path, dtype=torch.float16) for path in (file, folder)]
    for part in ("unet", "vae", "text_encoder"):
        ours, theirs = (getattr(pipe, part).state_dict() for pipe in pipes)
        assert ours.keys() == theirs.keys() and len(ours) > 30
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    configs = [pipe.unet.config for pipe in pipes]
    assert recorded_layers(configs[0]) == recorded_layers(configs[1]) and recorded_layers(configs[0])[0] == [2, 2, 2, 2]
    assert [len(block.resnets) for block in pipes[0].unet.down_blocks] == LAYERS[kind]
    assert (pipes[0].unet.mid_block is None) == (kind in ("small", "tiny"))
    assert pipes[0].scheduler.config.prediction_type == pipes[1].scheduler.config.prediction_type
    pictures = [drawn(load_pipeline(path, dtype=torch.float32)) for path in (file, folder)]
    # equal weights at other places in memory: torch's kernels for a CPU round apart
    assert abs(pictures[0] - pictures[1]).max() < 2e-5 and pictures[0].std() > 0.01
    left = {path.name for path in tmp_path.iterdir()}
    assert left - {"base"} == {"cut", "cut.safetensors"}


def blocks_of(file: Path) -> dict[str, str]:
    """What each numbered block of a file consists of: r(esidual), t(ransformer), d(own), u(p)."""
    kinds = {"in_layers": "r", "transformer_blocks": "t", "op": "d", "conv": "u"}
    found: dict[str, dict[str, str]] = {}
    for key in read_header(file).tensors:
        side, _, rest = key.removeprefix(UNET).partition(".")
        if key.startswith(UNET) and side in ("input_blocks", "output_blocks", "middle_block"):
            number, place, kind = rest.split(".")[:3] if side != "middle_block" else ["", *rest.split(".")[:2]]
            if kind in kinds:
                found.setdefault(side[:3] + number, {})[place] = kinds[kind]
    return {block: "".join(parts[place] for place in sorted(parts)) for block, parts in found.items()}


def test_blocks_are_numbered_by_the_layers_that_are_left(whole: Any, tmp_path: Path) -> None:
    base = {"inp1": "rt", "inp2": "d", "inp3": "rt", "inp4": "d", "inp5": "rt", "inp6": "d", "inp7": "r"}
    base |= {"mid": "rtr", "out0": "r", "out1": "ru", "out2": "rt", "out3": "rtu", "out4": "rt", "out5": "rtu"}
    base |= {"out6": "rt", "out7": "rt"}
    mixed = {"inp1": "rt", "inp2": "d", "inp3": "rt", "inp4": "d", "inp5": "rt", "inp6": "rt", "inp7": "d"}
    mixed |= {"inp8": "r", "inp9": "r", "mid": "rtr", "out0": "r", "out1": "r", "out2": "ru", "out3": "rt"}
    mixed |= {"out4": "rt", "out5": "rtu", "out6": "rt", "out7": "rtu", "out8": "rt", "out9": "rt"}
    least = {"inp1": "rt", "inp2": "d", "inp3": "rt", "inp4": "d", "inp5": "rt", "out0": "rt", "out1": "rtu"}
    least |= {"out2": "rt", "out3": "rtu", "out4": "rt", "out5": "rt"}
    for kind, blocks in (("base", base), ("M2", mixed), ("tiny", least)):
        assert blocks_of(cut_to(kind, whole("sd15"), tmp_path / f"{kind}.safetensors")) == blocks, kind


def test_a_file_is_analysed_planned_and_cut_again(whole: Any, tmp_path: Path) -> None:
    file = str(cut_to("base", whole("sd15"), tmp_path / "base.safetensors"))
    found = told("unet", "analyse", "--model", file, "--dry-run", "--gpu", "rtx2070")
    names = [unit["name"] for unit in found["units"]]
    assert "dn0.0.res" in names and "dn0.1.res" not in names
    size = ["--width", "64", "--height", "64"]
    peaks = [told("plan", "--model", one, *size)["predicted"]["weights_bytes"] for one in (file, whole("sd15"))]
    assert peaks[0] < peaks[1]
    again = told("unet", "prune", "--model", file, "--drop", "mid", "--out", str(tmp_path / "again.safetensors"))
    assert again["parameters"] < again["before"]["parameters"] == found["parameters"]
    assert load_pipeline(again["out"]).unet.mid_block is None


def test_a_whole_model_is_written_as_other_programs_write_it(whole: Any, tmp_path: Path) -> None:
    """The other writer of the names is diffusers' reader, which loads the file without help of ours."""
    out = tmp_path / "same.safetensors"
    save_pipeline(load_as_stored(whole("sd15")), out)
    given, written = load_file(whole("sd15")), load_file(out)
    assert given.keys() == written.keys() and all(torch.equal(given[key], written[key]) for key in given)


def with_changed_unet(whole: str, folder: Path, **values: Any) -> str:
    pipe = load_pipeline(whole)
    pipe.save_pretrained(folder)
    config = folder / "unet" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **values}))
    return str(folder)


def test_what_a_file_cannot_hold_is_refused_before_anything_is_loaded(whole: Any, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "new.safetensors")]
    base = ["prune", "--model", whole("sd15"), "--kind", "base", *out]
    assert "(CondConv)" in refused(*base, "--experts", "2")
    assert "(GRI)" in refused(*base, "--regions", "16")
    assert re.search(r"768.*SD1\.x", refused("prune", "--drop", "mid", *out))
    heads = with_changed_unet(whole("sd15"), tmp_path / "heads", attention_head_dim=4)
    assert re.search("attention_head_dim.*unet.*4", refused("prune", "--model", heads, "--drop", "mid", *out))
    xl = whole("sdxl")
    assert "this model is SDXL" in refused("prune", "--model", xl, "--kind", "base", *out)
    taken = [*base[:-1], whole("sd15")]
    assert "is there already: name a new file" in refused(*taken)
    assert "would be a pickle" in refused(*base[:-1], str(tmp_path / "new.ckpt"))
    student = str(cut_to("base", whole("sd15"), tmp_path / "student"))
    distil = ["distil", "--student", student, "--data", str(tmp_path), "--teacher", whole("sd15")]
    assert "is there already" in refused(*distil, "--out", whole("sd15"))
    assert "width of their text" in refused(*distil[:2], str(inspection.DEMO), *distil[3:], *out)
    assert not (tmp_path / "new.safetensors").exists()


def damaged(file: Path, change: Any) -> Path:
    state = {key: tensor for key, tensor in load_file(file).items() if not change(key.removeprefix(UNET))}
    made = file.with_name("damaged.safetensors")
    save_file(state, made)
    return made


def test_a_damaged_file_is_refused_by_name(whole: Any, tmp_path: Path) -> None:
    file = cut_to("base", whole("sd15"), tmp_path / "base.safetensors")
    with pytest.raises(CheckpointError, match="blocks do not go together"):
        load_pipeline(damaged(file, lambda key: key.startswith("input_blocks.4.")))
    with pytest.raises(CheckpointError, match="blocks do not go together"):
        load_pipeline(damaged(file, lambda key: key.startswith("output_blocks.")))
    with pytest.raises(CheckpointError, match=r"lacks 1 weight .*out_layers\.3\.bias"):
        load_pipeline(damaged(file, lambda key: key == "input_blocks.3.0.out_layers.3.bias"))
    save_file(load_file(file), tmp_path / "note.safetensors", {"sd_lowvram.kept_layers": "{"})
    with pytest.raises(CheckpointError, match="kept_layers"):
        load_pipeline(tmp_path / "note.safetensors")


def test_a_cut_model_loads_from_a_pickle(whole: Any, tmp_path: Path) -> None:
    file, pickle = cut_to("base", whole("sd15"), tmp_path / "base.safetensors"), tmp_path / "base.ckpt"
    torch.save({"state_dict": load_file(file)}, pickle)
    loaded, wanted = (load_pipeline(path, allow_pickle=True).unet.state_dict() for path in (pickle, file))
    assert all(torch.equal(loaded[name], weight) for name, weight in wanted.items())


def test_sdxl_with_layers_cut_is_refused_by_name(whole: Any, tmp_path: Path) -> None:
    config = narrow("sdxl", 49408)
    config["unet"]["layers_per_block"] = 1
    file = save_single_file(build_components(config, torch.float16), tmp_path / "xl.safetensors")
    with pytest.raises(CheckpointError, match="SDXL with layers cut out"):
        load_pipeline(file)


def test_layers_are_counted_from_names() -> None:
    models = build_components(narrow("sd15"), device="meta")
    names = [key.removeprefix(UNET) for key in single_file_state(models) if key.startswith(UNET)]
    assert layout_of_names(names) == CutLayout((2, 2, 2, 2))
    assert layout_of_names([name for name in names if "middle" not in name]) == CutLayout((2, 2, 2, 2), mid=False)
    assert layout_of_names([]) is None
    assert layout_of_names([*names, "output_blocks.12.0.in_layers.0.weight"]) is None


def test_a_disk_that_fills_leaves_nothing(whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def full(state: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"begun")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    out = tmp_path / "base.safetensors"
    result = CliRunner().invoke(app, ["unet", "prune", "--model", whole("sd15"), "--kind", "base", "--out", str(out)])
    assert result.exit_code == 2 and "No space left" in result.output and not [*tmp_path.iterdir()]
