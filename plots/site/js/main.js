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
