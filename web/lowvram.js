// Shows the reports of our nodes in the node itself. Of the page's modules only app.js is public: the box is made with what
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

// A node by the id under which the server knows it, which names the subgraphs that it is in.
function nodeOf(id) {
  let graph = app.graph;
  let node;
  for (const part of String(id).split(":")) {
    node = graph?.getNodeById?.(part) ?? graph?.getNodeById?.(Number(part));
    graph = node?.subgraph;
  }
  return node;
}

// A refusal when the workflow is queued replaces our nodes' reports of the run before.
function showRefusals() {
  for (const [id, { errors }] of Object.entries(app.lastNodeErrors ?? {})) {
    const node = nodeOf(id);
    const name = TELLING[node?.comfyClass];
    if (!name || !errors?.length) continue;
    // the server puts the name of the field before a sentence of ours
    show(node, name, errors.map((error) => (error.details || error.message).replace(/^\w+ - /, "")).join("\n"));
  }
}

app.registerExtension({
  name: "sd-lowvram",
  setup() {
    const { queuePrompt } = app;
    app.queuePrompt = async function () {
      const queued = await queuePrompt.apply(this, arguments);
      showRefusals();
      return queued;
    };
  },
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
