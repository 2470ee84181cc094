// All together: the page is drawn from the address, and again where that changes.
let drawing = Promise.resolve();

async function drawCharts() {
  if (!specs) return;
  await drawScores(results);
  await drawNeedles(shown());
  const n = Number(document.documentElement.dataset.charts || 0) + 1;
  document.documentElement.dataset.charts = String(n);
  document.documentElement.dataset.chartsMs = document.documentElement.dataset.chartsMs || String(Math.round(performance.now()));
}
const redraw = () => (drawing = drawing.then(drawCharts));

let results = { view: null, rows: [] };
function update() {
  const list = shown();
  $("count").textContent = `${list.length} of ${runs.length} runs`;
  results = drawResults(list);
  drawMatrix(list);
  drawAudit(list);
  drawOrigins(list);
  drawRunChoice(list);
  if (specs) drawSamples();
  redraw();
}

// Draw what the address says.
function show() {
  readFilters();
  $("which").value = state.get("which") || "all";
  $("find").value = state.get("find") || "";
  limit = PAGE;
  closeCard();
  update();
  toSection();
}

let hasMoved = false; // the reader, since the page was opened
function toSection() {
  const section = state.get("at") && document.getElementById(state.get("at"));
  if (!section || section.tagName !== "SECTION") return;
  section.scrollIntoView();
  section.focus({ preventScroll: true });
}

function listen() {
  listenToTheme(() => { applyTheme(); update(); });
  listenToCards();
  for (const anchor of document.querySelectorAll("nav a, .skip")) {
    anchor.addEventListener("click", (event) => { event.preventDefault(); go({ at: anchor.hash.slice(1) }); });
  }
  const reads = { view: "view", "budget-chart-axis": "budget-chart", "cost-chart-axis": "cost-chart", "run-a": "a", "run-b": "b", which: "which", dataset: "dataset" };
  for (const [id, key] of Object.entries(reads)) {
    $(id).addEventListener("change", (event) => {
      setState({ [key]: event.target.value, ...(["a", "b"].includes(key) ? { at: null } : {}) });
      limit = PAGE;
      if (["a", "b", "which", "dataset"].includes(key)) drawSamples();
      else { results = drawResults(shown()); redraw(); }
    });
  }
  for (const id of ["run-a", "run-b"]) {
    for (const event of ["focus", "mousedown", "touchstart"]) $(id).addEventListener(event, () => fillRunChoice($(id)), { passive: true });
  }
  $("find").addEventListener("input", (event) => { setState({ find: event.target.value }); limit = PAGE; drawSamples(); });
  $("scores-csv").addEventListener("click", () => save("kvbench-scores.csv", "text/csv", scoresCsv(shown())));
  for (const id of [...Object.keys(AXES), "needle-chart"]) $(`${id}-svg`).addEventListener("click", () => saveChart(id));
  $("copy-address").addEventListener("click", (event) => copy(location.href, event.currentTarget));
  for (const event of ["popstate", "hashchange"]) {
    window.addEventListener(event, () => { if (location.hash !== seenHash) { readState(); show(); } });
  }
  for (const event of ["wheel", "touchmove", "keydown", "mousedown"]) {
    window.addEventListener(event, () => { hasMoved = true; }, { passive: true, once: true });
  }
  let width = window.innerWidth;
  let timer = 0;
  window.addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { if (width !== window.innerWidth) { width = window.innerWidth; redraw(); } }, 150);
  });
}

async function start() {
  applyTheme();
  readState();
  await readOverview();
  buildFilters();
  listen();
  show();
  document.documentElement.dataset.readyMs = String(Math.round(performance.now()));
  // What is heavy waits for the first paint.
  requestAnimationFrame(() => setTimeout(async () => {
    await loadCharts();
    await redraw();
    await drawSamples();
    // Charts have made the page longer above what the reader came for.
    if (!hasMoved) toSection();
  }));
}
start();
