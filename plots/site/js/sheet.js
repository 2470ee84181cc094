// One kind of table for all sections: sorted by any column, a method's rows lit. On a narrow page a row is a card.
// Not here: what a cell says (`card.js`).

// Columns are { key, title, more, value, cell }: `value(row)` is what it sorts by (the rows' own order without it),
// `cell(row)` its element. What it is sorted by stands in the address as `name`.
function sheet(name, label, columns, rows, redraw, isNear = true) {
  const [by, direction] = sortedBy(name, columns[0].key);
  const { value } = columns.find((one) => one.key === by) || columns[0];
  const ordered = [...rows];
  if (!value && direction < 0) ordered.reverse();
  if (value) ordered.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    return is(x) && is(y) ? direction * (x - y) : Number(!is(x)) - Number(!is(y));
  });
  const head = el("tr", {}, columns.map((one) => sortable(name, one, by, direction, redraw)));
  const body = lazily(el("tbody", {}), ordered, (row) => el("tr", { class: [isLit(row.method) && "lit", row.tied && "tied"].filter(Boolean).join(" ") || null }, columns.map((one, i) => {
    const cell = one.cell(row);
    if (i) cell.dataset.head = one.title;
    return cell;
  })), isNear);
  return table(head, body, label);
}

// --- headings that sort, with what is sorted by in the address ---

function sortedBy(name, usual) {
  const [, sign, key] = /^(-?)(.*)$/s.exec(state.get(name) || usual);
  return [key, sign ? -1 : 1];
}

function sortable(name, { key, title, more }, by, direction, redraw) {
  const sort = button(title, (event) => {
    const i = [...event.currentTarget.closest("tr").children].indexOf(event.currentTarget.closest("th"));
    const place = event.currentTarget.closest("[id]").id;
    setState({ [name]: by === key && direction > 0 ? `-${key}` : key });
    Promise.resolve(redraw()).then(() => {
      const again = document.querySelector(`#${place} thead tr`).children[i];
      if (again) again.querySelector("button").focus();
    });
  });
  return el("th", { scope: "col", "aria-sort": key === by ? (direction > 0 ? "ascending" : "descending") : null }, sort, more || []);
}

// --- one method that stands out, in tables and charts ---

const lit = () => state.get("lit") || "";
const isLit = (method) => is(method) && method === lit();
const nameCell = (method, text) => el("th", { scope: "row" },
  button([mark(method), " ", text], () => { setState({ lit: isLit(method) ? null : method }); update(); }, { class: "name", "aria-pressed": String(isLit(method)) }));
