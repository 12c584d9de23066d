// Shows in the node itself what Plan, Report, Optimize Model and the nodes of the VAE tell: no Preview Any is needed.
import { app } from "../../scripts/app.js";
import { ComfyWidgets } from "../../scripts/widgets.js";

const TELLING = ["LowVRAMPlan", "LowVRAMReport", "LowVRAMOptimizeModel", "LowVRAMVAEDecode", "LowVRAMVAEEncode"];
const NAME = "lowvram_told";
const LINE = 15;
const WIDTH = 520;

function told(node) {
  const there = node.widgets?.find((widget) => widget.name === NAME);
  if (there) return there;
  const { widget } = ComfyWidgets.STRING(node, NAME, ["STRING", { multiline: true }], app);
  widget.element.readOnly = true;
  Object.assign(widget.element.style, { fontFamily: "monospace", whiteSpace: "pre-wrap" });
  widget.serialize = false; // saved workflows hold the values of inputs alone
  widget.options.serialize = false;
  return widget;
}

function show(node, text) {
  told(node).value = text;
  const lines = text.split("\n").length;
  const [width, height] = node.computeSize();
  const wide = lines > 1 ? Math.max(width, WIDTH) : width;
  node.setSize([Math.max(node.size[0], wide), Math.max(node.size[1], height + LINE * (lines - 1))]);
  node.setDirtyCanvas(true, true);
}

app.registerExtension({
  name: "sd-lowvram",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!TELLING.includes(nodeData.name)) return;
    const { onExecuted } = nodeType.prototype;
    nodeType.prototype.onExecuted = function (message) {
      onExecuted?.apply(this, arguments);
      if (message?.text) show(this, [message.text].flat().join("\n"));
    };
  },
});
