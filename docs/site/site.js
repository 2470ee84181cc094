(() => {
"use strict";
// Elements, numbers as text, and the page's packed data. Whatever comes from a run reaches the page as text.
// Not here: what is shown.
const $ = (id) => document.getElementById(id);

function fillNode(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined).map(visible));
  return node;
}
// Marks that would turn the direction of what stands beside them, and controls, are shown in place of being obeyed.
const OBEYED = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const visible = (child) => (typeof child === "string" ? child.replace(OBEYED, (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`) : child);
const el = (tag, attributes, ...children) => fillNode(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fillNode(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const button = (text, onclick, more) => el("button", { type: "button", onclick, ...more }, text);
const none = (text) => el("p", { class: "none" }, text);

const unique = (values) => [...new Set(values)];
// The list of a key, made where there is none.
function grouped(lists, key) {
  if (!lists.has(key)) lists.set(key, []);
  return lists.get(key);
}
const is = (value) => value !== null && value !== undefined;
// One per count of digits: toLocaleString makes one per call, a third of the page's opening time with 5,000 runs.
const formats = new Map();
function formatted(value, digits) {
  if (!formats.has(digits)) {
    const exactly = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    formats.set(digits, new Intl.NumberFormat("en", exactly));
  }
  return formats.get(digits).format(value);
}
const number = (value, digits = 3) => (is(value) ? formatted(value, digits) : "-");
const pWords = (p, isBound) => (p < 0.001 ? "< 0.001" : isBound ? `< ${number(Math.ceil(1000 * p) / 1000)}` : number(p)); // as p_short of plots/stats.py
const signed = (value, digits = 3) => (value > 0 ? "+" : "") + number(value, digits);
const scaled = (value, unit, digits = 1) => (is(value) ? number(value / unit, digits) : "-");
const range = (ci, digits) => (ci ? `${number(ci[0], digits)} to ${number(ci[1], digits)}` : "");
const natural = new Intl.Collator("en", { numeric: true }).compare; // 2 before 10

let packedText = (id) => $(id).textContent; // the page holds it; a site loads it
async function unpack(id) {
  const text = atob(await packedText(id));
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i += 1) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// A table of columns as a list of objects; a column that is a table itself gives each of them an object.
function rowsOf(columns) {
  const keys = Object.keys(columns);
  const values = keys.map((key) => (Array.isArray(columns[key]) ? columns[key] : rowsOf(columns[key])));
  const rows = [];
  for (let i = 0; i < (values.length ? values[0].length : 0); i += 1) {
    const row = {};
    for (let k = 0; k < keys.length; k += 1) row[keys[k]] = values[k][i];
    rows.push(row);
  }
  return rows;
}

// The first rows of a long table at once, or when the reader comes near, and more as its end comes near.
const ROWS = 60;
function lazily(body, items, makeRow, isNear = true) {
  let next = 0;
  const draw = () => {
    const stop = Math.min(items.length, next + ROWS);
    const more = body.querySelector(":scope > .more");
    if (more) more.remove();
    body.append(...items.slice(next, stop).map(makeRow));
    next = stop;
    if (next < items.length) wait();
  };
  const wait = () => {
    const show = button(`${items.length - next} more rows`, draw);
    const row = body.tagName === "TBODY" ? el("tr", { class: "more" }, el("td", { colspan: 99 }, show)) : el("div", { class: "more" }, show);
    body.append(row);
    new IntersectionObserver(([entry], watch) => {
      if (entry.isIntersecting) { watch.disconnect(); if (row.isConnected) draw(); }
    }, { rootMargin: "300px" }).observe(row);
  };
  if (isNear || !items.length) draw(); else wait();
  return body;
}

function table(head, body, label, id) {
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label, id },
    el("table", {}, el("thead", {}, head), body));
}

function options(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text]) => el("option", { value }, text)));
  const values = entries.map(([value]) => String(value));
  if (values.includes(String(chosen))) select.value = chosen;
}

// What the reader looks at, as the part of the address behind `#`: who opens the same address sees the same.
// Not here: what follows from it; `main.js` draws the page again.
const state = new Map();
let seenHash = null;

function readState() {
  seenHash = location.hash;
  state.clear();
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) state.set(key, value);
}

function address(changes) {
  const merged = new Map([...state, ...Object.entries(changes || {})]);
  return "#" + new URLSearchParams([...merged].filter(([, value]) => is(value) && value !== "").map(([k, v]) => [k, String(v)]));
}

// `push` makes a step that the browser's Back returns from.
function setState(changes, push) {
  const to = address(changes);
  if (to === location.hash || (to === "#" && !location.hash)) return;
  history[push ? "pushState" : "replaceState"](null, "", to);
  readState();
}

// Sets of words in one value.
const asList = (words) => [...words].map((word) => word.replace(/[%,]/g, encodeURIComponent)).join(",");
const fromList = (text) => (text ? text.split(",").map(decodeURIComponent) : []);

// A link to a state of this page: a plain click goes there without loading, any other is the browser's.
function link(changes, ...children) {
  const node = el("a", { href: address(changes) }, ...children);
  node.addEventListener("click", (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    go(changes);
  });
  return node;
}

function go(changes) {
  setState(changes, true);
  show();
}

// Light, dark, or as the reader's system says.
const THEMES = ["system", "light", "dark"];
const night = window.matchMedia("(prefers-color-scheme: dark)");
let theme = "system";
try {
  theme = THEMES.includes(localStorage.kvbenchTheme) ? localStorage.kvbenchTheme : "system";
} catch { /* a page from disk may have no storage */ }
const dark = () => theme === "dark" || (theme === "system" && night.matches);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function applyTheme() {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
}

function listenToTheme(redraw) {
  $("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try { localStorage.kvbenchTheme = theme; } catch { /* as above */ }
    applyTheme();
    redraw();
  });
  night.addEventListener("change", () => theme === "system" && redraw());
}

// A method's colour, the same in every chart, whatever is shown.
const colourOf = (method) => looks[method][dark() ? "dark" : "light"];

// Which runs are shown: the data that all sections read, and the boxes that leave runs out.
let runs = [];
let metrics = {};
let looks = {};
let few = {};
let starts = [];

async function readOverview() {
  const told = JSON.parse(await unpack("data-overview"));
  ({ metrics, looks, few, starts } = told);
  const pairs = rowsOf(told.pairs);
  const parts = rowsOf(told.parts);
  let at = 0;
  parts.forEach((part, i) => { part.paired = told.has_pair[i] ? pairs[at++] : null; });
  at = 0;
  runs = rowsOf(told.runs);
  runs.forEach((run, i) => {
    run.i = i;
    run.parts = parts.slice(at, at + run.n_parts);
    at += run.n_parts;
  });
}

const lower = (metric) => metrics[metric].better === "lower";
const isShare = (metric) => metrics[metric].scale === 100;
const digits = (metric) => (isShare(metric) ? 1 : 3);
// A metric with its unit, and which direction is better where that is not plain.
const inUnit = (metric) => `${metric}${isShare(metric) ? ", 0 to 100" : ""}${lower(metric) ? ", lower is better" : ""}`;
const byKey = (key) => runs.find((run) => run.key === key);
const fullFor = (run) => runs.find((one) => one.full && one.group === run.group && one.task === run.task && one !== run);
// Full attention first, then by name, and budgets in their order.
const inOrder = (a, b) =>
  Number(b.full) - Number(a.full) || natural(a.label, b.label) || (a.size || 0) - (b.size || 0)
  || (a.comm_size || 0) - (b.comm_size || 0) || natural(a.group, b.group);
const severalGroups = (list) => unique(list.map((run) => run.group)).length > 1;
// A run's name among these: its group is said only where there are several.
const nameIn = (run, list) => (severalGroups(list) ? `${run.variant} · ${run.group}` : run.variant);

const FILTERS = { task: "Task", method: "Method", model: "Model", budget: "Budget", comm: "Comm" };
const OF_COMPRESSED = ["budget", "comm"]; // full attention has neither, so these filters leave it in
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
  const size = new Map(others.map((run) => [run[key], { budget: run.size, comm: run.comm_size }[key] || 0]));
  return [...size.keys()].sort((a, b) => size.get(a) - size.get(b) || natural(a, b));
}

