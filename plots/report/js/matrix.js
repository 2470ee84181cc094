// All scores: a row per variant, a column per benchmark, whose datasets open next to its average.
function byGroup(list) {
  const groups = new Map();
  for (const run of list) grouped(groups, run.group).push(run);
  return groups;
}

// The columns of a group: of a benchmark with an average that alone, unless it was opened.
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
    return left.map((dataset) => ({ key: `${task} · ${dataset}`, task, dataset, metric: datasets.get(dataset), more: folds && dataset === "average" ? names.length - 1 : 0 }));
  });
}

function rowsOfMatrix(members) {
  const rows = new Map();
  for (const run of members) {
    const row = rows.get(run.variant) || { run, cells: new Map() };
    rows.set(run.variant, row);
    for (const part of run.parts) {
      const key = `${run.task} · ${part.dataset}`;
      if (!row.cells.has(key)) row.cells.set(key, [run, part]);
    }
  }
  return [...rows.values()].sort((a, b) => inOrder(a.run, b.run));
}

function drawMatrix(list) {
  const open = new Set(fromList(state.get("open")));
  const redraw = () => drawMatrix(list);
  const sections = [];
  for (const [group, members] of byGroup(list)) {
    const flip = (task) => { if (!open.delete(task)) open.add(task); setState({ open: asList(open) }); redraw(); };
    const columns = columnsOf(members, open);
    const fold = (column) => button(open.has(column.task) ? "fold datasets" : `${column.more} datasets`, () => flip(column.task),
      { class: "fold", "aria-expanded": String(open.has(column.task)) });
    const more = (column) => [el("span", { class: "sub" }, inUnit(column.metric)), column.more ? fold(column) : null];
    const rows = rowsOfMatrix(members);
    const drawn = sheet("sort", group, [
      { key: "variant", title: "variant", cell: ({ run }) => el("th", { scope: "row" }, run.variant) },
      ...columns.map((column) => ({ key: column.key, title: column.key, more: more(column),
        value: ({ cells }) => (cells.has(column.key) ? cells.get(column.key)[1].score : null),
        cell: ({ cells }) => scoreCell(...(cells.get(column.key) || [null, null])) })),
    ], rows.map((row) => ({ ...row, method: row.run.method })), redraw, sections.length === 0);
    const asTex = (event) => copy(texTable(["variant", ...columns.map(({ key }) => key)],
      rows.map(({ run, cells }) => [run.variant, ...columns.map(({ key }) => texCell((cells.get(key) || [])[1]))]), group, "scores"), event.currentTarget);
    sections.push(el("div", { class: "titled" }, el("h3", {}, group), button("copy TeX", asTex)), drawn);
  }
  $("matrix").replaceChildren(...(sections.length ? sections : [none("No run passes the filters.")]));
}
