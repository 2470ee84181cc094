// Which runs are shown: the data that all sections read, and the boxes that leave runs out.
let index = { benchmarks: [], changes: [] };
let runs = []; // of the benchmark that is shown
let looks = {};
let few = {};
const read = new Map(); // benchmarks by id, with their runs, as far as they were loaded

async function readBenchmark(id) {
  if (read.has(id)) return read.get(id);
  const told = await once(`${id}/data-overview`);
  const pairs = rowsOf(told.pairs);
  const parts = rowsOf(told.parts);
  let at = 0;
  parts.forEach((part, i) => { part.paired = told.has_pair[i] ? pairs[at++] : null; });
  at = 0;
  const found = { ...index.benchmarks.find((one) => one.id === id), runs: rowsOf(told.runs), looks: told.looks, starts: told.starts };
  found.runs.forEach((run, i) => {
    Object.assign(run, { i, bench: found });
    run.parts = parts.slice(at, at + run.n_parts);
    at += run.n_parts;
  });
  Object.assign(looks, told.looks);
  Object.assign(few, told.few);
  read.set(id, found);
  return found;
}

const lower = (metric) => index.metrics[metric][0] === "lower";
const isShare = (metric) => index.metrics[metric][1] === 100;
const digits = (metric) => (isShare(metric) ? 1 : 3);
// A metric with its unit, and which direction is better where that is not plain.
const inUnit = (metric) => `${metric}${isShare(metric) ? ", 0 to 100" : ""}${lower(metric) ? ", lower is better" : ""}`;
const byKey = (key) => runs.find((run) => run.key === key);
const fullFor = (run) => run.bench.runs.find((one) => one.full && one !== run);
// Full attention first, then by name, and budgets in their order.
const inOrder = (a, b) =>
  Number(b.full) - Number(a.full) || natural(a.label, b.label) || (a.size || 0) - (b.size || 0)
  || (a.comm_size || 0) - (b.comm_size || 0);

const FILTERS = { method: "Method", comm: "Comm" };
const OF_COMPRESSED = ["comm"]; // full attention has none, so this filter leaves it in
const hidden = Object.fromEntries(Object.keys(FILTERS).map((key) => [key, new Set()]));
const wanted = () => (state.get("q") || "").trim().toLowerCase();
const shows = (run) => (run.full || `${run.label} ${run.method}`.toLowerCase().includes(wanted())) &&
  Object.keys(FILTERS).every((key) => (run.full && OF_COMPRESSED.includes(key)) || !hidden[key].has(run[key]));
const shown = () => runs.filter(shows);

function readFilters() {
  for (const key of Object.keys(FILTERS)) hidden[key] = new Set(fromList(state.get(`hide.${key}`)));
  for (const box of $("filters").querySelectorAll("[type=checkbox]")) box.checked = !hidden[box.dataset.filter].has(box.value);
  for (const summary of $("filters").querySelectorAll("summary")) nameFilter(summary);
  if ($("q").value !== (state.get("q") || "")) $("q").value = state.get("q") || "";
}

function nameFilter(summary) {
  const boxes = [...summary.parentNode.querySelectorAll("input")];
  const left = boxes.filter((box) => box.checked).length;
  const title = FILTERS[summary.dataset.filter];
  summary.textContent = left === boxes.length ? `${title}: all` : `${title}: ${left} of ${boxes.length}`;
}

function hide(key, values) {
  hidden[key] = new Set(values);
  setState({ [`hide.${key}`]: asList(hidden[key]) });
  readFilters();
  update();
}

function valuesOf(key) {
  const others = OF_COMPRESSED.includes(key) ? runs.filter((run) => !run.full) : runs;
  const size = new Map(others.map((run) => [run[key], (key === "comm" && run.comm_size) || 0]));
  return [...size.keys()].sort((a, b) => size.get(a) - size.get(b) || natural(a, b));
}

function buildFilters() {
  const menus = Object.keys(FILTERS).filter((key) => valuesOf(key).length > 1).map((key) => {
    const values = valuesOf(key);
    const toggle = (value, on) => hide(key, on ? [...hidden[key]].filter((one) => one !== value) : [...hidden[key], value]);
    const boxes = values.map((value) => el("label", {},
      el("input", { type: "checkbox", "data-filter": key, value, onchange: (event) => toggle(value, event.target.checked) }), key === "method" ? looks[value].name : value));
    const all = button("all / none", () => hide(key, hidden[key].size ? [] : values));
    return el("details", {}, el("summary", { "data-filter": key }), el("div", { class: "menu" }, all, boxes));
  });
  $("filters").replaceChildren(...menus,
    el("input", { id: "q", type: "search", placeholder: "find a method", "aria-label": "find a method",
      oninput: (event) => { setState({ q: event.target.value }); update(); } }),
    button("reset", () => go({ q: null, lit: null, ...Object.fromEntries(Object.keys(FILTERS).map((key) => [`hide.${key}`, null])) })),
    el("output", { id: "count" }));
}

function listenToFilters() {
  const form = $("filters");
  form.addEventListener("submit", (event) => event.preventDefault());
  const close = (but) => form.querySelectorAll("details[open]").forEach((menu) => menu !== but && (menu.open = false));
  document.addEventListener("click", (event) => close(event.target.closest("#filters details")));
  form.addEventListener("focusin", (event) => close(event.target.closest("details")));
  form.addEventListener("keydown", (event) => {
    const menu = event.target.closest("details[open]");
    if (event.key === "Escape" && menu) { menu.open = false; menu.firstChild.focus(); }
  });
}