function buildFilters() {
  const form = $("filters");
  for (const key of Object.keys(FILTERS)) {
    const values = valuesOf(key);
    const toggle = (value, on) => hide(key, on ? [...hidden[key]].filter((one) => one !== value) : [...hidden[key], value]);
    const boxes = values.map((value) => el("label", {},
      el("input", { type: "checkbox", "data-filter": key, value, onchange: (event) => toggle(value, event.target.checked) }), value));
    const all = button("all / none", () => hide(key, hidden[key].size ? [] : values));
    form.append(el("details", {}, el("summary", { "data-filter": key }), el("div", { class: "menu" }, all, boxes)));
  }
  form.append(el("input", { id: "q", type: "search", placeholder: "find a method", "aria-label": "find a method",
    oninput: (event) => { setState({ q: event.target.value }); update(); } }));
  form.append(button("reset", () => go({ q: null, lit: null, ...Object.fromEntries(Object.keys(FILTERS).map((key) => [`hide.${key}`, null])) })));
  form.append(el("output", { id: "count" }));
  form.addEventListener("submit", (event) => event.preventDefault());
  const close = (but) => form.querySelectorAll("details[open]").forEach((menu) => menu !== but && (menu.open = false));
  document.addEventListener("click", (event) => close(event.target.closest("#filters details")));
  form.addEventListener("focusin", (event) => close(event.target.closest("details")));
  form.addEventListener("keydown", (event) => {
    const menu = event.target.closest("details[open]");
    if (event.key === "Escape" && menu) { menu.open = false; menu.firstChild.focus(); }
  });
}

// A card with all that is known of one score: for a tap, a click or the Enter key on a cell or on a point of a chart.
const tone = (part) => (part.paired ? { 1: "good", "-1": "bad", 0: "" }[lower(part.metric) ? -part.paired.sign : part.paired.sign] : "");

// What the corrected test says, in words.
function verdict(part) {
  const { holm, holm_is_bound: isBound, family, n, sign } = part.paired;
  const test = `p ${pWords(holm, isBound)}${family > 1 ? ` after Holm over ${family}` : ""}, n ${n}`;
  if (sign) return `${sign > 0 ? "higher" : "lower"} than full attention (${test})`;
  const why = few[`${n}|${family}`];
  return `no significant difference to full attention (${test}${why ? `; ${why}` : ""})`;
}
function difference({ metric, paired: { mean, ci, unit } }) {
  const n = unit ? 3 : digits(metric);
  return `${signed(mean, n)}${unit ? ` ${unit}` : ""}${ci ? ` (${signed(ci[0], n)} to ${signed(ci[1], n)})` : ""}`;
}
const STANDINGS = {
  bold: "best under this budget, by the corrected test",
  tie: "not shown to be worse than the best under this budget: a tie",
  "": null,
};

function facts(run, part) {
  const pair = part.paired;
  return [
    ["score", `${number(part.score, digits(part.metric))} ${part.metric === "score" ? "" : part.metric}`],
    ["95 %", part.ci ? range(part.ci, digits(part.metric)) : part.n === 1 ? "none: one sample says nothing of the spread" : "-"],
    ["samples", part.of ? `${part.n}, of ${part.of.length} datasets that count alike` : String(part.n)],
    ["Δ vs full attention", pair ? difference(part) : run.full ? null : "no sample with the same prompt"],
    ["test", pair ? verdict(part) : null],
    ["uncorrected", pair ? `p ${pWords(pair.p, pair.p_is_bound)}` : null],
    ["pairs", pair ? `${pair.more} above full attention, ${pair.same} equal, ${pair.less} below` : null],
    ["standing", STANDINGS[part.standing]],
    ["tokens", `${number(part.cost.tokens, 1)} attended per step${run.full ? "" : `, ${number(run.audit.tokens_budget_mean, 1)} of the prompt allowed`}`],
    ["device", `${scaled(part.cost.device, 1e6, 2)} MB`],
    ["moved", `${scaled(part.cost.moved, 1e3)} KB per step`],
    ["budget", part.over ? "! exceeded" : null],
    ["layers", run.whole_layers ? `the first ${run.whole_layers} are not compressed and lie outside the budget` : null],
    ["search", run.unpriced ? "reads all keys, outside every budget: a reference, on no front" : null],
    ["memory", run.n_oom ? `${run.n_oom} samples ran out of memory` : null],
  ].filter(([, value]) => value);
}

// Where the answers of a run stand beside those of full attention.
function toSamples(run, part) {
  const full = fullFor(run);
  const dataset = part && !part.of ? part.dataset : null;
  return { a: (full || run).key, b: run.key, dataset, sample: null, at: "samples" };
}

let cardFrom = null;
function openCard(run, part, from) {
  cardFrom = from;
  const rows = facts(run, part).flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)]);
  const close = button("✕", closeCard, { "aria-label": "close", class: "close" });
  $("card").replaceChildren(close,
    el("h3", {}, run.variant), el("p", { class: "hint" }, `${run.task} · ${part.dataset} · ${run.group}`),
    el("dl", {}, rows),
    el("p", { class: "links" }, link(toSamples(run, part), "answers"), link({ run: run.key, at: "provenance" }, "command and origin")));
  $("card").hidden = false;
  close.focus({ preventScroll: true });
}

function closeCard() {
  $("card").hidden = true;
  if (cardFrom && cardFrom.isConnected) cardFrom.focus({ preventScroll: true });
  cardFrom = null;
}

// A table cell with a score, what it is worth, and its card.
function scoreCell(run, part) {
  if (!part) return el("td", { class: "absent" }, "-");
  const strong = part.standing === "bold" ? "strong" : "span";
  const signs = [part.over ? el("span", { class: "flag", title: "over budget" }, "! ") : null,
    part.standing === "tie" ? el("span", { class: "tie", title: STANDINGS.tie }, "≈ ") : null];
  const lines = [el("span", {}, signs, el(strong, { class: "score" }, number(part.score, digits(part.metric)))),
    el("small", {}, part.ci ? `${range(part.ci, digits(part.metric))}, ` : "", link(toSamples(run, part), `n ${part.n}`))];
  if (part.paired) lines.push(el("small", { class: tone(part) }, `${difference(part)}, p ${pWords(part.paired.holm, part.paired.holm_is_bound)}`));
  if (run.n_oom) lines.push(el("small", { class: "flag" }, `${run.n_oom} out of memory`));
  const open = (event) => openCard(run, part, event.currentTarget);
  return el("td", { class: `cell ${tone(part) && `${tone(part)}-bg`}`, tabindex: 0, "aria-haspopup": "dialog",
    title: facts(run, part).map((pair) => pair.join(": ")).join("\n"),
    onclick: open, onkeydown: (event) => { if (event.key === "Enter" && event.target === event.currentTarget) open(event); } }, lines);
}

function listenToCards() {
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !$("card").hidden) closeCard(); });
  document.addEventListener("click", (event) => {
    if (!$("card").hidden && !event.target.closest("#card, .cell, .chart, .points")) { cardFrom = null; closeCard(); }
  });
}

// What the reader takes away: CSV, TeX, SVG, and text for the clipboard.

// A cell that begins like a formula is one to a spreadsheet.
const csvCell = (value) => {
  const text = !is(value) ? "" : String(value);
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};
const csv = (rows) => rows.map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";

