"""The node pack as ComfyUI reads it: import by location, each node's contract, knobs as inputs, saved workflows."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from comfy_host import ROOT, import_pack

from sd_lowvram import Fidelity, Knob, Settings, doors, register
from sd_lowvram.errors import SettingsError
from sd_lowvram.settings import SURFACES, knobs

COMFYUI_DOES = {
    "precision",
    "channels_last",
    "inference_mode",
    "offload",
    "weights_mib",
    "split_layers",
    "weight_storage",
    "compile",
    "packed_weights",
}
"""Where weights are, their type and format, and the inference mode, as it keeps one set of them for all workflows; and
torch.compile, for which it has a node."""
IDS = {
    "LowVRAM",
    "LowVRAMSettings",
    "LowVRAMVAEDecode",
    "LowVRAMVAEEncode",
    "LowVRAMPlan",
    "LowVRAMReport",
}

OPEN = {"LowVRAM": 1, "LowVRAMVAEDecode": 1, "LowVRAMVAEEncode": 1, "LowVRAMPlan": 5, "LowVRAMReport": 0}
"""How many fields stand open in a node; in Low VRAM Settings all do, in other nodes at most five."""

doors.find()
NODES = sorted(IDS | set(doors.NODES))
WORKFLOWS = [
    path
    for path in sorted((ROOT / "example_workflows").glob("*.json"))
    if {*re.findall(r'"type": ?"(LowVRAM\w+)"', path.read_text(encoding="utf-8"))} <= {*NODES}
]


@pytest.fixture(scope="module")
def pack() -> Any:
    return import_pack(ROOT)


def inputs_of(node: Any) -> dict[str, Any]:
    groups = node.INPUT_TYPES()
    return {**groups["required"], **groups.get("optional", {})}


def widgets_of(node: Any) -> list[str]:
    """The inputs that a person sets, in the order in which a workflow saves them."""
    shown = {"INT", "FLOAT", "STRING", "BOOLEAN"}
    return [name for name, (kind, *_) in inputs_of(node).items() if isinstance(kind, list) or kind in shown]


def test_the_ids_stay(pack) -> None:
    assert sorted(pack.NODE_CLASS_MAPPINGS) == NODES == sorted(pack.NODE_DISPLAY_NAME_MAPPINGS)
    assert not hasattr(pack, "comfy_entrypoint")  # the host reads one contract of the two


@pytest.mark.parametrize("name", NODES)
def test_every_node_keeps_the_contract(pack, name) -> None:
    node = pack.NODE_CLASS_MAPPINGS[name]
    assert node.CATEGORY == "low-vram" and node.DESCRIPTION
    assert callable(getattr(node(), node.FUNCTION))
    assert all(isinstance(kind, str) for kind in node.RETURN_TYPES)
    assert len(getattr(node, "RETURN_NAMES", node.RETURN_TYPES)) == len(node.RETURN_TYPES)
    for field, (kind, *options) in inputs_of(node).items():
        default = options[0].get("default") if options else None
        if isinstance(kind, list):
            assert default in kind, field
        elif kind == "INT":
            assert options[0]["min"] <= default <= options[0]["max"], field
        if field in knobs():
            assert knobs()[field].help in options[0]["tooltip"]


def test_the_pack_leaves_the_hosts_modules_alone(tmp_path) -> None:
    """Linked under a name with a dot and a hyphen; no host, no diffusers and no search path are needed to read it."""
    host, folder = tmp_path / "host", tmp_path / "custom_nodes" / "sd-low.vram"
    host.mkdir()
    folder.parent.mkdir()
    folder.symlink_to(ROOT, target_is_directory=True)
    for name in ("nodes", "utils", "scripts"):
        (host / f"{name}.py").write_text("OWNER = 'host'\n")
    code = f"""
import sys
sys.path[:0] = [{str(host)!r}, {str(Path(__file__).parents[1] / "support")!r}]
from pathlib import Path
from comfy_host import import_pack
before = list(sys.path)
pack = import_pack(Path({str(folder)!r}))
assert pack.NODE_CLASS_MAPPINGS
errors = sys.modules[pack.__name__ + ".sd_lowvram.errors"]
assert str(errors.LowVRAMError("offload='layer': use Settings(offload='none')")) == "offload layer: use offload none"
assert str(errors.LowVRAMError("leave vae_tiles to the plan")) == 'leave "Decode in parts" to the plan'
import nodes, utils, scripts
assert nodes.OWNER == utils.OWNER == scripts.OWNER == "host"
assert sys.path == before
heavy = {{"diffusers", "transformers", "accelerate", "typer", "matplotlib", "comfy"}} & set(sys.modules)
assert not heavy, heavy
assert "sd_lowvram" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", knobs())
def test_every_knob_is_shown_where_it_says(pack, name) -> None:
    from sd_lowvram.commands.knobs import command_line_knobs
    from webui_ext.arguments import arguments

    shown = {
        "cli": name in command_line_knobs(),
        "node": any(name in inputs_of(node) for node in pack.NODE_CLASS_MAPPINGS.values()),
        "panel": name in {argument.name for argument in arguments()},
    }
    assert {surface for surface, there in shown.items() if there} == set(knobs()[name].surfaces)


