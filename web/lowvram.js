// Shows in the node itself what Plan, Report and Optimize Model tell: no Preview Any is needed.
import { app } from "../../scripts/app.js";
import { ComfyWidgets } from "../../scripts/widgets.js";

const SHOWING = ["LowVRAMPlan", "LowVRAMReport", "LowVRAMOptimizeModel"];
const NAME = "lowvram_told";

function told(node) {
  const there = node.widgets?.find((widget) => widget.name === NAME);
  if (there) return there;
  const { widget } = ComfyWidgets.STRING(node, NAME, ["STRING", { multiline: true }], app);
  widget.element.readOnly = true;
  widget.element.style.fontFamily = "monospace";
  widget.element.style.whiteSpace = "pre";
  widget.serialize = false; // saved workflows hold the values of inputs alone
  widget.options.serialize = false;
  return widget;
}

app.registerExtension({
  name: "sd-lowvram",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!SHOWING.includes(nodeData.name)) return;
    const { onExecuted } = nodeType.prototype;
    nodeType.prototype.onExecuted = function (message) {
      onExecuted?.apply(this, arguments);
      if (!message?.text) return;
      told(this).value = [message.text].flat().join("\n");
      const [width, height] = this.computeSize();
      this.setSize([Math.max(this.size[0], width), Math.max(this.size[1], height)]);
      this.setDirtyCanvas(true, true);
    };
  },
});
