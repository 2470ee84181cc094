// The view that the page opens on: what each variant keeps of full attention's quality over what it holds, and below
// it the same numbers as a table, by quality, speed or budget.
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
const VERDICTS = ["reported", "rescored", "reproduced"];
const verdictOf = (run) => el("span", { class: `badge ${run.verdict}`, title: run.why || (run.kept ? "scores are kept, no answers" : null) }, run.verdict);
const oldMark = (run) => (run.superseded_by ? el("span", { class: "badge old" }, `superseded by ${run.superseded_by}`) : null);
const ranked = (part) => (part.rank ? (part.rank[0] === part.rank[1] ? String(part.rank[0]) : `${part.rank[0]}–${part.rank[1]}`) : null);
const MOST_STANDING = 8;

// --- quality: 0 is random tokens under the same budget, where full attention is shown to lead them beside all that is
// drawn, 1 is full attention ---

let fromRandom = false;
function quality(run, part) {
  if (run.full) return { value: 1, base: "score" };
  const lead = part.base && part.base[fromRandom ? 1 : 0];
  if (!part.paired || !(lead > 0)) return null;
  const of = (difference) => 1 + difference / lead;
  const [low, high] = part.paired.ci ? part.paired.ci.map(of) : [null, null];
  const ends = is(low) && part.paired.n >= few ? range([low, high], 2) : "";
  return { value: of(part.paired.mean), low, high, ends, base: fromRandom ? "lead over random tokens" : "score" };
}

function aboutQuality(rows) {
  const compressed = rows.filter(([run]) => !run.full);
  const leadOf = ([, part]) => (part.base ? part.base[1] : null);
  fromRandom = compressed.length > 0 && compressed.every((row) => leadOf(row) > 0);
  if (fromRandom) return "Quality kept is (score - random) / (full attention - random): 0 is random tokens under the same budget, 1 full attention.";
  const budgets = unique(compressed.map(([run]) => run.budget));
  const at = (fits) => budgets.filter((budget) => fits(compressed.filter(([run]) => run.budget === budget))).join(" and ");
  const led = at((rows) => rows.every((row) => leadOf(row) > 0));
  const level = at((rows) => rows.some((row) => leadOf(row) === 0));
  const found = [
    ...(led ? [`full attention is shown to lead random tokens at ${led} alone: choose that budget to count from them`] : []),
    ...(level ? [`its lead over random tokens is not shown at ${level}`] : []),
  ];
  return `Quality kept is the score as a share of full attention's: ${found.length ? found.join("; ") : "random tokens were not asked here"}.`;
}

// A decode step's time relative to full attention's, of one machine and as many rows in a batch; null where it is not known.
function slower(run) {
  const full = fullFor(run);
  const alike = full && !run.kept && full.machine === run.machine && full.audit.batch_rows_mean === run.audit.batch_rows_mean;
  return alike && run.audit.tpot_s && full.audit.tpot_s ? run.audit.tpot_s / full.audit.tpot_s : null;
}
const sizeOf = (ratio) => Math.min(11, Math.max(3, 6 * Math.sqrt(ratio)));

// --- what is looked at ---

// The datasets of the runs, the average first; and their budgets in the order of their size.
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