const TEX = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "≈": "$\\approx$", "·": "$\\cdot$", "−": "--" };
const tex = (text) => String(text).replace(/[\\~^≈·−]|[&%$#_{}]/g, (sign) => TEX[sign] || `\\${sign}`);

// A table as booktabs has it; the first column is text, the others are numbers.
function texTable(head, rows, caption, label) {
  const line = (cells) => `${cells.map(tex).join(" & ")} \\\\`;
  return ["\\begin{table}", "\\centering", `\\caption{${tex(caption)}}`, `\\label{tab:${label.replace(/[^A-Za-z0-9]+/g, "-").toLowerCase()}}`,
    `\\begin{tabular}{l${"r".repeat(head.length - 1)}}`, "\\toprule", line(head), "\\midrule", ...rows.map(line), "\\bottomrule",
    "\\end{tabular}", "\\end{table}", ""].join("\n");
}

function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const anchor = el("a", { href: url, download: name });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function copy(text, from) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a browser that gives a page from disk no clipboard
    const area = el("textarea", {}, text);
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  const before = from.textContent;
  from.textContent = done ? "copied" : "not copied";
  setTimeout(() => { from.textContent = before; }, 1500);
}

const COLUMNS = {
  folder: (run) => run.folder, task: (run) => run.task, dataset: (run, part) => part.dataset, model: (run) => run.model,
  method: (run) => run.method, label: (run) => run.label, budget: (run) => run.budget, comm: (run) => run.comm,
  metric: (run, part) => part.metric, n: (run, part) => part.n, n_oom: (run) => run.n_oom, score: (run, part) => part.score,
  low: (run, part) => part.ci && part.ci[0], high: (run, part) => part.ci && part.ci[1], standing: (run, part) => part.standing,
  vs_full: (run, part) => part.paired && part.paired.mean, vs_full_low: (run, part) => part.paired && part.paired.ci && part.paired.ci[0],
  vs_full_high: (run, part) => part.paired && part.paired.ci && part.paired.ci[1], vs_full_n: (run, part) => part.paired && part.paired.n,
  p: (run, part) => part.paired && part.paired.p, p_is_bound: (run, part) => part.paired && part.paired.p_is_bound,
  p_holm: (run, part) => part.paired && part.paired.holm, p_holm_is_bound: (run, part) => part.paired && part.paired.holm_is_bound,
  within_budget: (run, part) => !part.over, tokens_budget: (run) => run.audit.tokens_budget_mean,
  tokens_attended: (run, part) => part.cost.tokens, share_attended: (run, part) => part.cost.share,
  device_bytes: (run, part) => part.cost.device, device_and_host_bytes: (run, part) => part.cost.resident,
  moved_bytes_per_step: (run, part) => part.cost.moved, tpot_s: (run) => run.audit.tpot_s, conditions: (run) => run.group,
};
function scoresCsv(list) {
  const rows = list.flatMap((run) => run.parts.map((part) => Object.values(COLUMNS).map((of) => of(run, part))));
  return csv([Object.keys(COLUMNS), ...rows]);
}
// What a cell says in a table on paper.
const texCell = (part) => (part ? `${part.over ? "! " : ""}${part.standing === "tie" ? "≈ " : ""}${number(part.score, digits(part.metric))}` : "-");

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

// A method's mark beside its name, as the charts draw it.
const CIRCLE = "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0Z";
const mark = (method) => svg("svg", { viewBox: "-1.3 -1.3 2.6 2.6", width: 14, height: 14, "aria-hidden": "true" },
  svg("path", { d: looks[method].shape.replace("circle", CIRCLE), fill: colourOf(method) }));

// One kind of table for all sections: sorted by any column, a method's rows lit. On a narrow page a row is a card.
// Not here: what a cell says (`card.js`).

// Columns are { key, title, more, value, cell }: `value(row)` is what it sorts by (the rows' own order without it),
// `cell(row)` its element. What it is sorted by stands in the address as `name`.
function sheet(name, label, columns, rows, redraw, isNear = true) {
  const [by, direction] = sortedBy(name, columns[0].key);
  const { value } = columns.find((one) => one.key === by) || columns[0];
  const ordered = [...rows];
  if (!value && direction < 0) ordered.reverse();
  if (value) ordered.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    return is(x) && is(y) ? direction * (x - y) : Number(!is(x)) - Number(!is(y));
  });
  const head = el("tr", {}, columns.map((one) => sortable(name, one, by, direction, redraw)));
  const body = lazily(el("tbody", {}), ordered, (row) => el("tr", { class: [isLit(row.method) && "lit", row.tied && "tied"].filter(Boolean).join(" ") || null }, columns.map((one, i) => {
    const cell = one.cell(row);
    if (i) cell.dataset.head = one.title;
    return cell;
  })), isNear);
  return table(head, body, label);
}

// --- headings that sort, with what is sorted by in the address ---

function sortedBy(name, usual) {
  const [, sign, key] = /^(-?)(.*)$/s.exec(state.get(name) || usual);
  return [key, sign ? -1 : 1];
}

function sortable(name, { key, title, more }, by, direction, redraw) {
  const sort = button(title, (event) => {
    const i = [...event.currentTarget.closest("tr").children].indexOf(event.currentTarget.closest("th"));
    const place = event.currentTarget.closest("section").id;
    setState({ [name]: by === key && direction > 0 ? `-${key}` : key });
    redraw();
    const again = document.querySelector(`#${place} thead tr`).children[i];
    if (again) again.querySelector("button").focus();
  });
  return el("th", { scope: "col", "aria-sort": key === by ? (direction > 0 ? "ascending" : "descending") : null }, sort, more || []);
}

// --- one method that stands out, in tables and charts ---

const lit = () => state.get("lit") || "";
const isLit = (method) => is(method) && method === lit();
const nameCell = (method, text) => el("th", { scope: "row" },
  button([mark(method), " ", text], () => { setState({ lit: isLit(method) ? null : method }); update(); }, { class: "name", "aria-pressed": String(isLit(method)) }));

// The view that the page opens on: scores over budgets and over costs as they were measured, and differences to Full.
const COSTS = {
  tokens: "tokens attended per step and head",
  share: "share of the tokens attended",
  device: "keys, values and index on the device, bytes",
  moved: "moved and searched per step, bytes",
  resident: "keys, values and index, device and host, bytes",
  memory: "share of the full cache's bytes on the device",
  reads: "on the device and moved per step, bytes",
  tpot: "seconds per output token (of a shared batch)",
};
const AXES = { "budget-chart": ["tokens", "share"], "cost-chart": ["device", "moved", "reads", "memory", "resident", "tpot"] };
const costOf = (run, part, axis) => (axis === "tpot" ? run.audit.tpot_s : part.cost[axis]);

// The title of an axis, with its unit on a line of its own where a narrow page would cut it.
const inLines = (title) => (window.innerWidth < 700 ? title.split(/(?<=,) (?=[^,]*$)/) : title);

// What can be looked at: a dataset, or the average of a benchmark, of runs that may be compared.
const viewName = (run, part) => [run.task, part.dataset, run.group].join("\n");
function viewsOf(list) {
  const found = new Map();
  for (const run of list) for (const part of run.parts) {
    const name = viewName(run, part);
    const view = found.get(name) || { name, task: run.task, dataset: part.dataset, group: run.group, metric: part.metric, n: 0 };
    view.n += 1;
    found.set(name, view);
  }
  return [...found.values()].sort((a, b) => b.n - a.n);
}

function drawResults(list) {
  const all = viewsOf(list);
  const several = unique(all.map((view) => view.group)).length > 1;
  const titles = all.map((view) => [view.name, `${view.task} · ${view.dataset}${several ? ` — ${view.group}` : ""}`]);
  const view = all.find((one) => one.name === state.get("view")) || all[0];
  options($("view"), titles, view && view.name);
  const rows = view ? list.filter((run) => run.group === view.group && run.task === view.task)
    .map((run) => [run, run.parts.find((part) => part.dataset === view.dataset)]).filter(([, part]) => part).sort(([a], [b]) => inOrder(a, b)) : [];
  $("view-about").textContent = view ? `${view.group}${several ? "" : ` · ${view.task}`}` : "";
  drawDifferences(view, rows);
  drawLegend(rows);
  $("notes").replaceChildren(...notes(view, rows).map((text) => el("li", {}, text)));
  return { view, rows };
}

// A row per method, a column per budget; each with its score and how it differs from full attention.
function drawDifferences(view, rows) {
  if (!rows.length) { $("differences").replaceChildren(none("No run passes the filters.")); return; }
  const budgets = new Map(rows.filter(([run]) => !run.full && run.budget !== "full").map(([run]) => [run.budget, run.size]));
  const columns = [...budgets.keys()].sort((a, b) => budgets.get(a) - budgets.get(b));
  if (rows.some(([run]) => run.budget === "full")) columns.unshift("full");
  const series = new Map();
  for (const [run, part] of rows) {
    const cells = series.get(run.series) || new Map();
    series.set(run.series, cells);
    if (!cells.has(run.budget)) cells.set(run.budget, [run, part]);
  }
  const title = (name) => (name === "full" ? "full attention" : name);
  const lines = [...series].map(([name, cells]) => ({ name, cells, method: [...cells.values()][0][0].method }));
  $("differences").replaceChildren(sheet("by", "Differences to full attention", [
    { key: "method", title: "method", cell: ({ method, name }) => nameCell(method, name) },
    ...columns.map((budget) => ({ key: budget, title: title(budget),
      value: ({ cells }) => (cells.has(budget) ? cells.get(budget)[1].score : null),
      cell: ({ cells }) => scoreCell(...(cells.get(budget) || [null, null])) })),
  ], lines, update));
  $("differences-tex").onclick = (event) => copy(texTable(["method", ...columns.map(title)],
    [...series].map(([name, cells]) => [name, ...columns.map((budget) => texCell((cells.get(budget) || [])[1]))]),
    `${view.task}, ${view.dataset}: ${inUnit(view.metric)} by budget. ${view.group}. ≈ marks what is not shown to be worse than the best.`,
    `${view.task}-${view.dataset}`), event.currentTarget);
  $("results-csv").onclick = () => save("kvbench-results.csv", "text/csv", csv([Object.keys(COLUMNS), ...rows.map(([run, part]) => Object.values(COLUMNS).map((of) => of(run, part)))]));
}

