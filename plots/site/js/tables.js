// Scores of one benchmark by budget, of all tasks side by side, and of needles by length and depth.

// Rows are { name, method, first, cells }, where `cells` has a run and its part for some keys of `columns`.
function pivot(id, sortedAs, { rows, columns, head, label, caption }) {
  const cellOf = (row, { key }) => row.cells.get(key) || [null, null];
  $(id).replaceChildren(rows.length ? sheet(sortedAs, label, [
    { key: head, title: head, cell: (row) => row.first },
    ...columns.map((column) => ({ ...column, value: (row) => { const part = cellOf(row, column)[1]; return part && part.score; }, cell: (row) => scoreCell(...cellOf(row, column)) })),
  ], rows, update) : none("No run passes the filters."));
  $(`${id}-tex`).onclick = (event) => copy(texTable([head, ...columns.map(({ title }) => title)],
    rows.map((row) => [row.name, ...columns.map((column) => texCell(cellOf(row, column)[1]))]), ...caption), event.currentTarget);
}

// Runs by some name; of several with the same name and key the first counts.
function rowsBy(members, nameOf, keyOf, firstOf) {
  const rows = new Map();
  for (const [run, part] of members) {
    if (!rows.has(nameOf(run))) rows.set(nameOf(run), { name: nameOf(run), method: run.method, first: firstOf(run), cells: new Map() });
    const { cells: of } = rows.get(nameOf(run));
    if (!of.has(keyOf(run, part))) of.set(keyOf(run, part), [run, part]);
  }
  return [...rows.values()];
}

// A row per method, a column per budget; each with its score and how it differs from full attention.
function drawBudgets() {
  view = chosenRows(shown());
  const { rows, dataset, metric } = view;
  const columns = budgetsOf(rows.map(([run]) => run).filter((run) => run.budget !== "full")).map((key) => ({ key, title: key }));
  if (rows.some(([run]) => run.budget === "full")) columns.unshift({ key: "full", title: "full attention" });
  pivot("differences", "by", { columns, head: "method", label: "Differences to full attention", rows: rowsBy(rows, (run) => run.series, (run) => run.budget, (run) => nameCell(run.method, run.series)),
    caption: [`${runs[0].task}, ${dataset}: ${inUnit(metric)} by budget. ${runs[0].group}. ≈ marks what is not shown to be worse than the best.`, `${runs[0].task}-${dataset}`] });
}

// --- a row per variant, a column per benchmark of the same model and conditions, whose datasets open next to its average ---

const columnName = ({ task }, { dataset }) => (task === dataset ? task : `${task} · ${dataset}`);
function columnsOf(members, open, flip) {
  const tasks = new Map();
  for (const run of members) for (const part of run.parts) {
    if (!tasks.has(run.task)) tasks.set(run.task, new Map());
    if (!tasks.get(run.task).has(part.dataset)) tasks.get(run.task).set(part.dataset, part.metric);
  }
  return [...tasks].flatMap(([task, datasets]) => {
    const names = [...datasets.keys()].sort((a, b) => Number(b === "average") - Number(a === "average") || natural(a, b));
    const folds = names[0] === "average" && names.length > 1;
    const fold = () => button(open.has(task) ? "fold datasets" : `${names.length - 1} datasets`, () => flip(task), { class: "fold", "aria-expanded": String(open.has(task)) });
    return (folds && !open.has(task) ? ["average"] : names).map((dataset) => ({ key: columnName({ task }, { dataset }), title: columnName({ task }, { dataset }),
      more: [el("span", { class: "sub" }, inUnit(datasets.get(dataset))), folds && dataset === "average" ? fold() : null] }));
  });
}

async function drawMatrix() {
  const { group } = runs[0].bench;
  const beside = await Promise.all(index.benchmarks.filter((one) => one.group === group).map((one) => readBenchmark(one.id)));
  const members = shown(beside.flatMap((one) => one.runs)).sort(inOrder);
  const parts = members.flatMap((run) => run.parts.map((part) => [run, part]));
  const open = new Set(fromList(state.get("open")));
  const flip = (task) => { if (!open.delete(task)) open.add(task); setState({ open: asList(open) }); update(); };
  $("matrix-about").textContent = group;
  pivot("matrix", "sort", { columns: columnsOf(members, open, flip), head: "variant", label: group, caption: [group, "scores"],
    rows: rowsBy(parts, (run) => run.variant, columnName, (run) => el("th", { scope: "row" }, run.variant)) });
  $("matrix-csv").onclick = () => save("kvbench-scores.csv", "text/csv", scoresCsv(parts));
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