def test_all_surfaces_show_all_but_what_comfyui_does_itself() -> None:
    """A knob that leaves a surface out is named here, or fails."""
    absent = {name: {"node"} for name in COMFYUI_DOES}
    absent |= {name: {"node", "panel"} for name in ("cuda_graphs", "traced")}
    absent["streamed_graphs"] = set(SURFACES)
    for name, knob in knobs().items():
        assert set(SURFACES) - set(knob.surfaces) == absent.get(name, set()), name


def test_a_node_asks_for_little(pack) -> None:
    for name, node in pack.NODE_CLASS_MAPPINGS.items():
        fields = len(widgets_of(node))
        assert name == "LowVRAMSettings" or (fields == OPEN[name] if name in OPEN else fields <= 5), name


def test_six_settings_are_in_sight_and_the_rest_is_folded(pack) -> None:
    shown = inputs_of(pack.NODE_CLASS_MAPPINGS["LowVRAMSettings"])
    assert len([name for name, (_, options) in shown.items() if not options.get("advanced")]) == 6


def test_nodes_are_found_by_what_people_look_for(pack) -> None:
    for node in pack.NODE_CLASS_MAPPINGS.values():
        assert {"vram", "memory", "out of memory", "offload", "budget", "low"} <= set(node.SEARCH_ALIASES)
    assert "tiled" in pack.NODE_CLASS_MAPPINGS["LowVRAMVAEDecode"].SEARCH_ALIASES


def test_the_knobs_are_grouped_and_named_for_people(pack) -> None:
    shown = inputs_of(pack.NODE_CLASS_MAPPINGS["LowVRAMSettings"])
    groups = [options["display_name"].split(" · ")[0] for _, options in shown.values()]
    assert list(dict.fromkeys(groups)) == ["Memory", "Step", "Other picture", "Picture"]
    assert not [options["display_name"] for _, options in shown.values() if "_" in options["display_name"]]
    assert len({options["display_name"] for _, options in shown.values()}) == len(shown)


def test_every_input_and_output_says_what_it_is(pack) -> None:
    for node in pack.NODE_CLASS_MAPPINGS.values():
        for name, (_, *options) in inputs_of(node).items():
            assert options and options[0]["tooltip"], name
        assert len(node.OUTPUT_TOOLTIPS) == len(node.RETURN_TYPES) and all(node.OUTPUT_TOOLTIPS)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"budget": ""}, True),
        ({"budget": "3.5 GiB"}, True),
        ({"budget": None}, True),  # what other nodes will give
        ({"budget": "banana"}, "'banana'"),
        ({"budget": "4"}, '"4GB"'),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_when_a_prompt_is_queued(pack, given, told) -> None:
    for name in ("LowVRAM", "LowVRAMPlan", "LowVRAMVAEDecode", "LowVRAMVAEEncode"):
        check = pack.NODE_CLASS_MAPPINGS[name].VALIDATE_INPUTS
        assert inspect.getfullargspec(check).args == ["cls", "budget"]  # the host marks every input that it names
        answer = check(**given)
        assert answer is True if told is True else told in answer


@pytest.mark.parametrize("table", sorted((ROOT / "locales").glob("*/nodeDefs.json")), ids=lambda path: path.parent.name)
def test_translations_are_of_nodes_and_fields_that_there_are(pack, table) -> None:
    """Names without a translation stay English. Fields in sight have a tooltip, without the page's placeholders."""
    known = json.loads(table.read_text(encoding="utf-8"))
    there = {name: node for name, node in pack.NODE_CLASS_MAPPINGS.items() if name in known}
    assert len(there) >= len(IDS) and known.keys() <= {*NODES, "LowVRAMUNetSchedule"}
    for name, node in there.items():
        assert known[name].keys() <= {"display_name", "description", "inputs"}
        translated, inputs = known[name].get("inputs", {}), inputs_of(node)
        in_sight = {field for field, (_, *options) in inputs.items() if not (options and options[0].get("advanced"))}
        assert in_sight <= translated.keys() <= inputs.keys()
        tips = [words["tooltip"] for words in translated.values()]
        assert all(tips) and not re.search("[{}|@]", "".join([known[name]["description"], *tips]))
        assert known[name]["display_name"] != pack.NODE_DISPLAY_NAME_MAPPINGS[name]