// The methods of both charts, which a click takes out of them or brings back.
function drawLegend(rows) {
  const here = unique(rows.map(([run]) => run.method));
  const gone = [...hidden.method].filter((method) => looks[method]);
  $("legend").replaceChildren(...[...here, ...gone].map((method) => {
    const off = hidden.method.has(method);
    const toggle = () => hide("method", off ? [...hidden.method].filter((one) => one !== method) : [...hidden.method, method]);
    return el("button", { type: "button", "aria-pressed": String(!off), onclick: toggle }, mark(method), looks[method].name);
  }));
}

function notes(view, rows) {
  const named = (test) => unique(rows.filter(test).map(([run]) => run.label)).join(", ");
  const outside = new Map();
  for (const [run, part] of rows) if (part.outside) grouped(outside, part.outside).push(part.over ? run.variant : run.label);
  const hollow = [...outside].map(([why, names]) => `${unique(names).join(", ")} ${why}`).join("; ");
  const unpriced = named(([run]) => run.unpriced);
  const single = rows.length && rows.every(([, part]) => part.n === 1);
  return [
    single ? "One sample each: no interval, and no difference can be shown." : null,
    hollow ? `Hollow marks did not keep their budget: ${hollow}. The axes show what was measured.` : null,
    unpriced ? `${unpriced}: reads all keys to find its tokens, outside every budget, so it is a reference and on no front. It shows what exact attention weights choose layer by layer, not the best score that a budget allows.` : null,
    view && view.task.split(" ")[0] === "fidelity" ? "Fidelity is the agreement with full attention's own tokens; it says nothing of whether answers are right." : null,
  ].filter(Boolean);
}

// The methods that stand out while none is lit; null: all do.
let standingOut = () => null;

function points(rows, axis) {
  const only = standingOut(rows);
  return rows.filter(([run, part]) => is(part.score) && is(costOf(run, part, axis))).map(([run, part]) => {
    const cost = costOf(run, part, axis);
    const [low, high] = part.ci || [part.score, part.score];
    return { run: run.i, method: run.method, series: run.series, variant: run.variant, cost, score: part.score, low, high, n: part.n,
      hollow: Boolean(part.outside), full: run.full, interval: part.ci ? range(part.ci, digits(part.metric)) : "none", fronts: part.front,
      p: part.paired ? pWords(part.paired.holm, part.paired.holm_is_bound) : "-", against_full: part.paired ? difference(part) : "-",
      digits: digits(part.metric), faint: lit() ? !isLit(run.method) : Boolean(only) && !only.has(run.method),
      description: `${run.variant}: ${number(part.score, digits(part.metric))} at ${number(cost, 0)}` };
  });
}

async function drawScores({ view, rows }) {
  for (const [id, axes] of Object.entries(AXES)) {
    const axis = axes.includes(state.get(id)) ? state.get(id) : axes[0];
    options($(`${id}-axis`), axes.map((name) => [name, COSTS[name]]), axis);
    const found = points(rows, axis);
    const front = found.filter((one) => one.fronts.includes(axis)).sort((a, b) => a.cost - b.cost);
    if (id === "cost-chart") drawPointTable(found, front, COSTS[axis]);
    if (!found.length) { clearChart(id, "No run that passes the filters measured this."); continue; }
    const costs = found.map((one) => one.cost);
    const isWide = Math.min(...costs) > 0 && Math.max(...costs) / Math.min(...costs) > 12;
    const chart = await draw(id, specs[isWide ? "log" : "linear"], {
      "@format": { tokens: ",d", share: "~g", memory: "~g", tpot: "~g" }[axis] || "~s",
      "@score": inUnit(view.metric), "@cost": inLines(COSTS[axis]),
    }, { points: found, front: front.length > 1 ? front : [], full: found.filter((one) => one.full).slice(0, 1) });
    chart.addEventListener("click", (event, item) => {
      const run = item && item.datum && runs[item.datum.run];
      if (run) openCard(run, run.parts.find((part) => part.dataset === view.dataset), $(id));
    });
  }
}

function drawPointTable(found, front, cost) {
  const best = new Set(front.map((point) => point.run));
  const td = (of) => (point) => el("td", {}, of(point));
  $("points").replaceChildren(sheet("order", "Points of the chart", [
    { key: "variant", title: "variant", cell: (point) => el("th", { scope: "row" }, link(toSamples(runs[point.run], null), point.variant)) },
    { key: "score", title: "score", value: (point) => point.score, cell: td((point) => number(point.score, point.digits)) },
    { key: "interval", title: "95 %", value: (point) => point.high - point.low, cell: td((point) => point.interval) },
    { key: "cost", title: cost, value: (point) => point.cost, cell: td((point) => number(point.cost, point.cost < 10 ? 3 : 0)) },
    { key: "front", title: "front", value: (point) => Number(best.has(point.run)), cell: td((point) => (best.has(point.run) ? "front" : "")) },
  ], found, update));
}

// Two texts word by word: which words only one of them has, by a longest common subsequence.
const MOST_WORDS = 700; // of a text; the table has their square

const wordsOf = (text) => text.match(/\s+|[^\s]+/g) || [];

// Pairs of word and whether the other text has it in the same order.
function compareWords(ours, theirs) {
  const [a, b] = [wordsOf(ours), wordsOf(theirs)];
  const plain = a.map((word) => [word, true]);
  if (a.length > MOST_WORDS || b.length > MOST_WORDS) return plain;
  const width = b.length + 1;
  const longest = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      longest[i * width + j] = a[i] === b[j] ? longest[(i + 1) * width + j + 1] + 1
        : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  const found = [];
  let [i, j] = [0, 0];
  while (i < a.length) {
    if (j < b.length && a[i] === b[j]) { found.push([a[i], true]); i += 1; j += 1; }
    else if (j < b.length && longest[i * width + j + 1] >= longest[(i + 1) * width + j]) j += 1;
    else { found.push([a[i], !a[i].trim()]); i += 1; }
  }
  return found;
}

// A text with the words marked that the other one has not.
function marked(ours, theirs) {
  return el("pre", { class: "answer" }, ours ? compareWords(ours, theirs).map(([word, same]) => (same ? word : el("mark", {}, word))) : "(nothing)");
}

// Samples: what was asked, and what two runs answered.
let asked = null; // a promise of all prompts
const pieces = new Map(); // promises of the answers of runs that are packed together
const PAGE = 200;
let limit = PAGE;

async function answersOf(run) {
  const start = starts.filter((one) => one <= run.i).pop();
  if (!pieces.has(start)) pieces.set(start, unpack(`data-samples-${start}`).then(JSON.parse));
  const columns = (await pieces.get(start))[run.i - start];
  return new Map(columns.at.map((at, i) => [at, sampleOf(columns, at, i)]));
}

function sampleOf(columns, at, i) {
  const of = (key) => (columns[key] ? columns[key][i] : null);
  const ledger = Object.keys(columns).filter((key) => key.startsWith("ledger."));
  return { at, score: of("score"), prediction: of("prediction") || "", generated: of("generated"), error: of("error"), strip: of("strip"),
    ledger: Object.fromEntries(ledger.map((key) => [key.slice(7), of(key)])), fields: of("fields"), report: of("report") };
}

const prompts = () => (asked = asked || unpack("data-asked").then(JSON.parse));

// The two runs that the reader compares: those of the address, or full attention and the first other one.
function chosenRuns(shuffled) {
  const list = [...shuffled].sort((x, y) => natural(x.task, y.task) || inOrder(x, y));
  const full = list.find((run) => run.full) || list[0];
  const a = list.find((run) => run.key === state.get("a")) || full;
  const other = a && (list.find((run) => run !== a && run.group === a.group && run.task === a.task) || list[list.length - 1]);
  return [a, list.find((run) => run.key === state.get("b")) || other];
}

