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
// Marks that would turn the direction of what stands next to them, and controls, are shown in place of being obeyed.
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
const number = (value, digits = 3) => (is(value) ? formatted(value, Math.abs(value) < 1000 ? digits : 0) : "-"); // as data are rounded
const pWords = (p, isBound) => (p < 0.001 ? "< 0.001" : isBound ? `< ${number(Math.ceil(1000 * p) / 1000)}` : number(p)); // as p_short of plots/stats.py
const signed = (value, digits = 3) => (value > 0 ? "+" : "") + number(value, digits);
const scaled = (value, unit, digits = 1) => (is(value) ? number(value / unit, digits) : "-");
const range = (ci, digits) => (ci ? `${number(ci[0], digits)} to ${number(ci[1], digits)}` : "");
const natural = new Intl.Collator("en", { numeric: true }).compare; // 2 before 10

// Data stand in an element of the page, or in a file that calls `kvbench` with its name and text: from disk a page can
// read nothing but scripts.
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

// What the first view does without comes when it is wanted.
let coming = null;
const more = () => (typeof drawRun === "function" ? Promise.resolve() : (coming = coming || loadScript("more.js")));

async function unpack(path) {
  const text = atob(await packedText(path));
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i += 1) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// What was unpacked stays.
function once(path, make = (tree) => tree) {
  if (!once.kept.has(path)) once.kept.set(path, unpack(path).then(make));
  return once.kept.get(path);
}
once.kept = new Map();

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
