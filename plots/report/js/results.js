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