function drawRunChoice(list) {
  const [a, b] = chosenRuns(list);
  for (const [id, run] of [["run-a", a], ["run-b", b]]) {
    $(id).replaceChildren(...(run ? [el("option", { value: run.key }, `${run.task} · ${nameIn(run, list.filter((one) => one.task === run.task))}`)] : []));
    $(id).dataset.all = "";
  }
}

// All runs to choose from, made when the reader is about to: of thousands, two lists are half of the page.
function fillRunChoice(select) {
  if (select.dataset.all) return;
  const chosen = select.value;
  const byTask = new Map();
  for (const run of shown().sort(inOrder)) grouped(byTask, run.task).push(run);
  select.replaceChildren(...[...byTask].map(([task, members]) => {
    const several = severalGroups(members);
    return el("optgroup", { label: task }, members.map((run) => el("option", { value: run.key, selected: run.key === chosen },
      `${task} · ${run.variant}${several ? ` · ${run.group}` : ""}`)));
  }));
  select.dataset.all = "yes";
}

// Which of the samples that both were asked pass the reader's filters.
function keptSamples(both, two, texts, isLower) {
  const which = state.get("which") || "all";
  const words = (state.get("find") || "").toLowerCase();
  const dataset = state.get("dataset");
  const flip = isLower ? -1 : 1;
  return both.filter((one) => {
    const other = two.get(one.at);
    const difference = flip * ((one.score ?? -Infinity) - (other.score ?? -Infinity));
    const wanted = { all: true, differ: one.score !== other.score, a: difference > 0, b: difference < 0 }[which];
    const about = texts[one.at];
    if (!wanted || (dataset && about.dataset !== dataset)) return false;
    return !words || [about.id, ...about.references, one.prediction, other.prediction].join("\n").toLowerCase().includes(words);
  });
}

let drawingSamples = 0;
async function drawSamples() {
  const turn = (drawingSamples += 1);
  const [a, b] = chosenRuns(shown());
  if (!a || !b) {
    $("sample-list").replaceChildren();
    $("sample").replaceChildren(none("No run passes the filters."));
    $("samples-count").textContent = "";
    return;
  }
  const [texts, one, two] = await Promise.all([prompts(), answersOf(a), answersOf(b)]);
  if (turn !== drawingSamples) return; // the reader chose others meanwhile
  const both = [...one.values()].filter((sample) => two.has(sample.at));
  options($("dataset"), [["", "all datasets"], ...unique(both.map((sample) => texts[sample.at].dataset)).sort(natural).map((name) => [name, name])], state.get("dataset") || "");
  const kept = keptSamples(both, two, texts, lower(a.parts[0] ? a.parts[0].metric : "score"));
  $("samples-count").textContent = both.length ? `${kept.length} of ${both.length} samples that A and B were both asked`
    : "A and B were asked no sample in common; choose two runs of one task and model.";
  const buttons = kept.slice(0, limit).map((sample) => el("button", { type: "button", "data-at": sample.at, onclick: () => pick(sample.at, true), onkeydown: walk },
    el("span", {}, texts[sample.at].id), el("span", {}, `${number(sample.score, 1)} | ${number(two.get(sample.at).score, 1)}`)));
  if (kept.length > limit) buttons.push(button(`${kept.length - limit} more`, () => { limit += PAGE; drawSamples(); }));
  $("sample-list").replaceChildren(...buttons);

  function pick(at, byHand) {
    if (byHand) setState({ sample: texts[at].id, a: a.key, b: b.key });
    for (const each of $("sample-list").children) each.setAttribute("aria-current", String(each.dataset.at === String(at)));
    $("sample").replaceChildren(...detail(texts[at], [a, one.get(at)], [b, two.get(at)]));
  }
  const wanted = kept.find((sample) => texts[sample.at].id === state.get("sample"));
  if (kept.length) pick((wanted || kept[0]).at, false);
  else $("sample").replaceChildren(none("No sample to show."));
}

function walk(event) {
  const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  const next = step && event.currentTarget[step];
  if (next) { event.preventDefault(); next.focus(); next.click(); }
}

function detail(about, ...sides) {
  const length = about.tokens === about.original_tokens ? "" : ` (cut from ${about.original_tokens})`;
  const end = about.end || {};
  const here = () => new URL(address({ at: "samples", sample: about.id }), location.href).href;
  return [
    el("div", { class: "titled" }, el("h3", {}, about.id), button("copy link", (event) => copy(here(), event.currentTarget))),
    el("p", { class: "hint" }, `${about.dataset} · prompt of ${about.tokens} tokens${length}, ${about.sha}`),
    ...(end.context || end.question || end.cue ? [el("strong", {}, "What was asked"),
      el("pre", { class: "prompt" }, end.evidence ? el("mark", {}, `${end.evidence}\n\n`) : "", el("span", { class: "context" }, end.context || ""), el("b", {}, end.question || ""), el("i", {}, end.cue || ""))]
      : [el("p", { class: "hint" }, "This run was made before prompts were written beside the answers.")]),
    el("strong", {}, about.references.length > 1 ? "References" : "Reference"),
    ...(about.references.length ? about.references.map((text) => el("pre", {}, text)) : [none("none")]),
    el("div", { class: "sides" }, sides.map(([run, one], i) => el("div", { class: "side" },
      el("h4", {}, `${"AB"[i]}: ${run.variant}`),
      el("p", { class: "hint" }, one.score === null && one.error ? `out of memory: ${one.error}` : `score ${number(one.score, 1)} · ${one.generated} tokens generated`),
      strip(one.strip, run), marked(one.prediction, sides[1 - i][1].prediction),
      more("Ledger", one.ledger), more("Task's columns", one.fields), more("Method's report", one.report)))),
  ];
}

// Which parts of the prompt the last step attended to, from its beginning on the left to its end.
function strip(levels, run) {
  if (!levels) return null;
  const shares = [...levels].map((sign) => (sign.charCodeAt(0) - 48) / 63);
  const mean = shares.reduce((sum, share) => sum + share, 0) / shares.length;
  const text = `${number(100 * mean, 1)} % of the prompt attended to at the last step, mean over heads and layers`;
  const bars = shares.map((share, i) => svg("rect", { x: i, y: 0, width: 1, height: 1, "shape-rendering": "crispEdges", "fill-opacity": share.toFixed(2) }));
  return el("figure", { class: "strip" },
    svg("svg", { viewBox: `0 0 ${shares.length} 1`, preserveAspectRatio: "none", role: "img", "aria-label": `${run.variant}: ${text}` }, bars),
    el("figcaption", {}, el("span", {}, "start"), el("span", {}, text), el("span", {}, "end")));
}

function more(title, tree) {
  if (!tree || !Object.keys(tree).length) return null;
  return el("details", {}, el("summary", {}, title), el("pre", {}, typeof tree === "string" ? tree : JSON.stringify(tree, null, 1)));
}

// Where each run comes from, and the command that makes it again. Unpacked when the reader comes here.
let origins = null;
let listed = [];
const pairs = (tree) => Object.entries(tree).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");

function originOf(origin) {
  const { versions, params, notes, files, env, command, same_as, ...facts } = origin;
  const hashes = Object.fromEntries(Object.entries(files).map(([name, sha]) => [`sha256 ${name}`, sha]));
  const entries = { ...facts, ...env, versions: pairs(versions), parameters: pairs(params), ...hashes,
    "the same run under other budgets": same_as.join(", "), notes: notes.join("; ") };
  const terms = Object.entries(entries).filter(([, value]) => is(value) && value !== "");
  return [el("div", { class: "titled" }, el("pre", { class: "command" }, command), button("copy command", (event) => copy(command, event.currentTarget))),
    el("dl", {}, terms.flatMap(([key, value]) => [el("dt", {}, key.replaceAll("_", " ")), el("dd", {}, String(value))]))];
}

async function fillOrigin(node, run) {
  origins = origins || unpack("data-origins").then(JSON.parse);
  const all = await origins;
  if (node.childElementCount === 1) node.append(...originOf(all[run.i]));
}

function drawOrigins(list) {
  listed = [...list].sort((a, b) => natural(a.folder, b.folder));
  const wanted = state.get("run");
  const first = listed.find((run) => run.key === wanted);
  if (first) listed = [first, ...listed.filter((run) => run !== first)];
  const box = el("div", {});
  lazily(box, listed, (run) => {
    const node = el("details", {}, el("summary", {}, `${run.folder} — ${run.variant}`));
    node.addEventListener("toggle", () => node.open && fillOrigin(node, run));
    if (run === first) node.open = true;
    return node;
  });
  $("origins").replaceChildren(listed.length ? box : none("No run passes the filters."));
}

