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
const WIDTHS = { forecast: 380, report: 500, verdict: 380 }; // as in the templates, which leave 20 beside them
const OF_A_NUMBER = / (?=(?:s|min|h|B|[KMG]iB)\b)/g;
const OF_SETTINGS = 460; // with which no label is cut

function box() {
  const made = document.createElement("div");
  Object.assign(made.style, {
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

// Lines of details are folded: what follows the second empty line, which only reports have.
function fill(text, report, changed) {
  const [sentence, table, ...details] = report.replace(OF_A_NUMBER, "\u00a0").split("\n\n"); // a unit stays with its number
  text.replaceChildren(table === undefined ? sentence : `${sentence}\n\n${table}`);
  if (!details.length) return;
  const fold = document.createElement("details");
  const head = document.createElement("summary");
  head.textContent = "details";
  head.style.cursor = "pointer";
  fold.append(head, details.join("\n\n"));
  fold.addEventListener("toggle", changed);
  text.append(fold);
}

function widgetOf(node, name) {
  const there = node.widgets?.find((widget) => widget.name === name);
  if (there) return there;
  if (!node.addDOMWidget) return node.addWidget("text", name, "", () => {}, { serialize: false });
  const text = box();
  const element = document.createElement("div"); // which the page stretches; the text keeps its own height
  element.append(text);
  const height = () => (text.offsetHeight || 60) + 2 * MARGIN;
  let shown = "";
  const widget = node.addDOMWidget(name, "lowvram", element, {
    serialize: false,
    hideOnZoom: false,
    margin: MARGIN,
    getValue: () => shown,
    setValue: (report) => fill(text, (shown = report), () => fitted(node, name)),
    getMinHeight: height,
    getMaxHeight: height,
  });
  widget.serialize = false; // saved workflows hold the values of inputs alone
  return widget;
}

function fitted(node, name) {
  const [width, height] = node.computeSize();
  node.setSize([Math.max(node.size[0], width, WIDTHS[name]), height]);
  node.setDirtyCanvas(true, true);
}

function show(node, name, text) {
  widgetOf(node, name).value = text;
  fitted(node, name);
  requestAnimationFrame(() => fitted(node, name)); // the height of the text is known once the box has its width
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

// In the canvas style "advanced" hides nothing by itself: a button folds these settings. Nodes 2.0 has one of its own, which
// shows nothing that is hidden.
const folding = new Set();

function foldAdvanced(node) {
  const more = node.widgets.filter((widget) => widget.options?.advanced);
  node.fold = (open) => {
    for (const widget of more) widget.hidden = !open;
    node.showAdvanced = open; // as Nodes 2.0 reads it
    button.label = open ? "Fewer settings" : "Advanced";
    node.setSize([Math.max(node.size[0], OF_SETTINGS), node.computeSize()[1]]);
    if (globalThis.LiteGraph?.vueNodesMode) for (const widget of more) widget.hidden = false;
    node.setDirtyCanvas(true, true);
  };
  const button = node.addWidget("button", "advanced", "", () => node.fold(!node.showAdvanced), { serialize: false });
  button.serialize = false;
  button.options.canvasOnly = true;
  const defaults = new Map(more.map((widget) => [widget, widget.value]));
  node.unfoldChosen = () => node.fold(more.some((widget) => widget.value !== defaults.get(widget)));
  node.fold(false);
  folding.add(node);
  const { onRemoved } = node;
  node.onRemoved = function () {
    onRemoved?.apply(this, arguments);
    folding.delete(node);
  };
}

// Values are saved by name too: a setting that comes later moves those behind it in the page's own list.
function saveByName(nodeType) {
  const { onSerialize, onConfigure } = nodeType.prototype;
  nodeType.prototype.onSerialize = function (saved) {
    onSerialize?.apply(this, arguments);
    const values = this.widgets.filter((widget) => widget.serialize !== false).map(({ name, value }) => [name, value]);
    saved.properties = { ...saved.properties, settings: Object.fromEntries(values) };
  };
  nodeType.prototype.onConfigure = function (saved) {
    onConfigure?.apply(this, arguments);
    const values = saved.properties?.settings ?? {};
    for (const widget of this.widgets) if (widget.name in values) widget.value = values[widget.name];
    this.unfoldChosen?.();
  };
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
    // the page changes the style of its nodes after this event
    app.ui?.settings?.addEventListener?.("Comfy.VueNodes.Enabled.change", () =>
      setTimeout(() => folding.forEach((node) => node.fold(Boolean(node.showAdvanced)))),
    );
  },
  nodeCreated(node) {
    if (node.comfyClass === "LowVRAMSettings") foldAdvanced(node);
  },
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name === "LowVRAMSettings") saveByName(nodeType);
    const name = TELLING[nodeData.name];
    if (!name) return;
    const { onExecuted } = nodeType.prototype;
    nodeType.prototype.onExecuted = function (message) {
      onExecuted?.apply(this, arguments);
      if (message?.text) show(this, name, [message.text].flat().join("\n"));
    };
  },
});
