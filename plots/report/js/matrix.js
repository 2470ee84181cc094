// All scores: a row per variant, a column per benchmark, whose datasets open beside its average.
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

function sortRows(rows, key, direction) {
  if (key === "variant") return direction > 0 ? rows : [...rows].reverse();
  const score = (row) => (row.cells.has(key) ? row.cells.get(key)[1].score : null);
  return [...rows].sort((a, b) => {
    const [x, y] = [score(a), score(b)];
    return is(x) && is(y) ? direction * (x - y) : Number(!is(x)) - Number(!is(y));
  });
}

function drawMatrix(list) {
  const open = new Set(fromList(state.get("open")));
  const [by, direction] = sortedBy("sort", "variant");
  const sections = [];
  for (const [group, members] of byGroup(list)) {
    const columns = columnsOf(members, open);
    const rows = sortRows(rowsOfMatrix(members), by, direction);
    const flip = (task) => { if (!open.delete(task)) open.add(task); setState({ open: asList(open) }); drawMatrix(list); };
    const head = el("tr", {}, sortHead("variant", "variant", by, direction, () => drawMatrix(list)), columns.map((column) =>
      sortHead(column.key, column.key, by, direction, () => drawMatrix(list),
        el("span", { class: "sub" }, column.metric + (lower(column.metric) ? ", lower is better" : "")),
        column.more ? button(open.has(column.task) ? "fold datasets" : `${column.more} datasets`, () => flip(column.task), { class: "fold", "aria-expanded": String(open.has(column.task)) }) : null)));
    const body = lazily(el("tbody", {}), rows, ({ run, cells }) => el("tr", {}, el("th", { scope: "row" }, run.variant),
      columns.map(({ key }) => scoreCell(...(cells.get(key) || [null, null])))), sections.length === 0);
    const asTex = (event) => copy(texTable(["variant", ...columns.map(({ key }) => key)],
      rows.map(({ run, cells }) => [run.variant, ...columns.map(({ key }) => texCell((cells.get(key) || [])[1]))]), group, "scores"), event.currentTarget);
    sections.push(el("div", { class: "titled" }, el("h3", {}, group), button("copy TeX", asTex)), table(head, body, group));
  }
  $("matrix").replaceChildren(...(sections.length ? sections : [none("No run passes the filters.")]));
}

// --- headings that sort, with what is sorted by in the address ---

function sortedBy(name, usual) {
  const [, sign, key] = /^(-?)(.*)$/s.exec(state.get(name) || usual);
  return [key, sign ? -1 : 1];
}

function sortHead(key, text, by, direction, redraw, ...more) {
  return sortable("sort", key, text, by, direction, redraw, more);
}

function sortable(name, key, text, by, direction, redraw, more) {
  const sort = button(text, (event) => {
    const i = [...event.currentTarget.closest("tr").children].indexOf(event.currentTarget.closest("th"));
    const place = event.currentTarget.closest("section").id;
    setState({ [name]: by === key && direction > 0 ? `-${key}` : key });
    redraw();
    const again = document.querySelector(`#${place} thead tr`).children[i];
    if (again) again.querySelector("button").focus();
  });
  return el("th", { scope: "col", "aria-sort": key === by ? (direction > 0 ? "ascending" : "descending") : null }, sort, more);
}