// Data that are not in the page: scripts that hand over packed text, loaded once each. From disk nothing else can be read.
// Not here: what is in them.
const SHARED = new Set(["data-index", "data-charts", "data-vega", "data-methods", "data-evidence"]);
const arriving = new Map(); // by path: { promise, done }
let bench = null; // the benchmark that is shown, by its folder

// A file calls this with its name and text; whose folder it is of says the script that is being run.
window.kvbench = (name, text) => {
  const path = document.currentScript.dataset.path;
  if (arriving.has(path)) arriving.get(path).done(text);
};

function loadText(path) {
  if (!arriving.has(path)) {
    const one = {};
    one.promise = new Promise((done, fail) => {
      one.done = done;
      const node = el("script", { src: `data/${path}.js`, "data-path": path });
      node.addEventListener("error", () => { arriving.delete(path); fail(new Error(`${path} cannot be loaded`)); });
      document.head.append(node);
    });
    arriving.set(path, one);
  }
  return arriving.get(path).promise;
}
packedText = (id) => loadText(SHARED.has(id) ? id : `${bench}/${id}`);

const shared = new Map(); // what was unpacked of the files that all benchmarks share
function once(id, make = (tree) => tree) {
  if (!shared.has(id)) shared.set(id, unpack(id).then((text) => make(JSON.parse(text))));
  return shared.get(id);
}

// The leaderboard: one table per dataset and budget, scores or times and never one number of both.
const VERDICTS = ["self-reported", "rescored", "budget proven", "reproduced"];
const verdictOf = (run) => el("span", { class: `badge ${run.verdict.split(" ").pop()}`, title: run.why || null }, run.verdict);
const oldMark = (run) => (run.superseded_by ? el("span", { class: "badge old" }, `superseded by ${run.superseded_by}`) : null);
const ranked = (part) => (part.rank ? (part.rank[0] === part.rank[1] ? String(part.rank[0]) : `${part.rank[0]}–${part.rank[1]}`) : null);

// The datasets of the runs, the average first; and their budgets in the order of their size.
const datasetsOf = (list) => unique(list.flatMap((run) => run.parts.map((part) => part.dataset)))
  .sort((a, b) => Number(b === "average") - Number(a === "average") || natural(a, b));
function budgetsOf(list) {
  const found = new Map(list.filter((run) => !run.full).map((run) => [run.budget, run.size || 0]));
  return [...found.keys()].sort((a, b) => natural(a.replace(/[\d./]+/, ""), b.replace(/[\d./]+/, "")) || found.get(a) - found.get(b));
}

function chosenOf(id, key, values, usual) {
  const chosen = values.includes(state.get(key)) ? state.get(key) : usual;
  options($(id), values.map((value) => [value, value]), chosen);
  return chosen;
}

const QUALITY = [
  { key: "rank", title: "rank", value: ({ part }) => (part.rank ? part.rank[0] + part.rank[1] / 1e3 : null),
    cell: ({ run, part }) => el("td", { class: "rank" }, ranked(part) || (run.full ? "reference" : el("span", { class: "sub", title: part.unranked || null }, part.unranked.split(":")[0] || (run.unpriced ? "outside every budget" : "-")))) },
  { key: "score", title: "score, Δ to full attention", value: ({ part }) => part.score, cell: ({ run, part }) => scoreCell(run, part) },
  { key: "device", title: "device, MB", value: ({ part }) => part.cost.device, cell: ({ part }) => el("td", {}, scaled(part.cost.device, 1e6, 2)) },
  { key: "moved", title: "moved, KB/step", value: ({ part }) => part.cost.moved, cell: ({ part }) => el("td", {}, scaled(part.cost.moved, 1e3)) },
  { key: "share", title: "share of the cache", value: ({ part }) => part.cost.memory, cell: ({ part }) => el("td", {}, number(part.cost.memory)) },
  { key: "verified", title: "verified", value: ({ run }) => VERDICTS.indexOf(run.verdict), cell: ({ run }) => el("td", {}, verdictOf(run), " ", oldMark(run)) },
];
const SPEED = [
  { key: "tpot", title: "s/token", value: ({ run }) => run.audit.tpot_s, cell: ({ run }) => el("td", {}, number(run.audit.tpot_s, 4)) },
  { key: "rows", title: "rows in its batch", value: ({ run }) => run.audit.batch_rows_mean, cell: ({ run }) => el("td", {}, number(run.audit.batch_rows_mean, 1)) },
  { key: "prefill", title: "prefill, s", value: ({ run }) => run.audit.prefill_s, cell: ({ run }) => el("td", {}, number(run.audit.prefill_s, 2)) },
  { key: "device", title: "device, MB", value: ({ part }) => part.cost.device, cell: ({ part }) => el("td", {}, scaled(part.cost.device, 1e6, 2)) },
  { key: "moved", title: "moved, KB/step", value: ({ part }) => part.cost.moved, cell: ({ part }) => el("td", {}, scaled(part.cost.moved, 1e3)) },
  { key: "verified", title: "times", value: null, cell: ({ run }) => el("td", {}, el("span", { class: "badge" }, "self-reported"), " ", oldMark(run)) },
];

function drawBoard(list) {
  const dataset = chosenOf("board-dataset", "dataset-of", datasetsOf(list), datasetsOf(list)[0]);
  const budgets = budgetsOf(list);
  const counts = new Map(budgets.map((budget) => [budget, list.filter((run) => run.budget === budget).length]));
  const budget = chosenOf("budget", "budget", ["all budgets", ...budgets], budgets.sort((a, b) => counts.get(b) - counts.get(a))[0] || "all budgets");
  const track = state.get("track") === "speed" ? "speed" : "quality";
  $("track").value = track;
  $("machine-label").hidden = track !== "speed";
  const machines = unique(list.map((run) => run.machine)).sort(natural);
  const machine = chosenOf("machine", "machine", machines, machines[0]);
  const rows = list.filter((run) => run.full || budget === "all budgets" || run.budget === budget)
    .filter((run) => track === "quality" || (run.machine === machine && is(run.audit.tpot_s)))
    .map((run) => ({ run, method: run.method, part: run.parts.find((part) => part.dataset === dataset) })).filter(({ part }) => part);
  const metric = rows.length ? rows[0].part.metric : "score";
  const sign = lower(metric) ? 1 : -1;
  if (track === "quality") rows.sort((a, b) => Number(b.run.full) - Number(a.run.full) || Number(Boolean(a.run.superseded_by)) - Number(Boolean(b.run.superseded_by)) || sign * (a.part.score - b.part.score) || inOrder(a.run, b.run));
  else rows.sort((a, b) => a.run.audit.tpot_s - b.run.audit.tpot_s);
  const why = unique(rows.map(({ part }) => part.unranked).filter((words) => words.includes(":"))).join("; ");
  rows.forEach((row, i) => { row.tied = Boolean(row.part.rank && rows[i + 1] && String(rows[i + 1].part.rank) === String(row.part.rank)); });
  const comms = unique(rows.filter(({ run }) => !run.full).map(({ run }) => run.comm));
  const among = comms.length > 1 ? "Ranks are among runs of one comm. " : "";
  $("board-about").textContent = track === "quality" ? `${inUnit(metric)}; any hardware, ${rows.length} runs. ${among}${why}`
    : `Only runs of one machine and one set of versions: ${machine}. Seconds are of a batch that runs share.`;
  const first = { key: "run", title: "method", cell: ({ run }) => el("th", { scope: "row" }, mark(run.method), " ", link({ at: "samples", b: run.key, a: null, sample: null }, run.variant),
    el("span", { class: "sub" }, link({ at: "method", m: run.preset }, "about the method"), run.by ? ` · ${run.by}` : "")) };
  const columns = [first, ...(track === "quality" ? QUALITY : SPEED)];
  if (!rows.length) { $("board-table").replaceChildren(none("No run passes the filters.")); return; }
  $("board-table").replaceChildren(sheet("board-by", "Leaderboard", columns, rows, () => drawBoard(shown())));
  $("board-csv").onclick = () => save("kvbench-leaderboard.csv", "text/csv", csv([["id", "verified", "rank", ...Object.keys(COLUMNS)],
    ...rows.map(({ run, part }) => [run.id, run.verdict, ranked(part), ...Object.values(COLUMNS).map((of) => of(run, part))])]));
  $("board-tex").onclick = (event) => copy(texTable(["method", "rank", inUnit(metric), "device, MB"],
    rows.map(({ run, part }) => [run.variant, ranked(part) || "-", texCell(part), scaled(part.cost.device, 1e6, 2)]), `${dataset}, ${budget}. ${rows[0].run.group}`, `board-${dataset}`), event.currentTarget);
}

