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