@pytest.mark.parametrize("name", NODES)
def test_every_node_has_a_help_page_that_names_its_inputs(pack, name) -> None:
    page = (ROOT / pack.WEB_DIRECTORY / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {pack.NODE_DISPLAY_NAME_MAPPINGS[name]}\n")
    for field in inputs_of(pack.NODE_CLASS_MAPPINGS[name]):
        assert field in knobs() or f"**{field}**" in page, field


def test_the_page_shows_what_nodes_tell(pack) -> None:
    script = (ROOT / pack.WEB_DIRECTORY / "lowvram.js").read_text(encoding="utf-8")
    telling = IDS - {"LowVRAMSettings"}
    assert {name for name in IDS if f"{name}:" in script} == telling
    imported = re.findall(r'from "(.*)"', script)
    assert imported == ["../../scripts/app.js"]  # all other modules are internal to the page


def answer_of_page(pack: Any, folder: Path, page: str) -> Any:
    """Return what the script ``page`` prints, run by Node.js with our page's script beside it."""
    script = (ROOT / pack.WEB_DIRECTORY / "lowvram.js").read_text(encoding="utf-8")
    (line,) = (line for line in script.splitlines() if line.startswith("import "))
    (folder / "page.mjs").write_text(script.replace(line, "const { app } = globalThis;"), encoding="utf-8")
    (folder / "run.mjs").write_text(page, encoding="utf-8")
    done = subprocess.run(["node", "run.mjs"], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js, which runs the page's script")
def test_settings_are_folded_and_saved_by_name(pack, tmp_path) -> None:
    """A workflow of before, without names, keeps what the page read by position; chosen ones are in sight.
    Nodes 2.0, which folds by itself, shows nothing that is hidden."""
    assert answer_of_page(pack, tmp_path, _SETTINGS_PAGE) == {
        "first": {"hidden": True, "button": "Advanced"},
        "saved": {"tiles": "exact", "attention": "auto"},
        "named": {"values": ["fast", "sliced"], "hidden": False, "button": "Fewer settings"},
        "unnamed": {"values": ["exact", "auto"], "hidden": True, "button": "Advanced"},
        "styles": [
            {"hidden": False, "unfolded": False},
            {"hidden": False, "unfolded": True},
            {"hidden": True, "unfolded": False},
        ],
    }


_SETTINGS_PAGE = """
const settings = new EventTarget();
globalThis.app = { ui: { settings }, registerExtension(made) { this.extension = made; } };
globalThis.LiteGraph = { vueNodesMode: false };
await import("./page.mjs");
class Node {
  comfyClass = "LowVRAMSettings";
  size = [1, 1];
  widgets = [
    { name: "tiles", value: "auto", options: {} },
    { name: "attention", value: "auto", options: { advanced: true } },
  ];
  addWidget(type, name, value, callback, options) {
    const widget = { type, name, value, callback, options };
    this.widgets.push(widget);
    return widget;
  }
  computeSize() { return [1, 1]; }
  setSize() {}
  setDirtyCanvas() {}
}
app.extension.beforeRegisterNodeDef(Node, { name: "LowVRAMSettings" });
const state = ({ widgets: [tiles, attention, button] }) => ({ hidden: attention.hidden, button: button.label });
const made = () => { const node = new Node(); app.extension.nodeCreated(node); return node; };
const node = made();
const first = state(node);
node.widgets[0].value = "exact";
const saved = { properties: {} };
node.onSerialize(saved);
const named = made();
named.onConfigure({ properties: { settings: { attention: "sliced", tiles: "fast", gone: 1 } } });
const unnamed = made();
unnamed.widgets[0].value = "exact";
unnamed.onConfigure({});
app.extension.setup();
const styles = [];
for (const [style, unfolded] of [[true, false], [true, true], [false, false]]) {
  node.showAdvanced = unfolded;
  settings.dispatchEvent(new Event("Comfy.VueNodes.Enabled.change"));
  LiteGraph.vueNodesMode = style;
  await new Promise((done) => setTimeout(done, 5));
  styles.push({ hidden: node.widgets[1].hidden, unfolded: node.showAdvanced });
}
const values = (one) => one.widgets.slice(0, 2).map((widget) => widget.value);
console.log(JSON.stringify({ first, saved: saved.properties.settings, named: { values: values(named), ...state(named) },
  unnamed: { values: values(unnamed), ...state(unnamed) }, styles }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js, which runs the page's script")
def test_a_refusal_takes_the_place_of_the_verdict_on_the_page(pack, tmp_path) -> None:
    """What the server answers when a workflow is queued, as the page keeps it, by the ids of nodes and of subgraphs."""
    assert answer_of_page(pack, tmp_path, _PAGE) == {
        "verdict": "budget '4' means MiB: write \"4GB\"",
        "inside": "budget 'banana' is not a size",
        "other": "fits",
        "queued": True,
    }


_PAGE = """
const made = (kind) => ({ comfyClass: kind, size: [1, 1], computeSize: () => [1, 1], setSize() {}, setDirtyCanvas() {},
  widgets: [{ name: "verdict", value: "fits" }] });
const [one, inside, other] = [made("LowVRAM"), made("LowVRAM"), made("KSampler")];
const graph = (nodes) => ({ getNodeById: (id) => nodes[id] });
globalThis.requestAnimationFrame = () => {};
globalThis.app = {
  graph: graph({ 3: one, 4: { subgraph: graph({ 7: inside }) }, 5: other }),
  registerExtension(made) { this.extension = made; },
  async queuePrompt(number) {
    const error = (details) => ({ errors: [{ message: "Custom validation failed for node", details }] });
    this.lastNodeErrors = {
      3: error(`budget - budget '4' means MiB: write "4GB"`),
      "4:7": error("budget - budget 'banana' is not a size"),
      5: error("steps"),
    };
    return number === 1;
  },
};
await import("./page.mjs");
app.extension.setup();
const queued = await app.queuePrompt(1);
const [verdict, within, kept] = [one, inside, other].map((node) => node.widgets[0].value);
console.log(JSON.stringify({ verdict, inside: within, other: kept, queued }));
"""


def test_inputs_become_settings(pack) -> None:
    module = sys.modules[pack.__name__ + ".nodes.inputs"]
    values = {"attention": "sliced", "attention_mib": 8, "deterministic": "on", "park_skips": "off", "vae_map": "auto"}
    read = module.settings_of({**values, "residual_strips": 0, "decoder_device": "auto"})
    expected = Settings(attention="sliced", attention_mib=8, deterministic=True, park_skips=False)
    assert read.as_dict() == expected.as_dict()
    with pytest.raises(Exception, match="magic") as raised:
        module.settings_of({"attention": "magic"})
    assert type(raised.value).__name__ == SettingsError.__name__


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_values_of_workflows_are_of_their_inputs(pack, path) -> None:
    workflow = json.loads(path.read_text(encoding="utf-8"))
    ours = [node for node in workflow["nodes"] if node["type"] in NODES]
    assert ours
    for node in ours:
        kinds = inputs_of(pack.NODE_CLASS_MAPPINGS[node["type"]])
        names = widgets_of(pack.NODE_CLASS_MAPPINGS[node["type"]])
        for name, value in zip(names, node["widgets_values"], strict=True):
            kind, options = kinds[name]
            assert value in kind if isinstance(kind, list) else isinstance(value, type(options["default"]))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_the_page_can_offer_the_models_of_a_workflow(path) -> None:
    """Its dialog for missing models goes by name, folder and address of each."""
    nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    loaders = [node for node in nodes if node["type"].endswith(("Loader", "LoaderSimple"))]
    for node in loaders:
        files = [value for value in node["widgets_values"] if value.endswith(".safetensors")]
        models = node["properties"].get("models", [])
        assert [model["name"] for model in models] in (files, []) and files
        for model in models:
            assert model.keys() == {"name", "url", "directory"} and model["url"].endswith("/" + model["name"])
            assert model["directory"] == _FOLDERS[node["type"]]
    assert [node for node in loaders if "models" not in node["properties"]] == [
        node
        for node in loaders
        if node["widgets_values"][0] == "v1-5-base.safetensors"  # which a person makes
    ]


_FOLDERS = {
    "CheckpointLoaderSimple": "checkpoints",
    "UNETLoader": "diffusion_models",
    "CLIPLoader": "text_encoders",
    "DualCLIPLoader": "text_encoders",
    "VAELoader": "vae",
}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_in_sight_as_it_opens(path) -> None:
    """The page opens it as large as it fits; at less than 65 % nobody reads it on a screen of 1280x720."""
    boxes = [(*node["pos"], *node["size"]) for node in json.loads(path.read_text(encoding="utf-8"))["nodes"]]
    wide = max(x + width for x, _, width, _ in boxes) - min(x for x, *_ in boxes)
    high = max(y + height for _, y, _, height in boxes) - min(y for _, y, *_ in boxes) + 30
    assert wide <= 1450 and high <= 850


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_node_of_a_workflow_covers_another(pack, path) -> None:
    """By the sizes that it was saved with: a title is 30 high, above the place of its node. Reports widen no node."""
    nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    script = (ROOT / pack.WEB_DIRECTORY / "lowvram.js").read_text(encoding="utf-8")
    (widths,) = (dict(re.findall(r"(\w+): (\d+)", line)) for line in script.splitlines() if "const WIDTHS" in line)
    for node in nodes:
        shown = re.search(rf'\b{node["type"]}: "(\w+)"', script)
        assert shown is None or node["size"][0] >= int(widths[shown[1]])
    boxes = [(x, y - 30, x + width, y + height) for (x, y), (width, height) in ((n["pos"], n["size"]) for n in nodes)]
    for number, (left, top, right, bottom) in enumerate(boxes):
        for others in boxes[number + 1 :]:
            assert right <= others[0] or others[2] <= left or bottom <= others[1] or others[3] <= top


def test_every_workflow_has_a_picture_for_the_list_of_templates() -> None:
    assert WORKFLOWS and all(path.with_suffix(".jpg").read_bytes()[:2] == b"\xff\xd8" for path in WORKFLOWS)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_saved_workflows_are_wired(pack, path) -> None:
    workflow = json.loads(path.read_text(encoding="utf-8"))
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for number, start, slot, end, place, kind in workflow["links"]:
        assert number in nodes[start]["outputs"][slot]["links"]
        assert nodes[end]["inputs"][place]["link"] == number
        assert nodes[start]["outputs"][slot]["type"] == kind
    for node in workflow["nodes"]:
        if node["type"] not in NODES:
            continue
        definition = pack.NODE_CLASS_MAPPINGS[node["type"]]
        assert [output["type"] for output in node["outputs"]] == list(definition.RETURN_TYPES)
        wired = {one["name"]: one for one in node["inputs"]}
        sockets = set(definition.INPUT_TYPES()["required"]) - set(widgets_of(definition))
        assert sockets <= {name for name, one in wired.items() if one["link"] is not None}


@pytest.mark.parametrize("path", sorted((ROOT / "subgraphs").glob("*.json")), ids=lambda path: path.stem)
def test_blueprints_are_wired(pack, path) -> None:
    """A node of a graph: its fields are those of nodes within, and what they give comes out as a picture."""
    blueprint = json.loads(path.read_text(encoding="utf-8"))
    (outer,), (graph,) = blueprint["nodes"], blueprint["definitions"]["subgraphs"]
    nodes, links = {node["id"]: node for node in graph["nodes"]}, {link["id"]: link for link in graph["links"]}
    assert outer["type"] == graph["id"] and graph["name"] == path.stem
    for place, (field, proxy) in enumerate(zip(graph["inputs"], outer["properties"]["proxyWidgets"], strict=True)):
        (link,) = (links[number] for number in field["linkIds"])
        end = nodes[link["target_id"]]["inputs"][link["target_slot"]]
        assert (link["origin_id"], link["origin_slot"], end["link"]) == (-10, place, link["id"])
        assert proxy == [str(link["target_id"]), end["name"]] and field["type"] == end["type"]
    for link in links.values():
        if link["origin_id"] in nodes:
            assert link["id"] in nodes[link["origin_id"]]["outputs"][link["origin_slot"]]["links"]
        if link["target_id"] in nodes:
            assert nodes[link["target_id"]]["inputs"][link["target_slot"]]["link"] == link["id"]
    assert [links[number]["target_id"] for number in graph["outputs"][0]["linkIds"]] == [-20]
    assert {"prompt", "budget", "width", "height"} <= {field["name"] for field in graph["inputs"]}


def test_a_strangers_knob_appears_by_itself(pack) -> None:
    from webui_ext.arguments import arguments

    inside = sys.modules[f"{pack.__name__}.sd_lowvram"]  # the pack's own copy, or this one
    toy = {"label": "Toy", "help": "a toy", "fidelity": Fidelity.BITWISE}
    node = pack.NODE_CLASS_MAPPINGS["LowVRAMSettings"]
    before, panel = set(node.INPUT_TYPES()["optional"]), list(arguments())
    off = inside.register(knobs={"strange": inside.Knob(**toy)})
    also = register(knobs={"strange": Knob(**toy)}) if inside is not sys.modules["sd_lowvram"] else off
    try:
        after, now = set(node.INPUT_TYPES()["optional"]), arguments()
    finally:
        off()
        also()
    assert after == before | {"strange"}
    assert [one.name for one in now] == [*(one.name for one in panel), "strange"]
