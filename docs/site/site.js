"use strict";
const $ = (id) => document.getElementById(id);
function fillNode(node, attributes, children) {
for (const [key, value] of Object.entries(attributes || {})) {
if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
}
node.append(...children.flat().filter((child) => child !== null && child !== undefined).map(visible));
return node;
}
const OBEYED = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const visible = (child) => (typeof child === "string" ? child.replace(OBEYED, (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`) : child);
const el = (tag, attributes, ...children) => fillNode(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
fillNode(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const button = (text, onclick, more) => el("button", { type: "button", onclick, ...more }, text);
const none = (text) => el("p", { class: "none" }, text);
const unique = (values) => [...new Set(values)];
function grouped(lists, key) {
if (!lists.has(key)) lists.set(key, []);
return lists.get(key);
}
const is = (value) => value !== null && value !== undefined;
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
const arriving = new Map();
window.kvbench = (path, text) => { if (arriving.has(path)) arriving.get(path)(text); };
const loadScript = (src) => new Promise((done, fail) => {
const node = el("script", { src, onload: done, onerror: () => fail(new Error(`${src} cannot be loaded`)) });
document.head.append(node);
});
const packedText = (path) => ($(path) ? Promise.resolve($(path).textContent) : new Promise((done, fail) => {
arriving.set(path, done);
loadScript(`data/${path}.js`).catch((error) => { once.kept.delete(path); fail(error); });
}));
let coming = null;
const more = () => (typeof drawRun === "function" ? Promise.resolve() : (coming = coming || loadScript("more.js")));
async function unpack(path) {
const text = atob(await packedText(path));
const bytes = new Uint8Array(text.length);
for (let i = 0; i < text.length; i += 1) bytes[i] = text.charCodeAt(i);
const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
return JSON.parse(await new Response(stream).text());
}
function once(path, make = (tree) => tree) {
if (!once.kept.has(path)) once.kept.set(path, unpack(path).then(make));
return once.kept.get(path);
}
once.kept = new Map();
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
function setState(changes, push) {
const to = address(changes);
if (to === location.hash || (to === "#" && !location.hash)) return;
history[push ? "pushState" : "replaceState"](null, "", to);
readState();
}
const asList = (words) => [...words].map((word) => word.replace(/[%,]/g, encodeURIComponent)).join(",");
const fromList = (text) => (text ? text.split(",").map(decodeURIComponent) : []);
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
const colourOf = (method) => looks[method][dark() ? "dark" : "light"];
const CIRCLE = "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0Z";
const shapeOf = (method) => looks[method].shape.replace("circle", CIRCLE);
const mark = (method) => svg("svg", { viewBox: "-1.3 -1.3 2.6 2.6", width: 14, height: 14, "aria-hidden": "true" },
svg("path", { d: shapeOf(method), fill: colourOf(method) }));
const words = (x, y, text, more) => svg("text", { x, y, fill: css("--muted"), "font-size": 12, ...more }, text);
const CLOSE = 11; // pixels: marks that are closer stand side by side
function ticksOf([low, high], { isLog, halves }) {
if (isLog && high / low > 3) {
const found = [];
if (halves) for (let at = 2 ** Math.ceil(Math.log2(low) - 1e-9); at <= high * 1.0001; at *= 2) found.push(at);
else for (let at = 10 ** Math.floor(Math.log10(low)); at <= high; at *= 10) found.push(...[1, 2, 5].map((n) => n * at).filter((n) => n >= low && n <= high));
if (found.length > 1) return found;
}
const rough = (high - low) / 5 || 1;
const unit = 10 ** Math.floor(Math.log10(rough));
const step = unit * [1, 2, 5, 10].find((n) => n * unit >= rough);
const found = [];
for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step);
return found;
}
const fraction = (value) => (value < 0.9 && Math.abs(Math.log2(value) % 1) < 1e-9 ? `1/${Math.round(1 / value)}` : plain(value));
const plain = (value) => String(Number(value.toPrecision(3)));
function short(value) {
const unit = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => Math.abs(value) >= size) || [1, ""];
return plain(value / unit[0]) + unit[1];
}
function domainOf(values, isLog, include = []) {
const all = [...values, ...include].filter(is);
const [low, high] = [Math.min(...all), Math.max(...all)];
if (isLog) { const room = Math.max((high / low) ** 0.06, 1.06); return [low / room, high * room]; }
const room = (high - low || Math.abs(high) || 1) * 0.06;
return [low - room, high + room];
}
function scaleOf([low, high], [from, to], isLog) {
const of = isLog ? Math.log : Number;
return (value) => from + ((of(value) - of(low)) / (of(high) - of(low))) * (to - from);
}
function spread(points, room) {
const groups = [];
for (const point of [...points].sort((a, b) => a.px - b.px)) {
const last = groups[groups.length - 1];
if (last && point.px - last[0].px < CLOSE) last.push(point); else groups.push([point]);
}
const middles = groups.map((group) => group.reduce((sum, point) => sum + point.px, 0) / group.length);
groups.forEach((group, i) => {
const near = Math.min(...[middles[i - 1], middles[i + 1]].filter(is).map((other) => Math.abs(other - middles[i])), room);
const step = Math.min(15, (0.8 * near) / group.length);
const start = Math.min(Math.max(middles[i] - (step * (group.length - 1)) / 2, CLOSE), Math.max(CLOSE, room - step * (group.length - 1) - CLOSE));
if (group.length > 1) group.sort((a, b) => b.y - a.y).forEach((point, j) => { point.px = start + j * step; });
});
return groups.some((group) => group.length > 1);
}
function plot(id, { x, y, points, front = [], level = null, label, height = 360, isSmall = false }) {
const node = typeof id === "string" ? $(id) : id;
const width = Math.max(200, node.clientWidth || 320);
const box = isSmall ? { left: 34, right: 8, top: 22, bottom: 36 } : { left: 46, right: 14, top: 26, bottom: 46 };
const right = width - box.right;
const bottom = height - box.bottom;
const xs = domainOf(points.map((point) => point.x), x.isLog, x.include);
const ys = domainOf(points.flatMap((point) => [point.y, point.low, point.high]), false, y.include);
const at = { x: scaleOf(xs, [0, right - box.left], x.isLog), y: scaleOf(ys, [bottom, box.top], false) };
for (const point of points) point.px = at.x(point.x);
const isSpread = !isSmall && spread(points, right - box.left);
for (const point of points) Object.assign(point, { px: box.left + point.px, py: at.y(point.y) });
const line = (x1, y1, x2, y2, stroke, more) => svg("line", { x1, y1, x2, y2, stroke, ...more });
const grid = [
...ticksOf(ys, y).flatMap((tick) => [line(box.left, at.y(tick), right, at.y(tick), css("--line")),
words(box.left - 6, at.y(tick) + 4, (y.show || plain)(tick), { "text-anchor": "end" })]),
...ticksOf(xs, x).flatMap((tick) => { const px = box.left + at.x(tick); return [line(px, bottom, px, bottom + 4, css("--muted")),
words(px, bottom + 17, (x.show || plain)(tick), { "text-anchor": "middle" })]; }),
line(box.left, bottom, right, bottom, css("--muted")),
words(isSmall ? 4 : 8, 13, y.title, { fill: css("--text") }),
words((box.left + right) / 2, height - 6, x.title, { "text-anchor": "middle", fill: css("--text") }),
is(level) ? line(box.left, at.y(level), right, at.y(level), css("--text"), { "stroke-dasharray": "3 3", opacity: 0.6, class: "level" }) : null,
];
const steps = front.map((point, i) => `${i ? `H${point.px}V${point.py}` : `M${point.px},${point.py}`}`).join("");
const band = front.length > 1 ? svg("path", { d: steps, fill: "none", stroke: css("--text"), "stroke-width": 7, opacity: 0.18, class: "front" }) : null;
const series = new Map();
for (const point of points) if (point.series) grouped(series, point.series).push(point);
const joined = [...series.values()].filter((each) => each.length > 1).map((each) => svg("polyline", {
points: each.sort((a, b) => a.x - b.x).map((point) => `${point.px},${point.py}`).join(" "), fill: "none", stroke: colourOf(each[0].method),
"stroke-width": 1.6, "stroke-dasharray": looks[each[0].method].dash || null, opacity: each[0].faint ? 0.2 : 0.8, "data-method": each[0].method }));
const bars = points.filter((point) => is(point.low) && point.high > point.low).map((point) => line(point.px, at.y(point.low), point.px, at.y(point.high),
colourOf(point.method), { "stroke-width": 1.6, opacity: point.faint ? 0.18 : 0.75, class: "bar", "data-method": point.method }));
const tip = el("div", { class: "tip", hidden: true });
const order = [...points].sort((a, b) => Number(b.faint) - Number(a.faint));
const marks = order.map((point, i) => markOf(point, i, tip, width, isSmall));
node.replaceChildren(svg("svg", { width, height, role: isSmall ? "img" : "group", "aria-label": label, "font-family": getComputedStyle(document.body).fontFamily,
onkeydown: isSmall ? null : (event) => walkMarks(event, order, marks) }, grid, band, joined, bars, marks), tip);
return isSpread;
}
function markOf(point, i, tip, width, isSmall) {
const colour = colourOf(point.method);
const r = point.size || (isSmall ? 4 : 5.5);
const show = () => {
tip.replaceChildren(...point.text.split("\n").map((text, j) => el(j ? "div" : "strong", {}, text)));
tip.hidden = false;
tip.style.left = `${Math.max(0, Math.min(point.px + 12, width - tip.offsetWidth))}px`;
tip.style.top = `${point.py + 14}px`;
};
const shape = svg("path", { d: shapeOf(point.method), transform: `translate(${point.px.toFixed(1)},${point.py.toFixed(1)}) scale(${r})`, stroke: colour,
"stroke-width": 2 / r, fill: point.hollow ? css("--surface") : colour, opacity: point.faint ? 0.35 : 1, "data-method": point.method });
if (isSmall) return shape;
const hide = () => { tip.hidden = true; };
const open = (event) => point.pick(event.currentTarget);
return fillNode(shape, { class: "mark", tabindex: i === 0 ? 0 : -1, role: "button", "aria-label": point.text.replaceAll("\n", ", "),
onclick: open, onpointerenter: show, onpointerleave: hide, onfocus: show, onblur: hide,
onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(event); } } }, []);
}
function walkMarks(event, points, marks) {
const [key, sign] = { ArrowRight: ["px", 1], ArrowLeft: ["px", -1], ArrowDown: ["py", 1], ArrowUp: ["py", -1] }[event.key] || [];
const here = points[marks.indexOf(event.target)];
if (!key || !here) return;
event.preventDefault();
const other = key === "px" ? "py" : "px";
const place = (point) => [sign * point[key], point[other], points.indexOf(point)];
const before = (a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2];
const next = points.filter((point) => before(place(point), place(here)) > 0).sort((a, b) => before(place(a), place(b)))[0];
if (!next) return;
event.target.setAttribute("tabindex", -1);
const node = marks[points.indexOf(next)];
node.setAttribute("tabindex", 0);
node.focus();
}
const CIVIDIS = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]];
function heatColour(share) {
const at = Math.min(1, Math.max(0, share)) * (CIVIDIS.length - 1);
const i = Math.min(CIVIDIS.length - 2, Math.floor(at));
return `rgb(${CIVIDIS[i].map((value, k) => Math.round(value + (at - i) * (CIVIDIS[i + 1][k] - value))).join()})`;
}
function heatMaps(id, { panels, columns, rows, xTitle, yTitle, label }) {
const [left, top, wide, high] = [46, 22, 190, 130];
const [panelWidth, panelHeight] = [left + wide + 16, top + high + 56];
const across = Math.max(1, Math.min(panels.length, Math.floor($(id).clientWidth / panelWidth)));
const [w, h] = [wide / columns.length, high / rows.length];
const drawn = panels.map(({ title, cells }, i) => {
const middle = left + wide / 2;
return svg("g", { class: "panel", transform: `translate(${(i % across) * panelWidth},${Math.floor(i / across) * panelHeight})` },
words(middle, 14, title.length > 30 ? `${title.slice(0, 29)}…` : title, { "text-anchor": "middle", fill: css("--text"), class: "title" }, svg("title", {}, title)),
cells.map((cell) => svg("rect", { x: left + columns.indexOf(cell.column) * w, y: top + rows.indexOf(cell.row) * h, width: w, height: h,
fill: heatColour(cell.share), stroke: css("--surface") }, svg("title", {}, cell.text))),
columns.map((name, k) => words(0, 0, name, { "text-anchor": "end", class: "column", transform: `translate(${left + (k + 0.5) * w + 4},${top + high + 12}) rotate(-40)` })),
rows.map((name, k) => words(left - 4, top + (k + 0.5) * h + 4, name, { "text-anchor": "end" })),
words(middle, top + high + 48, xTitle, { "text-anchor": "middle" }), i % across ? null : words(0, 0, yTitle, { "text-anchor": "middle", transform: `translate(10,${top + high / 2}) rotate(-90)` }));
});
const [width, height] = [across * panelWidth, Math.ceil(panels.length / across) * panelHeight];
const key = [0, 25, 50, 75, 100].flatMap((score, i) => [svg("rect", { x: left + i * 38, y: height + 6, width: 38, height: 10, fill: heatColour(score / 100) }),
words(left + (i + 0.5) * 38, height + 30, score, { "text-anchor": "middle" })]);
$(id).replaceChildren(svg("svg", { width, height: height + 36, role: "img", "aria-label": label, "font-family": getComputedStyle(document.body).fontFamily }, drawn, key));
}
function saveChart(id) {
const drawn = $(id).querySelector("svg");
if (!drawn) return;
const copied = drawn.cloneNode(true);
copied.setAttribute("xmlns", "http://www.w3.org/2000/svg");
copied.setAttribute("style", `background:${css("--surface")}`);
save(`kvbench-${id}.svg`, "image/svg+xml", new XMLSerializer().serializeToString(copied));
}
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
const inUnit = (metric) => `${metric}${isShare(metric) ? ", 0 to 100" : ""}${lower(metric) ? ", lower is better" : ""}`;
const fullFor = (run) => run.bench.runs.find((one) => one.full && one !== run);
const inOrder = (a, b) =>
Number(b.full) - Number(a.full) || natural(a.label, b.label) || (a.size || 0) - (b.size || 0)
|| (a.comm_size || 0) - (b.comm_size || 0);
const goneMethods = () => fromList(state.get("hide"));
const shown = (list = runs) => {
const gone = new Set(goneMethods());
const [name, comm] = [(state.get("q") || "").trim().toLowerCase(), state.get("comm")];
return list.filter((run) => !gone.has(run.method)
&& (run.full || (`${run.label} ${run.method}`.toLowerCase().includes(name) && (!comm || run.comm === comm))));
};
function hide(methods) {
setState({ hide: asList(methods) });
update();
}
const tone = (part) => (part.paired ? { 1: "good", "-1": "bad", 0: "" }[lower(part.metric) ? -part.paired.sign : part.paired.sign] : "");
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
const kept = quality(run, part);
return [
["score", `${number(part.score, digits(part.metric))} ${part.metric === "score" ? "" : part.metric}`],
["95 %", part.ci ? range(part.ci, digits(part.metric)) : part.n === 1 ? "none: one sample says nothing of the spread" : "-"],
["samples", part.of ? `${part.n}, of ${part.of.length} datasets that count alike` : String(part.n)],
["Δ vs full attention", pair ? difference(part) : run.full ? null : "no sample with the same prompt"],
["test", pair ? verdict(part) : null],
["uncorrected", pair ? `p ${pWords(pair.p, pair.p_is_bound)}` : null],
["quality kept", kept ? `${number(kept.value, 2)}${is(kept.low) ? ` (${range([kept.low, kept.high], 2)})` : ""} of full attention's ${kept.base}` : null],
["pairs", pair ? `${pair.more} above full attention, ${pair.same} equal, ${pair.less} below` : null],
["standing", STANDINGS[part.standing]],
["bytes held", is(part.cost.memory) ? `${number(part.cost.memory)} of the full cache's` : null],
["device", is(part.cost.device) ? `${scaled(part.cost.device, 1e6, 2)} MB` : null],
["tokens", is(part.cost.tokens) ? `${number(part.cost.tokens, 1)} attended per step${run.full ? "" : `, ${number(run.audit.tokens_budget_mean, 1)} of the prompt allowed`}` : null],
["moved", is(part.cost.moved) ? `${scaled(part.cost.moved, 1e3)} KB per step` : null],
["budget", part.over ? "! exceeded" : null],
["layers", run.whole_layers ? `the first ${run.whole_layers} are not compressed and lie outside the budget` : null],
["search", run.unpriced ? "reads all keys, outside every budget: a reference, on no front" : null],
["believed", run.kept ? `${believed(run.verdict)}: only scores are kept, no answers` : `${believed(run.verdict)}${run.why ? `: ${run.why}` : ""}`],
["memory", run.n_oom ? `${run.n_oom} samples ran out of memory` : null],
].filter(([, value]) => value);
}
function toSamples(run, part) {
const full = fullFor(run);
const dataset = part && !part.of ? part.dataset : null;
return { bench: run.bench.id, a: (full || run).key, b: run.key, dataset, sample: null, at: "samples" };
}
let cardFrom = null;
function openCard(run, part, from) {
cardFrom = from;
const rows = facts(run, part).flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)]);
const command = el("div", { class: "titled" });
const close = button("✕", closeCard, { "aria-label": "close", class: "close" });
$("card").replaceChildren(close,
el("h3", {}, run.variant), el("p", { class: "hint" }, [run.task, part.dataset, run.group].filter((text, i, all) => all.indexOf(text) === i).join(" · ")),
el("dl", {}, rows), command,
el("p", { class: "links" }, link(toSamples(run, part), run.kept ? "scores of its samples" : "answers and origin"), link({ at: "method", m: run.preset }, "about the method")));
more().then(() => originOf(run)).then((origin) => command.replaceChildren(...commandOf(origin)));
$("card").hidden = false;
close.focus({ preventScroll: true });
}
function closeCard() {
$("card").hidden = true;
if (cardFrom && cardFrom.isConnected) cardFrom.focus({ preventScroll: true });
cardFrom = null;
}
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
function sortedBy(name, usual) {
const [, sign, key] = /^(-?)(.*)$/s.exec(state.get(name) || usual);
return [key, sign ? -1 : 1];
}
function sortable(name, { key, title, more }, by, direction, redraw) {
const sort = button(title, (event) => {
const i = [...event.currentTarget.closest("tr").children].indexOf(event.currentTarget.closest("th"));
const place = event.currentTarget.closest("[id]").id;
setState({ [name]: by === key && direction > 0 ? `-${key}` : key });
Promise.resolve(redraw()).then(() => {
const again = document.querySelector(`#${place} thead tr`).children[i];
if (again) again.querySelector("button").focus();
});
});
return el("th", { scope: "col", "aria-sort": key === by ? (direction > 0 ? "ascending" : "descending") : null }, sort, more || []);
}
const lit = () => state.get("lit") || "";
const isLit = (method) => is(method) && method === lit();
const nameCell = (method, text) => el("th", { scope: "row" },
button([mark(method), " ", text], () => { setState({ lit: isLit(method) ? null : method }); update(); }, { class: "name", "aria-pressed": String(isLit(method)) }));
const X_AXES = {
memory: { title: "bytes held, share of the full cache", halves: true, show: fraction, include: [1] },
device: { title: "keys, values and index on the device, bytes", show: short },
moved: { title: "moved and searched per step, bytes", show: short },
reads: { title: "on the device and moved per step, bytes", show: short },
resident: { title: "keys, values and index, device and host, bytes", show: short },
tokens: { title: "tokens attended per step and head", show: short },
share: { title: "share of the tokens attended", show: fraction },
tpot: { title: "seconds per output token (of a shared batch)", show: plain },
};
const Y_AXES = { quality: "quality kept", score: "score" };
const costOf = (run, part, axis) => (axis === "tpot" ? run.audit.tpot_s : part.cost[axis]);
const VERDICTS = ["only reported", "self-reported", "rescored", "budget proven", "reproduced"];
const BELIEVED = { "self-reported": "only reported", rescored: "verified: rescored", "budget proven": "verified: budget proven" };
const believed = (verdict) => BELIEVED[verdict] || verdict;
const verdictOf = (run) => el("span", { class: `badge ${run.verdict.split(" ").pop()}`, title: run.why || (run.kept ? "scores are kept, no answers" : null) }, believed(run.verdict));
const oldMark = (run) => (run.superseded_by ? el("span", { class: "badge old" }, `superseded by ${run.superseded_by}`) : null);
const ranked = (part) => (part.rank ? (part.rank[0] === part.rank[1] ? String(part.rank[0]) : `${part.rank[0]}–${part.rank[1]}`) : null);
const MOST_STANDING = 8;
let fromRandom = false;
function quality(run, part) {
if (run.full) return { value: 1, base: "score" };
const lead = part.base && part.base[fromRandom ? 1 : 0];
if (!part.paired || !(lead > 0)) return null;
const of = (difference) => 1 + difference / lead;
const [low, high] = part.paired.ci ? part.paired.ci.map(of) : [null, null];
return { value: of(part.paired.mean), low, high, base: fromRandom ? "lead over random tokens" : "score" };
}
function aboutQuality(rows) {
const compressed = rows.filter(([run]) => !run.full);
const has = ([, part]) => part.base && is(part.base[1]);
fromRandom = compressed.length > 0 && compressed.every(has);
if (fromRandom) return "Quality kept is (score - random) / (full attention - random): 0 is random tokens under the same budget, 1 full attention.";
const budgets = unique(compressed.filter(has).map(([run]) => run.budget));
const where = !budgets.length ? "random tokens were not asked here" : `random tokens were asked at ${budgets.join(" and ")} alone: choose that budget to count from them`;
return `Quality kept is the score as a share of full attention's: ${where}.`;
}
function slower(run) {
const full = fullFor(run);
const alike = full && !run.kept && full.machine === run.machine && full.audit.batch_rows_mean === run.audit.batch_rows_mean;
return alike && run.audit.tpot_s && full.audit.tpot_s ? run.audit.tpot_s / full.audit.tpot_s : null;
}
const sizeOf = (ratio) => Math.min(11, Math.max(3, 6 * Math.sqrt(ratio)));
const datasetsOf = (list) => unique(list.flatMap((run) => run.parts.map((part) => part.dataset)))
.sort((a, b) => Number(b === "average") - Number(a === "average") || natural(a, b));
function budgetsOf(list) {
const found = new Map(list.filter((run) => !run.full).map((run) => [run.budget, run.size || 0]));
return [...found.keys()].sort((a, b) => natural(a.replace(/[\d./]+/, ""), b.replace(/[\d./]+/, "")) || found.get(a) - found.get(b));
}
function chosenOf(id, key, entries, usual) {
const chosen = entries.some(([value]) => value === state.get(key)) ? state.get(key) : usual;
options($(id), entries, chosen);
$(id).closest("label").hidden = entries.filter(([value]) => value).length < 2;
return chosen;
}
const same = (values) => values.map((value) => [value, value]);
let view = { dataset: "", rows: [] };
function chosenRows(list) {
const datasets = datasetsOf(runs);
const dataset = chosenOf("of", "of", same(datasets), datasets[0]);
const budget = chosenOf("budget", "budget", [["", "all budgets"], ...same(budgetsOf(runs))], "");
chosenOf("comm", "comm", [["", "all"], ...same(unique(runs.filter((run) => !run.full).map((run) => run.comm)).sort(natural))], "");
const rows = list.filter((run) => run.full || !budget || run.budget === budget)
.map((run) => [run, run.parts.find((part) => part.dataset === dataset)]).filter(([, part]) => part).sort(([a], [b]) => inOrder(a, b));
return { dataset, budget, rows, metric: rows.length ? rows[0][1].metric : "score" };
}
function standingOut(rows) {
const best = new Map();
for (const [run, part] of rows) {
if (!is(part.score) || run.full) continue;
const worth = (part.front.length ? 1e9 : 0) + (lower(part.metric) ? -1 : 1) * part.score;
best.set(run.method, Math.max(worth, best.get(run.method) ?? -Infinity));
}
if (best.size <= MOST_STANDING + 1) return null;
return new Set(["full", ...[...best].sort((x, y) => y[1] - x[1]).slice(0, MOST_STANDING).map(([name]) => name)]);
}
function pointsOf({ rows, dataset }, x, y) {
const only = standingOut(rows);
return rows.flatMap(([run, part]) => {
const kept = quality(run, part);
const [value, low, high] = y === "quality" ? [kept && kept.value, kept && kept.low, kept && kept.high] : [part.score, ...(part.ci || [null, null])];
const cost = costOf(run, part, x);
if (!is(value) || !is(cost)) return [];
const n = y === "quality" ? 2 : digits(part.metric);
const time = slower(run);
return [{ x: cost, y: value, low, high, method: run.method, series: run.series, full: run.full, run, part, hollow: Boolean(part.outside),
size: is(time) ? sizeOf(time) : null, faint: lit() ? !isLit(run.method) : Boolean(only) && !only.has(run.method), isFront: part.front.includes(x),
text: [run.variant, `${y === "quality" ? "quality kept" : part.metric} ${number(value, n)}${is(low) ? ` (95 %: ${range([low, high], n)})` : ""}`,
`${X_AXES[x].title}: ${cost < 10 ? number(cost) : number(cost, 0)}`, part.paired ? `Δ to full attention ${difference(part)}, p ${pWords(part.paired.holm, part.paired.holm_is_bound)}` : "",
`n ${part.n}${is(time) ? `, a step takes ${number(time, 2)} of full attention's time` : ""}; ${believed(run.verdict)}`].filter(Boolean).join("\n"),
pick: (from) => openCard(run, run.parts.find((one) => one.dataset === dataset), from) }];
});
}
function drawPicture() {
view = chosenRows(shown());
const about = aboutQuality(view.rows);
const hasQuality = view.rows.some(([run, part]) => !run.full && quality(run, part));
const y = chosenOf("y", "y", Object.entries(Y_AXES).filter(([name]) => hasQuality || name === "score"), hasQuality ? "quality" : "score");
const measured = Object.keys(X_AXES).filter((name) => view.rows.some(([run, part]) => is(costOf(run, part, name))));
const x = chosenOf("x", "x", measured.map((name) => [name, X_AXES[name].title]), measured[0]);
const points = x ? pointsOf(view, x, y) : [];
const costs = points.map((point) => point.x);
const isLog = costs.length > 0 && Math.min(...costs) > 0 && (x === "memory" || Math.max(...costs) / Math.min(...costs) > 12);
const front = points.filter((point) => point.isFront).sort((a, b) => a.x - b.x);
const full = points.find((point) => point.full);
let isSpread = false;
if (points.length) isSpread = plot("chart", { points, front, level: full ? full.y : y === "quality" ? 1 : null, label: `${Y_AXES[y]} over ${X_AXES[x].title}: arrows walk from mark to mark, Enter opens one`,
x: { ...X_AXES[x], isLog }, y: { title: y === "quality" ? `quality kept${fromRandom ? ", 0: random tokens, 1: full attention" : ", share of full attention's score"}` : inUnit(view.metric), include: y === "quality" ? [0, 1] : [] },
height: Math.min(420, Math.max(300, window.innerHeight * 0.5)) });
else $("chart").replaceChildren(none(view.rows.length ? "Nothing that is shown measured bytes, tokens or time beside a score; the table has the scores." : "No run passes the filters."));
drawLegend(view.rows);
const notes = notesOf(view.rows, points, { about: y === "quality" ? about : null, isSpread });
$("notes").replaceChildren(...notes.map((text) => el("li", {}, text)));
drawBoard(view);
document.documentElement.dataset.charts = String(Number(document.documentElement.dataset.charts || 0) + 1);
document.documentElement.dataset.chartsMs = document.documentElement.dataset.chartsMs || String(Math.round(performance.now()));
}
function drawLegend(rows) {
const here = unique(rows.map(([run]) => run.method));
const gone = goneMethods().filter((method) => runs.some((run) => run.method === method));
$("legend").replaceChildren(...[...here, ...gone].map((method) => {
const off = gone.includes(method);
const toggle = () => hide(off ? goneMethods().filter((one) => one !== method) : [...goneMethods(), method]);
const light = (on) => () => { for (const node of $("chart").querySelectorAll("[data-method]")) for (const [name, is] of [["bright", node.dataset.method === method], ["dim", node.dataset.method !== method]]) node.classList.toggle(name, on && is); };
return el("button", { type: "button", "aria-pressed": String(!off), onclick: toggle, onmouseenter: light(true), onfocus: light(true), onmouseleave: light(false), onblur: light(false) }, mark(method), looks[method].name);
}), button(gone.length ? "show all" : "hide all", () => hide(gone.length ? [] : here.filter((method) => method !== "full")), { class: "fold" }));
}
function notesOf(rows, points, { about, isSpread }) {
const named = (test) => unique(rows.filter(test).map(([run]) => run.label)).join(", ");
const outside = new Map();
for (const [run, part] of rows) if (part.outside) grouped(outside, part.outside).push(part.over ? run.variant : run.label);
const hollow = [...outside].map(([why, names]) => `${unique(names).join(", ")} ${why}`).join("; ");
const unpriced = named(([run]) => run.unpriced);
const only = standingOut(rows);
const counts = unique(VERDICTS.map(believed)).map((words) => [words, rows.filter(([run]) => believed(run.verdict) === words).length]).filter(([, n]) => n);
const bars = "Bars are 95 % intervals (of quality: of the paired difference to full attention); lines join a method's budgets";
return [
about,
points.length ? `${bars}. ${points.some((point) => is(point.size)) ? "The larger a mark, the longer a decode step takes: full attention's has its usual size, and marks without a time too." : "No decode step's time is known of these, so all marks are of one size."}${isSpread ? " Marks at about the same place stand side by side; the table has the numbers." : ""}` : null,
points.filter((point) => point.isFront).length > 1 ? "The broad band is the front: runs within their budget that are shown to score better than every run that costs no more (paired test, corrected), whatever the filters hide." : null,
only && !lit() ? `${only.size - 1} of ${unique(rows.map(([run]) => run.method)).length} methods stand out: those on the front, then the best. A name in the table makes another one stand out.` : null,
`${counts.map(([words, n]) => `${n} ${words}`).join(", ")}.${rows.some(([run]) => run.kept) ? " Of these only scores are kept, no answers: the command that makes them again is behind each." : ""}`,
rows.length && rows.every(([, part]) => part.n === 1) ? "One sample each: no interval, and no difference can be shown." : null,
hollow ? `Hollow marks did not keep their budget: ${hollow}. The axes show what was measured.` : null,
unpriced ? `${unpriced}: reads all keys to find its tokens, outside every budget, so it is a reference and on no front. It shows what exact attention weights choose layer by layer, not the best score that a budget allows.` : null,
rows.length && rows[0][0].task.split(" ")[0] === "fidelity" ? "Fidelity is the agreement with full attention's own tokens; it says nothing of whether answers are right." : null,
].filter(Boolean);
}
const cells = (key, title, value, show = number) => ({ key, title, value, cell: (row) => el("td", {}, show(value(row))) });
const MB = (value) => scaled(value, 1e6, 2);
const KB = (value) => scaled(value, 1e3);
const BYTES = [cells("device", "device, MB", ({ part }) => part.cost.device, MB), cells("moved", "moved, KB/step", ({ part }) => part.cost.moved, KB)];
const verified = { key: "verified", title: "verified", value: ({ run }) => VERDICTS.indexOf(run.verdict), cell: ({ run }) => el("td", {}, verdictOf(run), " ", oldMark(run)) };
const audit = (title, key, show) => cells(key, title, ({ run }) => run.audit[key], show);
const TRACKS = {
quality: ["quality", [
{ key: "quality", title: "quality kept", value: ({ kept }) => kept && kept.value, cell: ({ kept }) => el("td", {}, number(kept && kept.value, 2), kept && is(kept.low) ? el("small", {}, range([kept.low, kept.high], 2)) : "") },
cells("memory", "share of bytes", ({ part }) => part.cost.memory),
{ key: "score", title: "score, Δ to full attention", value: ({ part }) => part.score, cell: ({ run, part }) => scoreCell(run, part) },
{ key: "rank", title: "rank", value: ({ part }) => (part.rank ? part.rank[0] + part.rank[1] / 1e3 : null),
cell: ({ run, part }) => el("td", {}, ranked(part) || (run.full ? "reference" : el("span", { class: "sub", title: part.unranked || null }, (part.unranked || "").split(":")[0] || (run.unpriced ? "outside every budget" : "-")))) },
...BYTES, verified]],
speed: ["speed", [
audit("s/token", "tpot_s", (value) => number(value, 4)), audit("rows in its batch", "batch_rows_mean", (value) => number(value, 1)), audit("prefill, s", "prefill_s", (value) => number(value, 2)),
...BYTES, { key: "verified", title: "times", value: null, cell: ({ run }) => el("td", {}, el("span", { class: "badge" }, "self-reported"), " ", oldMark(run)) }]],
budgets: ["budgets, asked and measured", [
audit("budget, tokens", "tokens_budget_mean", (value) => number(value, 1)), audit("attended, tokens", "tokens_attended_mean", (value) => number(value, 1)), audit("share of the cache", "effective_ratio"),
audit("comm, KB/step", "comm_bytes", KB), audit("index read, KB/step", "bytes_find_per_step", KB), audit("searched, KB/step", "bytes_searched_per_step", KB), audit("KV moved, KB/step", "bytes_moved_kv_per_step", KB),
audit("device, MB", "bytes_resident_device", MB), audit("while reading, MB", "bytes_prefill_peak", MB), audit("host, MB", "bytes_resident_host", MB), audit("allocated, MB", "bytes_resident_device_actual", MB),
audit("cache hits", "cache_hit_rate"), audit("prefill, s", "prefill_s", (value) => number(value, 2)), audit("s/token", "tpot_s"), audit("requests at once", "largest_batch"),
audit("tokens/s of so many", "tokens_per_s_at_largest", (value) => number(value, 1)), audit("to full attention's", "throughput_ratio", (value) => number(value, 2)),
cells("whole", "uncompressed layers", ({ run }) => run.whole_layers, (value) => (is(value) ? String(value) : "-")),
{ key: "within", title: "within budget", value: ({ run }) => run.audit.within_budget, cell: ({ run }) => el("td", { class: run.audit.within_budget === false ? "flag" : null }, !is(run.audit.within_budget) ? "-" : run.audit.within_budget ? "yes" : "! no") }]],
};
const HINTS = {
quality: "Score, 95 % interval and n; below, Δ: the difference to full attention on the same prompts, and its p after Holm's correction for all comparisons of the column. Green and red: p below 0.05. Bold: best under its budget; ≈: a tie, not shown to be worse than the best. ! exceeded its budget. A rank is a range: behind those shown to be better, ahead of those shown to be worse.",
speed: "Only runs of one machine and one set of versions. Seconds are of a batch that runs share.",
budgets: "Tokens per query head and step; bytes per decode step over all layers, at 16 bits an element; allocated: bytes as they lie in memory. Of timed runs: how many requests of the longest prompt fit into the memory at once, and what so many give.",
};
function drawBoard({ rows, dataset, budget, metric }) {
const track = chosenOf("track", "track", Object.entries(TRACKS).map(([key, [title]]) => [key, title]), "quality");
const machines = unique(rows.map(([run]) => run.machine)).sort(natural);
const machine = track === "speed" ? chosenOf("machine", "machine", same(machines), machines[0]) : null;
if (!machine) $("machine").closest("label").hidden = true;
const list = rows.filter(([run]) => !machine || (run.machine === machine && is(run.audit.tpot_s))).map(([run, part]) => ({ run, part, method: run.method, kept: quality(run, part) }));
const sign = lower(metric) ? 1 : -1;
if (machine) list.sort((a, b) => a.run.audit.tpot_s - b.run.audit.tpot_s);
else list.sort((a, b) => Number(b.run.full) - Number(a.run.full) || Number(Boolean(a.run.superseded_by)) - Number(Boolean(b.run.superseded_by)) || sign * (a.part.score - b.part.score) || inOrder(a.run, b.run));
list.forEach((row, i) => { row.tied = Boolean(row.part.rank && list[i + 1] && String(list[i + 1].part.rank) === String(row.part.rank)); });
const why = track === "quality" ? unique(list.map(({ part }) => part.unranked || "").filter((text) => text.includes(":"))) : [];
const comms = unique(list.filter(({ run }) => !run.full).map(({ run }) => run.comm));
$("board-about").textContent = [`${inUnit(metric)}, ${list.length} runs.`, HINTS[track], machine, track === "quality" && comms.length > 1 ? "Ranks are among runs of one comm." : "", ...why].filter(Boolean).join(" ");
const columns = TRACKS[track][1].filter(({ value }) => !value || list.some((row) => is(value(row))));
const first = { key: "run", title: "method", cell: ({ run, part }) => { const node = nameCell(run.method, run.variant);
node.append(el("span", { class: "sub" }, link(toSamples(run, part), run.kept ? "samples" : "answers"), " · ", link({ at: "method", m: run.preset }, "about"), run.by ? ` · ${run.by}` : "")); return node; } };
$("board").replaceChildren(list.length ? sheet("by", "The same numbers", [first, ...columns], list, update) : none("No run passes the filters."));
$("board-csv").onclick = () => more().then(() => save("kvbench-results.csv", "text/csv", scoresCsv(list.map(({ run, part }) => [run, part]))));
$("board-tex").onclick = ({ currentTarget: from }) => more().then(() => copy(texTable(["method", "quality kept", inUnit(metric), "device, MB", "rank"],
list.map(({ run, part, kept }) => [run.variant, number(kept && kept.value, 2), texCell(part), MB(part.cost.device), ranked(part) || "-"]), `${dataset}, ${budget || "all budgets"}. ${runs[0].group}`, `${dataset}`), from));
}
const PAGES = {
picture: ["Quality against bytes", () => drawPicture()], budgets: ["By budget", () => drawBudgets()], scores: ["All tasks", () => drawMatrix()], needle: ["Needle maps", () => drawNeedles()],
samples: ["Answers", () => drawRun()], method: ["Method", () => drawMethod()], which: ["Which method?", () => drawWhich()], changes: ["Changes", () => drawChanges()],
};
const OF_BENCHMARK = ["picture", "budgets", "scores", "needle", "samples"];
const WITH_ROWS = ["picture", "budgets"];
const WITH_FILTERS = [...WITH_ROWS, "scores", "needle"];
const ALIKE = { board: "picture", results: "picture", provenance: "samples" }; // what older addresses call pages
const pageOf = () => { const at = ALIKE[state.get("at")] || state.get("at"); return at in PAGES ? at : "picture"; };
let drawing = Promise.resolve();
const CHOICE = { model: "model", task: "task", question: "question", where: "where" };
function chooseBenchmark() {
const wanted = index.benchmarks.find((one) => one.id === state.get("bench")) || index.benchmarks.find((one) => one.id === index.start);
let left = index.benchmarks;
for (const [id, key] of Object.entries(CHOICE)) {
const values = unique(left.map((one) => one[key])).sort(natural);
options($(id), same(values), wanted[key]);
$(id).closest("label").hidden = unique(index.benchmarks.map((one) => one[key])).length < 2;
$(id).disabled = values.length < 2;
left = left.filter((one) => one[key] === wanted[key]);
}
return wanted;
}
const OF_OTHERS = ["of", "machine", "a", "b", "sample", "dataset", "lit", "x", "y", "comm", "hide"];
function pick(id) {
const keys = Object.entries(CHOICE);
const chosen = Object.fromEntries(keys.map(([node, key]) => [key, $(node).value]));
const most = Object.keys(CHOICE).indexOf(id);
const fits = (one) => one[CHOICE[id]] === chosen[CHOICE[id]] && keys.slice(0, most).every(([, key]) => one[key] === chosen[key]);
const alike = (one) => keys.slice(most + 1).filter(([, key]) => one[key] === chosen[key]).length;
const found = index.benchmarks.filter(fits).sort((a, b) => alike(b) - alike(a) || b.answers - a.answers)[0];
if (found) go({ bench: found.id, ...Object.fromEntries(OF_OTHERS.map((key) => [key, null])) });
}
let bench = null;
async function open(id) {
if (bench === id) return;
const found = await readBenchmark(id);
bench = id;
runs = found.runs;
Object.assign(looks, found.looks); // a method's name here
}
function drawChanges() {
const rows = index.changes.map(([kind, text]) => el("li", {}, el("span", { class: "badge" }, kind), " ", text));
$("change-list").replaceChildren(rows.length ? el("ul", {}, rows) : none("Nothing, or it was compared with none."));
}
async function drawPage() {
const at = pageOf();
const needs = OF_BENCHMARK.includes(at);
const wanted = chooseBenchmark();
if (needs && bench !== wanted.id && !read.has(wanted.id)) $("waiting").textContent = "Loading…";
await open(wanted.id);
$("waiting").textContent = "";
for (const section of document.querySelectorAll("main > section")) section.classList.toggle("here", section.id === at);
$("pages").replaceChildren(...Object.entries(PAGES).filter(([id]) => pageIsThere(id)).map(([id, [title]]) => { const node = link({ at: id }, title); if (id === at) node.setAttribute("aria-current", "page"); return node; }));
for (const id of ["choice", "about"]) $(id).hidden = !needs;
$("about").replaceChildren(el("b", {}, wanted.task), ` · ${[wanted.model, ["shown", "hidden"].includes(wanted.question) ? `question ${wanted.question}` : wanted.question, wanted.where].join(" · ")}`);
document.querySelector("#choice .rows").hidden = !WITH_ROWS.includes(at);
document.querySelector("#choice .filters").hidden = !WITH_FILTERS.includes(at);
if ($("q").value !== (state.get("q") || "")) $("q").value = state.get("q") || "";
$("count").textContent = `${shown().length} of ${runs.length} runs`;
if (at !== "picture") await more();
await PAGES[at][1]();
}
const pageIsThere = (id) => id === pageOf() || ({ changes: index.changes.length, needle: runs.some((run) => run.parts.some((part) => part.heat)) }[id] ?? true);
let n = 0;
function update() {
drawing = drawing.then(drawPage).catch((error) => { $("waiting").textContent = error.message; }).then(() => { n += 1; document.documentElement.dataset.drawn = String(n); });
return drawing;
}
function show() {
$("which-samples").value = state.get("which") || "all";
$("find").value = state.get("find") || "";
closeCard();
if (state.get("at") === "provenance" && state.get("run")) setState({ b: state.get("run"), run: null });
const before = document.querySelector("main > section.here");
return update().then(() => {
const here = document.querySelector("main > section.here");
if (here && before && here !== before) { window.scrollTo(0, 0); here.focus({ preventScroll: true }); }
});
}
function listen() {
listenToTheme(() => { applyTheme(); update(); });
listenToCards();
$("q").addEventListener("input", (event) => { setState({ q: event.target.value }); update(); });
$("reset").addEventListener("click", () => go({ q: null, lit: null, hide: null, comm: null, budget: null, of: null, x: null, y: null }));
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); document.querySelector("main > section.here").focus(); });
for (const id of Object.keys(CHOICE)) $(id).addEventListener("change", () => pick(id));
const reads = { of: "of", budget: "budget", comm: "comm", x: "x", y: "y", track: "track", machine: "machine", "run-a": "a", "run-b": "b", "which-samples": "which", dataset: "dataset", "method-choice": "m" };
for (const [id, key] of Object.entries(reads)) $(id).addEventListener("change", (event) => { setState({ [key]: event.target.value }, true); update(); });
for (const id of ["run-a", "run-b"]) for (const event of ["focus", "mousedown", "touchstart"]) $(id).addEventListener(event, () => fillRunChoice($(id)), { passive: true });
$("find").addEventListener("input", (event) => { setState({ find: event.target.value }); drawSamples(); });
for (const id of ["chart", "needle-chart"]) $(`${id}-svg`).addEventListener("click", () => more().then(() => saveChart(id)));
$("copy-address").addEventListener("click", ({ currentTarget: from }) => more().then(() => copy(location.href, from)));
$("choice").addEventListener("submit", (event) => event.preventDefault());
for (const event of ["popstate", "hashchange"]) window.addEventListener(event, () => { if (location.hash !== seenHash) { readState(); show(); } });
let width = window.innerWidth;
let timer = 0;
window.addEventListener("resize", () => {
clearTimeout(timer);
timer = setTimeout(() => { if (width !== window.innerWidth) { width = window.innerWidth; update(); } }, 150);
});
}
async function start() {
applyTheme();
readState();
index = await once("data-index");
document.title = index.title;
$("title").textContent = index.title;
$("summary").textContent = `${index.n} runs of ${index.benchmarks.length} benchmarks`;
listen();
await show();
document.documentElement.dataset.readyMs = String(Math.round(performance.now()));
}
start();
