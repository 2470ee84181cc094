// All together: the address says which page of which benchmark; its data are read, and it is drawn.
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

// --- which benchmark ---

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

// The benchmark that has what was chosen, and of the others as much as there is.
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

// --- the pages ---

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
