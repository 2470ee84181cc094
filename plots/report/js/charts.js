// Drawing a Vega-Lite specification with the page's own words and colours.
// Not here: which data a chart has.
const views = {};
let specs = null;
const MOST_MARKS = 500; // of SVG; more of them are drawn as one picture, which takes a tenth of the time

async function loadCharts() {
  new Function(await unpack("data-vega"))();
  specs = JSON.parse(await unpack("data-charts"));
}

// A specification's words that start with @ are the page's to say.
function fill(node, words) {
  if (Array.isArray(node)) {
    return node.length === 1 && Array.isArray(words[node[0]]) ? words[node[0]] : node.map((one) => fill(one, words));
  }
  if (node && typeof node === "object") {
    return Object.fromEntries(Object.entries(node).map(([key, value]) => [key, fill(value, words)]));
  }
  return typeof node === "string" && node in words ? words[node] : node;
}

async function draw(id, spec, words, datasets) {
  const names = Object.keys(looks);
  const own = {
    "@muted": css("--muted"), "@surface": css("--surface"), "@text": css("--text"), "@methods": names,
    "@colours": names.map(colourOf), "@shapes": names.map((name) => looks[name].shape), "@dashes": names.map((name) => looks[name].dash),
  };
  const text = css("--text");
  const axis = { labelColor: css("--muted"), titleColor: text, gridColor: css("--line"), domainColor: css("--line"),
    tickColor: css("--line"), titleFontWeight: 500, labelFontSize: 12, titleFontSize: 13, labelOverlap: true };
  const legend = { labelColor: text, titleColor: css("--muted"), labelFontSize: 12, titleFontSize: 12 };
  const config = { background: null, font: getComputedStyle(document.body).fontFamily, view: { stroke: css("--line") },
    axis, legend, header: { labelColor: text, labelFontSize: 12 } };
  if (views[id]) views[id].finalize();
  const n = Math.max(0, ...Object.values(datasets).map((rows) => rows.length));
  const drawn = fill(spec, { ...own, ...words });
  // A layer without data would warn that it has no extent.
  if (drawn.layer) drawn.layer = drawn.layer.filter((layer) => datasets[layer.data.name].length);
  const made = await window.vegaEmbed($(id), { ...drawn, datasets, config },
    { actions: false, renderer: n > MOST_MARKS ? "canvas" : "svg", tooltip: { theme: dark() ? "dark" : "light" } });
  views[id] = made.view;
  return made.view;
}

function clearChart(id, sentence) {
  if (views[id]) { views[id].finalize(); delete views[id]; }
  $(id).replaceChildren(none(sentence));
}

// The picture as it stands, on white or on black, as a file of its own.
async function saveChart(id) {
  if (!views[id]) return;
  const text = await views[id].toSVG();
  save(`kvbench-${id}.svg`, "image/svg+xml", text.replace("<svg ", `<svg style="background:${css("--surface")}" `));
}

// A method's mark next to its name, as the charts draw it.
const CIRCLE = "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0Z";
const mark = (method) => svg("svg", { viewBox: "-1.3 -1.3 2.6 2.6", width: 14, height: 14, "aria-hidden": "true" },
  svg("path", { d: looks[method].shape.replace("circle", CIRCLE), fill: colourOf(method) }));