// A method: what its card says, and how it did on every benchmark.
const badge = (text) => [el("span", { class: "badge" }, text), " "];

// Full attention is the line at 0: differences to it, in the benchmark's points, by the share of the cache.
function multiple(about, rows) {
  const found = rows.filter((row) => is(row.mean) && is(row.share));
  if (!found.length) return null;
  const most = Math.max(10, ...found.map((row) => Math.abs(row.mean)));
  const x = (share) => 6 + 188 * Math.min(1, share);
  const y = (mean) => 50 - (44 * mean) / most;
  const text = found.map((row) => `${row.variant}: ${signed(row.mean, 1)} at ${number(row.share, 2)} of the cache`).join("; ");
  return el("figure", {},
    svg("svg", { viewBox: "0 0 200 100", role: "img", "aria-label": text },
      svg("line", { x1: 0, x2: 200, y1: 50, y2: 50, stroke: css("--muted"), "stroke-dasharray": "3 3" }),
      found.map((row) => svg("circle", { cx: x(row.share), cy: y(row.mean), r: 4, fill: row.less ? css("--bad") : css("--accent") }))),
    el("figcaption", {}, link({ at: "board", bench: about.id, view: null }, `${about.task} · ${about.model}`), ` · Δ to full attention, up to ±${number(most, 0)}; red: shown to be worse`));
}

async function drawMethod() {
  const [cards, evidence] = await Promise.all([once("data-methods"), once("data-evidence", rowsOf)]);
  const names = unique([...Object.keys(cards), ...evidence.map((row) => row.method)]).sort(natural);
  const name = names.includes(state.get("m")) ? state.get("m") : names[0];
  options($("method-choice"), names.map((one) => [one, one]), name);
  const card = cards[name];
  const own = card ? card.name : name;
  const rows = evidence.filter((row) => row.method === own || row.method === name);
  const traits = [...(card ? card.traits : ["a file of its author's"]), rows.some((row) => row.whole) ? "leaves layers whole" : null,
    rows.some((row) => row.host) ? "host memory" : null, rows.some((row) => row.learned) ? "learned or calibrated" : null].filter(Boolean);
  const golden = card ? (card.golden ? "compared with vectors of the authors' code" : "no vectors of the authors' code") : "conformance kit alone";
  const multiples = index.benchmarks.map((about) => multiple(about, rows.filter((row) => row.at === about.id))).filter(Boolean);
  $("method-card").replaceChildren(
    el("h2", {}, card ? card.title : name),
    el("p", {}, [golden, ...traits].flatMap(badge)),
    card ? el("p", {}, card.idea) : "",
    card ? el("dl", {}, Object.entries(card.parts).flatMap(([key, text]) => [el("dt", {}, key), el("dd", {}, text)])) : "",
    card && card.paper ? el("p", {}, card.paper, " ", card.link ? el("a", { href: card.link, rel: "noreferrer" }, card.link) : "") : "",
    card ? el("div", { class: "titled" }, el("pre", { class: "command" }, card.command), button("copy command", (event) => copy(card.command, event.currentTarget))) : "",
    card && card.bibtex ? el("div", { class: "titled" }, el("pre", { class: "command" }, card.bibtex), button("copy BibTeX", (event) => copy(card.bibtex, event.currentTarget))) : "",
    el("h3", {}, "On every benchmark"),
    multiples.length ? el("div", { class: "multiples" }, multiples) : none("No run of it stands beside full attention."));
}

// One run: how far it is believed, where it comes from, what it answered beside full attention.
async function drawRun() {
  const [a, b] = chosenRuns(runs);
  drawRunChoice(runs);
  await drawSamples();
  if (!b) return;
  const origin = JSON.parse(await unpack(`data-origin-${b.i}`));
  const facts = [["id", b.id], ["handed in by", b.by], ["verified", b.verdict], ["why no more", b.why], ["superseded by", b.superseded_by], ["machine", b.machine]];
  $("origin").replaceChildren(el("p", {}, verdictOf(b), " ", oldMark(b)),
    el("dl", {}, facts.filter(([, value]) => value).flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)])), ...originOf(origin));
  const about = index.benchmarks.find((one) => one.id === bench);
  $("cut").textContent = about ? about.cut : "";
}

// A shortlist from what somebody has: each method with the runs that speak for it.
const NEEDS = {
  memory: ["Memory for the cache", { "0.1": "a tenth", "0.25": "a quarter", "0.5": "a half", "1": "all of it" }],
  link: ["Link to host memory", { none: "none", host: "there is one" }],
  many: ["Questions on a context", { one: "one", many: "many" }],
  long: ["Answers", { short: "short", long: "long: they fill the memory too" }],
};
const USUAL_NEEDS = { memory: "0.25", link: "none", many: "one", long: "short" };
const needed = (key) => (state.get(key) in NEEDS[key][1] ? state.get(key) : USUAL_NEEDS[key]);

const meets = (row) => row.share <= Number(needed("memory")) * 1.1 && (needed("link") === "host" || !row.host)
  && (needed("many") === "one" ? true : !row.question) && (needed("long") === "short" ? !row.of_answers : row.of_answers) && !row.over;

async function drawWhich() {
  const evidence = await once("data-evidence", rowsOf);
  $("needs").replaceChildren(...Object.entries(NEEDS).map(([key, [title, choices]]) => {
    const select = el("select", { id: `need-${key}`, onchange: (event) => { setState({ [key]: event.target.value }); drawWhich().then(() => $(`need-${key}`).focus()); } });
    options(select, Object.entries(choices).sort((x, y) => Number(x[0]) - Number(y[0]) || 0), needed(key));
    return el("label", {}, title, " ", select);
  }));
  const methods = new Map();
  for (const row of evidence.filter(meets)) grouped(methods, row.method).push(row);
  const rows = [...methods].map(([method, found]) => {
    const compared = found.filter((row) => is(row.less));
    const worse = compared.filter((row) => row.less).length;
    return { method, found, compared, worse, held: compared.length ? 1 - worse / compared.length : -1,
      mean: compared.length ? compared.reduce((sum, row) => sum + row.mean, 0) / compared.length : null };
  }).sort((x, y) => y.held - x.held || (y.mean ?? -1e9) - (x.mean ?? -1e9) || natural(x.method, y.method)).slice(0, 12);
  if (!rows.length) { $("shortlist").replaceChildren(none("No run meets all four. Give it more memory, or see what a link to the host allows.")); return; }
  const names = new Map(index.benchmarks.map((one) => [one.id, `${one.task} · ${one.model}`]));
  $("shortlist").replaceChildren(sheet("which-by", "Shortlist", [
    { key: "method", title: "method", cell: ({ method }) => el("th", { scope: "row" }, link({ at: "method", m: method }, method)) },
    { key: "held", title: "not shown to be worse", value: (row) => row.held, cell: ({ compared, worse }) => el("td", {}, compared.length ? `${compared.length - worse} of ${compared.length} runs` : "not compared") },
    { key: "mean", title: "mean Δ to full attention", value: (row) => row.mean, cell: ({ mean }) => el("td", {}, is(mean) ? signed(mean, 1) : "-") },
    { key: "evidence", title: "evidence", cell: ({ found }) => el("td", {}, el("details", {}, el("summary", {}, `${found.length} runs`), el("ul", {}, found.slice(0, 40).map((row) =>
      el("li", {}, link({ at: "samples", bench: row.at, b: row.key, a: null, sample: null }, `${names.get(row.at)}: ${row.variant}`), ` ${number(row.score, 1)}, n ${row.n}, ${is(row.p) ? `p ${pWords(row.p, row.p_is_bound)}` : "not compared"}`))))) },
  ], rows, drawWhich));
}

