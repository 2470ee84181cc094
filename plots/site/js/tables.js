// Scores of one benchmark by budget, of all tasks side by side, and of needles by length and depth.

// A row per method, a column per budget; each with its score and how it differs from full attention.
function drawBudgets() {
  view = chosenRows(shown());
  const { rows, dataset, metric } = view;
  if (!rows.length) { $("differences").replaceChildren(none("No run passes the filters.")); return; }
  const columns = budgetsOf(rows.map(([run]) => run).filter((run) => run.budget !== "full"));
  if (rows.some(([run]) => run.budget === "full")) columns.unshift("full");
  const series = new Map();
  for (const [run, part] of rows) {
    const of = series.get(run.series) || new Map();
    series.set(run.series, of);
    if (!of.has(run.budget)) of.set(run.budget, [run, part]);
  }
  const title = (name) => (name === "full" ? "full attention" : name);
  const lines = [...series].map(([name, of]) => ({ name, of, method: [...of.values()][0][0].method }));
  $("differences").replaceChildren(sheet("by", "Differences to full attention", [
    { key: "method", title: "method", cell: ({ method, name }) => nameCell(method, name) },
    ...columns.map((budget) => ({ key: budget, title: title(budget), value: ({ of }) => (of.has(budget) ? of.get(budget)[1].score : null),
      cell: ({ of }) => scoreCell(...(of.get(budget) || [null, null])) })),
  ], lines, update));
  $("differences-tex").onclick = (event) => copy(texTable(["method", ...columns.map(title)],
    lines.map(({ name, of }) => [name, ...columns.map((budget) => texCell((of.get(budget) || [])[1]))]),
    `${runs[0].task}, ${dataset}: ${inUnit(metric)} by budget. ${runs[0].group}. ≈ marks what is not shown to be worse than the best.`, `${runs[0].task}-${dataset}`), event.currentTarget);
}

// --- a row per variant, a column per benchmark of the same model and conditions, whose datasets open next to its average ---

function columnsOf(members, open) {
  const tasks = new Map();
  for (const run of members) for (const part of run.parts) {
    if (!tasks.has(run.task)) tasks.set(run.task, new Map());
    if (!tasks.get(run.task).has(part.dataset)) tasks.get(run.task).set(part.dataset, part.metric);
  }
  return [...tasks].flatMap(([task, datasets]) => {
    const names = [...datasets.keys()].sort((a, b) => Number(b === "average") - Number(a === "average") || natural(a, b));
    const folds = names[0] === "average" && names.length > 1;
    const left = folds && !open.has(task) ? ["average"] : names;
    return left.map((dataset) => ({ key: task === dataset ? task : `${task} · ${dataset}`, task, dataset, metric: datasets.get(dataset), more: folds && dataset === "average" ? names.length - 1 : 0 }));
  });
}

function rowsOfMatrix(members) {
  const rows = new Map();
  for (const run of members) {
    const row = rows.get(run.variant) || { run, method: run.method, cells: new Map() };
    rows.set(run.variant, row);
    for (const part of run.parts) {
      const key = run.task === part.dataset ? run.task : `${run.task} · ${part.dataset}`;
      if (!row.cells.has(key)) row.cells.set(key, [run, part]);
    }
  }
  return [...rows.values()].sort((a, b) => inOrder(a.run, b.run));
}

async function drawMatrix() {
  const { group } = index.benchmarks.find((one) => one.id === runs[0].bench.id);
  const beside = await Promise.all(index.benchmarks.filter((one) => one.group === group).map((one) => readBenchmark(one.id)));
  const members = shown(beside.flatMap((one) => one.runs));
  const open = new Set(fromList(state.get("open")));
  const flip = (task) => { if (!open.delete(task)) open.add(task); setState({ open: asList(open) }); update(); };
  const columns = columnsOf(members, open);
  const fold = (column) => button(open.has(column.task) ? "fold datasets" : `${column.more} datasets`, () => flip(column.task),
    { class: "fold", "aria-expanded": String(open.has(column.task)) });
  const rows = rowsOfMatrix(members);
  const cellOf = ({ cells: of }, { key }) => of.get(key) || [null, null];
  $("matrix-about").textContent = group;
  $("matrix").replaceChildren(members.length ? sheet("sort", group, [
    { key: "variant", title: "variant", cell: ({ run }) => el("th", { scope: "row" }, run.variant) },
    ...columns.map((column) => ({ key: column.key, title: column.key, more: [el("span", { class: "sub" }, inUnit(column.metric)), column.more ? fold(column) : null],
      value: (row) => { const part = cellOf(row, column)[1]; return part && part.score; }, cell: (row) => scoreCell(...cellOf(row, column)) })),
  ], rows, update) : none("No run passes the filters."));
  $("matrix-tex").onclick = (event) => copy(texTable(["variant", ...columns.map(({ key }) => key)],
    rows.map((row) => [row.run.variant, ...columns.map((column) => texCell(cellOf(row, column)[1]))]), group, "scores"), event.currentTarget);
  $("matrix-csv").onclick = () => save("kvbench-scores.csv", "text/csv", scoresCsv(members.flatMap((run) => run.parts.map((part) => [run, part]))));
}

// --- needle maps: score by depth and by the prompts' true lengths, a panel per variant ---

const MOST_MAPS = 40;
function drawNeedles() {
  const all = shown().filter((run) => run.parts.some((part) => part.heat)).sort(inOrder);
  const maps = all.slice(0, MOST_MAPS);
  const cellsOf = (run) => run.parts.flatMap((part) => part.heat || []);
  $("needle-more").textContent = all.length > maps.length ? `The first ${maps.length} of ${all.length} maps; filters choose others.` : "";
  if (!maps.length) { $("needle-chart").replaceChildren(none("No run of this benchmark has needles at lengths and depths.")); return; }
  // Prompts of one length that was asked for have about as many tokens, whatever the depth: their mean names the column.
  const lengths = new Map();
  for (const [asked, , , , tokens] of maps.flatMap(cellsOf)) grouped(lengths, asked).push(tokens);
  const named = new Map([...lengths].sort(([a], [b]) => a - b).map(([asked, counts]) => [asked, number(counts.reduce((sum, one) => sum + one, 0) / counts.length, 0)]));
  const panels = maps.map((run) => ({ title: run.variant, cells: cellsOf(run).map(([asked, depth, score, n, tokens]) => ({ column: named.get(asked), row: depth, share: score / 100,
    text: [run.variant, `tokens, mean ${number(tokens, 0)}`, `length asked ${asked}`, `depth ${depth} %`, `score ${number(score, 1)}`, `n ${n}`].join("\n") })) }));
  heatMaps("needle-chart", { panels, columns: unique([...named.values()]), rows: unique(maps.flatMap(cellsOf).map(([, depth]) => depth)).sort((a, b) => a - b), xTitle: "prompt in tokens", yTitle: "depth in %",
    label: "Scores by length and depth, a map per variant" });
}
