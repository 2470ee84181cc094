// A shortlist from what somebody has: each method with the runs that speak for it.
const NEEDS = {
  memory: ["Memory for the cache", { "0.1": "a tenth", "0.25": "a quarter", "0.5": "a half", "1": "all of it" }],
  link: ["Link to host memory", { none: "none", host: "there is one" }],
  many: ["Questions on a context", { one: "one", many: "many" }],
  long: ["Answers", { short: "short", long: "long: they fill the memory too" }],
};
const USUAL_NEEDS = { memory: "0.25", link: "none", many: "one", long: "short" };
const needed = (key) => (state.get(key) in NEEDS[key][1] ? state.get(key) : USUAL_NEEDS[key]);

const meets = (row) => row.share <= Number(needed("memory")) * 1.1 && (needed("link") === "host" || !row.host)
  && (needed("many") === "one" ? true : !row.question) && (needed("long") === "short" ? !row.of_answers : row.of_answers) && !row.over && !row.unpriced;

async function drawWhich() {
  const evidence = await once("data-evidence", rowsOf);
  $("needs").replaceChildren(...Object.entries(NEEDS).map(([key, [title, choices]]) => {
    const select = el("select", { id: `need-${key}`, onchange: (event) => { setState({ [key]: event.target.value }); drawWhich().then(() => $(`need-${key}`).focus()); } });
    options(select, Object.entries(choices).sort((x, y) => Number(x[0]) - Number(y[0]) || 0), needed(key));
    return el("label", {}, title, " ", select);
  }));
  const methods = new Map();
  for (const row of evidence.filter(meets)) grouped(methods, row.method).push(row);
  const rows = [...methods].map(([method, found]) => {
    const compared = found.filter((row) => is(row.less));
    const worse = compared.filter((row) => row.less).length;
    return { method, found, compared, worse, held: compared.length ? 1 - worse / compared.length : -1,
      mean: compared.length ? compared.reduce((sum, row) => sum + row.mean, 0) / compared.length : null };
  }).sort((x, y) => y.held - x.held || (y.mean ?? -1e9) - (x.mean ?? -1e9) || natural(x.method, y.method)).slice(0, 12);
  if (!rows.length) { $("shortlist").replaceChildren(none("No run meets all four. Give it more memory, or see what a link to the host allows.")); return; }
  const names = new Map(index.benchmarks.map((one) => [one.id, `${one.task} · ${one.model} · ${one.question}`]));
  $("shortlist").replaceChildren(sheet("which-by", "Shortlist", [
    { key: "method", title: "method", cell: ({ method }) => el("th", { scope: "row" }, link({ at: "method", m: method }, method)) },
    { key: "held", title: "not shown to be worse", value: (row) => row.held, cell: ({ compared, worse }) => el("td", {}, compared.length ? `${compared.length - worse} of ${compared.length} runs` : "not compared") },
    { key: "mean", title: "mean Δ to full attention", value: (row) => row.mean, cell: ({ mean }) => el("td", {}, is(mean) ? signed(mean, 1) : "-") },
    { key: "evidence", title: "evidence", cell: ({ found }) => el("td", {}, el("details", {}, el("summary", {}, `${found.length} runs`), el("ul", {}, found.slice(0, 40).map((row) =>
      el("li", {}, link({ at: "samples", bench: row.at, b: row.key, a: null, sample: null, dataset: null }, `${names.get(row.at)}: ${row.variant}`), ` ${number(row.score, 1)}, n ${row.n}, ${is(row.p) ? `p ${pWords(row.p, row.p_is_bound)}` : "not compared"}`))))) },
  ], rows, drawWhich));
}