// All together: the address says which page of which benchmark; its data are loaded, and it is drawn.
const PAGES = { board: "Leaderboard", results: "Trade-off", method: "Method", samples: "Run", which: "Which method?", changes: "Changes" };
const OF_BENCHMARK = ["board", "results", "samples"];
const ALIKE = { provenance: "samples", scores: "board" }; // what links of the report call pages here
const MOST_STANDING = 8;
let index = { benchmarks: [], changes: [] };
let results = { view: null, rows: [] };
let drawing = Promise.resolve();
const pageOf = () => { const at = ALIKE[state.get("at")] || state.get("at"); return at in PAGES ? at : "board"; };

// --- which benchmark ---

const CHOICE = { model: "model", task: "task", where: "where" };
function chooseBenchmark() {
  const wanted = index.benchmarks.find((one) => one.id === state.get("bench")) || null;
  let left = index.benchmarks;
  for (const [id, key] of Object.entries(CHOICE)) {
    const values = unique(left.map((one) => one[key])).sort(natural);
    options($(id), [...(id === "model" && !wanted ? [["", "choose a model"]] : []), ...values.map((value) => [value, value])], wanted ? wanted[key] : "");
    if (!wanted) { $(id).disabled = id !== "model" && left.length !== 1; } else { $(id).disabled = false; left = left.filter((one) => one[key] === wanted[key]); }
  }
  return wanted;
}

// The benchmark that has what was chosen, and of the others as much as there is.
function pick(id) {
  const keys = Object.entries(CHOICE);
  const chosen = Object.fromEntries(keys.map(([node, key]) => [key, $(node).value]));
  const most = Object.keys(CHOICE).indexOf(id);
  const fits = (one) => keys.slice(0, most + 1).every(([, key]) => one[key] === chosen[key]);
  const alike = (one) => keys.slice(most + 1).filter(([, key]) => one[key] === chosen[key]).length;
  const found = index.benchmarks.filter(fits).sort((a, b) => alike(b) - alike(a) || b.n - a.n)[0];
  if (found) go({ bench: found.id, view: null, budget: null, "dataset-of": null, machine: null, a: null, b: null, sample: null, dataset: null, ...Object.fromEntries(Object.keys(FILTERS).map((key) => [`hide.${key}`, null])) });
}

async function open(id) {
  if (bench === id) return;
  bench = id;
  asked = null;
  origins = null;
  pieces.clear();
  await readOverview();
  $("filters").replaceChildren();
  buildFilters();
  for (const menu of $("filters").querySelectorAll("details")) if (menu.querySelectorAll("input").length < 2) menu.remove();
}

// --- the pages ---

// Eight methods stand out: those on the front, then the best of each; hovering over a name lights that one.
standingOut = (rows) => {
  const best = new Map();
  for (const [run, part] of rows) {
    if (!is(part.score)) continue;
    const worth = (part.front.length ? 1e9 : 0) + (lower(part.metric) ? -1 : 1) * part.score;
    best.set(run.method, Math.max(worth, best.get(run.method) ?? -Infinity));
  }
  if (best.size <= MOST_STANDING + 1) return null;
  const names = [...best].filter(([name]) => name !== "full").sort((x, y) => y[1] - x[1]).slice(0, MOST_STANDING).map(([name]) => name);
  return new Set(["full", ...names]);
};

async function drawTradeOff() {
  if (!specs) await loadCharts();
  results = drawResults(shown());
  const standing = standingOut(results.rows);
  $("eight").textContent = standing ? `${standing.size - 1} of ${unique(results.rows.map(([run]) => run.method)).length} methods stand out: those on the front, then the best. Hover over a name, or focus it, and that method does; a click takes it out.` : "";
  listenToNames();
  await drawScores(results);
  document.documentElement.dataset.charts = String(Number(document.documentElement.dataset.charts || 0) + 1);
}

// A name below the charts lights its method while it is pointed at; only the charts are drawn again.
let pointed = "";
let pointing = 0;
function listenToNames() {
  const names = unique(results.rows.map(([run]) => run.method));
  [...$("legend").children].forEach((node, i) => {
    const light = (method) => { clearTimeout(pointing); pointing = setTimeout(() => {
      if (pointed === method || pageOf() !== "results") return;
      pointed = method;
      const before = state.get("lit");
      if (method) state.set("lit", method);
      drawing = drawing.then(() => drawScores(results)).then(() => { if (before) state.set("lit", before); else state.delete("lit"); });
    }, 60); };
    for (const kind of ["mouseenter", "focus"]) node.addEventListener(kind, () => light(names[i] || ""));
    for (const kind of ["mouseleave", "blur"]) node.addEventListener(kind, () => light(""));
  });
}

function drawChanges() {
  const rows = index.changes.map(([kind, words]) => el("li", {}, el("span", { class: "badge" }, kind), " ", words));
  $("change-list").replaceChildren(rows.length ? el("ul", {}, rows) : none("Nothing, or it was compared with none."));
}

const DRAW = { board: () => drawBoard(shown()), results: drawTradeOff, method: drawMethod, samples: drawRun, which: drawWhich, changes: drawChanges };

async function drawPage() {
  const at = pageOf();
  const wanted = chooseBenchmark();
  for (const section of document.querySelectorAll("main > section")) section.classList.toggle("here", section.id === at && (Boolean(wanted) || !OF_BENCHMARK.includes(at)));
  $("pages").replaceChildren(...Object.entries(PAGES).map(([id, title]) => { const node = link({ at: id }, title); if (id === at) node.setAttribute("aria-current", "page"); return node; }));
  $("choice").hidden = !OF_BENCHMARK.includes(at);
  $("filters").hidden = !["board", "results"].includes(at) || !wanted;
  $("waiting").textContent = "";
  if (OF_BENCHMARK.includes(at)) {
    if (!wanted) { $("waiting").textContent = "Choose a model and a benchmark."; return; }
    if (bench !== wanted.id) $("waiting").textContent = "Loading…";
    await open(wanted.id);
    $("waiting").textContent = "";
    readFilters();
    const list = shown();
    $("count").textContent = `${list.length} of ${runs.length} runs`;
  }
  await DRAW[at]();
}

let n = 0;
function update() {
  drawing = drawing.then(drawPage).catch((error) => { $("waiting").textContent = error.message; }).then(() => { n += 1; document.documentElement.dataset.drawn = String(n); });
  return drawing;
}
const redraw = update;

function show() {
  $("which-samples").value = state.get("which") || "all";
  $("find").value = state.get("find") || "";
  limit = PAGE;
  closeCard();
  if (state.get("at") === "provenance" && state.get("run")) setState({ at: "samples", b: state.get("run"), run: null });
  const before = document.querySelector("main > section.here");
  update().then(() => {
    const here = document.querySelector("main > section.here");
    if (here && before && here !== before) { window.scrollTo(0, 0); here.focus({ preventScroll: true }); }
  });
}

function listen() {
  listenToTheme(() => { applyTheme(); update(); });
  listenToCards();
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); go({ at: "board" }); });
  for (const id of Object.keys(CHOICE)) $(id).addEventListener("change", () => pick(id));
  const reads = { view: "view", "budget-chart-axis": "budget-chart", "cost-chart-axis": "cost-chart", "run-a": "a", "run-b": "b", "which-samples": "which", dataset: "dataset",
    "board-dataset": "dataset-of", budget: "budget", track: "track", machine: "machine", "method-choice": "m" };
  for (const [id, key] of Object.entries(reads)) $(id).addEventListener("change", (event) => { setState({ [key]: event.target.value }); limit = PAGE; update(); });
  for (const id of ["run-a", "run-b"]) for (const event of ["focus", "mousedown", "touchstart"]) $(id).addEventListener(event, () => fillRunChoice($(id)), { passive: true });
  $("find").addEventListener("input", (event) => { setState({ find: event.target.value }); limit = PAGE; drawSamples(); });
  for (const id of Object.keys(AXES)) $(`${id}-svg`).addEventListener("click", () => saveChart(id));
  $("copy-address").addEventListener("click", (event) => copy(location.href, event.currentTarget));
  $("choice").addEventListener("submit", (event) => event.preventDefault());
  for (const event of ["popstate", "hashchange"]) window.addEventListener(event, () => { if (location.hash !== seenHash) { readState(); show(); } });
}

async function start() {
  applyTheme();
  readState();
  index = await once("data-index");
  metrics = index.metrics;
  $("summary").textContent = `${index.n} runs of ${index.benchmarks.length} benchmarks`;
  if (index.benchmarks.length === 1 && !state.get("bench")) setState({ bench: index.benchmarks[0].id });
  listen();
  show();
  await drawing;
  document.documentElement.dataset.readyMs = String(Math.round(performance.now()));
}
start();

})();