// While none is lit, eight methods stand out of many: those on the front, then the best of each; null: all do.
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
      text: [run.variant, `${y === "quality" ? "quality kept" : part.metric} ${number(value, n)}${is(low) && part.n >= few ? ` (95 %: ${range([low, high], n)})` : ""}`,
        `${X_AXES[x].title}: ${cost < 10 ? number(cost) : number(cost, 0)}`, part.paired ? `Δ to full attention ${tested(part)}` : "",
        `n ${part.n}${is(time) ? `, a step takes ${number(time, 2)} of full attention's time` : ""}; ${run.verdict}`].filter(Boolean).join("\n"),
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

// The methods of the chart: a click takes one out or brings it back, pointing at one lights it.
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
  const counts = VERDICTS.map((words) => [words, rows.filter(([run]) => run.verdict === words).length]).filter(([, n]) => n);
  const bars = "Bars are 95 % intervals (of quality: of the paired difference to full attention); lines join a method's budgets";
  return [
    about,
    points.length ? `${bars}. ${points.some((point) => is(point.size)) ? "The larger a mark, the longer a decode step takes: full attention's has its usual size, and marks without a time too." : "No decode step's time is known of these, so all marks are of one size."}${isSpread ? " Marks at about the same place stand side by side; the table has the numbers." : ""}` : null,
    points.filter((point) => point.isFront).length > 1 ? "The broad band is the front: runs within their budget that are shown to score better than every run that costs no more (paired test, corrected), whatever the filters hide." : null,
    only && !lit() ? `${only.size - 1} of ${unique(rows.map(([run]) => run.method)).length} methods stand out: those on the front, then the best. A name in the table makes another one stand out.` : null,
    `${counts.map(([words, n]) => `${n} ${words}`).join(", ")}.${rows.some(([run]) => run.kept) ? " Of these only scores are kept, no answers: the command that makes them again is behind each." : ""}`,
    rows.length && rows.every(([, part]) => part.n < few) ? `Fewer than ${few} samples are too few to compare.` : null,
    hollow ? `Hollow marks did not keep their budget: ${hollow}. The axes show what was measured.` : null,
    unpriced ? `${unpriced}: reads all keys to find its tokens, outside every budget, so it is a reference and on no front. It shows what exact attention weights choose layer by layer, not the best score that a budget allows.` : null,
    rows.length && rows[0][0].task.split(" ")[0] === "fidelity" ? "Fidelity is the agreement with full attention's own tokens; it says nothing of whether answers are right." : null,
  ].filter(Boolean);
}

// --- the same numbers as a table ---

const cells = (key, title, value, show = number) => ({ key, title, value, cell: (row) => el("td", {}, show(value(row))) });
const MB = (value) => scaled(value, 1e6, 2);
const KB = (value) => scaled(value, 1e3);
const BYTES = [cells("device", "device, MB", ({ part }) => part.cost.device, MB), cells("moved", "moved, KB/step", ({ part }) => part.cost.moved, KB)];
const verified = { key: "verified", title: "verified", value: ({ run }) => VERDICTS.indexOf(run.verdict), cell: ({ run }) => el("td", {}, verdictOf(run), " ", oldMark(run)) };
const audit = (title, key, show) => cells(key, title, ({ run }) => run.audit[key], show);
const TRACKS = {
  quality: ["quality", [
    { key: "quality", title: "quality kept", value: ({ kept }) => kept && kept.value, cell: ({ kept }) => el("td", {}, number(kept && kept.value, 2), kept && kept.ends ? el("small", {}, kept.ends) : "") },
    cells("memory", "share of bytes", ({ part }) => part.cost.memory),
    { key: "score", title: "score, Δ to full attention", value: ({ part }) => part.score, cell: ({ run, part }) => scoreCell(run, part) },
    { key: "rank", title: "rank", value: ({ part }) => (part.rank ? part.rank[0] + part.rank[1] / 1e3 : null),
      cell: ({ run, part }) => el("td", {}, ranked(part) || (run.full ? "reference" : el("span", { class: "sub", title: part.unranked || null }, (part.unranked || "").split(":")[0] || (run.unpriced ? "outside every budget" : "-")))) },
    ...BYTES, verified]],
  speed: ["speed", [
    audit("s/token", "tpot_s", (value) => number(value, 4)), audit("rows in its batch", "batch_rows_mean", (value) => number(value, 1)), audit("prefill, s", "prefill_s", (value) => number(value, 2)),
    ...BYTES, { key: "verified", title: "times", value: null, cell: ({ run }) => el("td", {}, el("span", { class: "badge" }, "reported"), " ", oldMark(run)) }]],
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
