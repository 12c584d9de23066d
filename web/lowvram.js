// Shows in the node itself what our nodes tell. Of the page's modules only app.js is public: the box is made with what
// nodes have of their own, and where a page has no addDOMWidget the text becomes a line of the canvas.
import { app } from "../../scripts/app.js";

// What the box is called, by node.
const TELLING = {
  LowVRAM: "verdict",
  LowVRAMPlan: "forecast",
  LowVRAMReport: "report",
  LowVRAMVAEDecode: "verdict",
  LowVRAMVAEEncode: "verdict",
};
const MARGIN = 8;
const WIDTHS = { forecast: 560, report: 640, verdict: 520 };
const OF_A_NUMBER = / (?=(?:s|min|h|B|[KMG]iB)\b)/g;
const OF_SETTINGS = 460; // with which no label is cut

function box() {
  const made = document.createElement("pre");
  Object.assign(made.style, {
    margin: "0",
    padding: "6px 8px",
    boxSizing: "border-box",
    width: "100%",
    whiteSpace: "pre-wrap",
    overflowWrap: "anywhere",
    font: "11px/1.4 monospace",
    color: "var(--input-text, #ddd)",
    background: "var(--comfy-input-bg, #222)",
    borderRadius: "6px",
    userSelect: "text",
  });
  return made;
}

function widgetOf(node, name) {
  const there = node.widgets?.find((widget) => widget.name === name);
  if (there) return there;
  if (!node.addDOMWidget) return node.addWidget("text", name, "", () => {}, { serialize: false });
  const text = box();
  const element = document.createElement("div"); // which the page stretches; the text keeps its own height
  element.append(text);
  const height = () => (text.offsetHeight || 60) + 2 * MARGIN;
  const widget = node.addDOMWidget(name, "lowvram", element, {
    serialize: false,
    hideOnZoom: false,
    margin: MARGIN,
    getValue: () => text.textContent,
    setValue: (told) => (text.textContent = told.replace(OF_A_NUMBER, "\u00a0")), // a unit stays with its number
    getMinHeight: height,
    getMaxHeight: height,
  });
  widget.serialize = false; // saved workflows hold the values of inputs alone
  return widget;
}

function show(node, name, text) {
  widgetOf(node, name).value = text;
  // the height of the text is known once the box has its width
  const fit = () => {
    const [width, height] = node.computeSize();
    node.setSize([Math.max(node.size[0], width, WIDTHS[name]), height]);
    node.setDirtyCanvas(true, true);
  };
  fit();
  requestAnimationFrame(fit);
}

app.registerExtension({
  name: "sd-lowvram",
  nodeCreated(node) {
    if (node.comfyClass === "LowVRAMSettings") node.setSize([Math.max(node.size[0], OF_SETTINGS), node.size[1]]);
  },
  beforeRegisterNodeDef(nodeType, nodeData) {
    const name = TELLING[nodeData.name];
    if (!name) return;
    const { onExecuted } = nodeType.prototype;
    nodeType.prototype.onExecuted = function (message) {
      onExecuted?.apply(this, arguments);
      if (message?.text) show(this, name, [message.text].flat().join("\n"));
    };
  },
});
