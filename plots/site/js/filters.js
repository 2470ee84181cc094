// Which runs are shown: the data that all sections read, and the boxes that leave runs out.
let index = { benchmarks: [], changes: [] };
let runs = []; // of the benchmark that is shown
let looks = {};
let few = 0; // samples, below which no interval and no test is said
const read = new Map(); // benchmarks by id, with their runs, as far as they were loaded

async function readBenchmark(id) {
  if (read.has(id)) return read.get(id);
  const told = await once(`${id}/data-overview`);
  const pairs = rowsOf(told.pairs);
  const parts = rowsOf(told.parts);
  let at = 0;
  parts.forEach((part, i) => { part.paired = told.has_pair[i] ? pairs[at++] : null; });
  at = 0;
  const found = { ...index.benchmarks.find((one) => one.id === id), runs: rowsOf(told.runs), looks: told.looks, starts: told.starts };
  found.runs.forEach((run, i) => {
    Object.assign(run, { i, bench: found });
    run.parts = parts.slice(at, at + run.n_parts);
    at += run.n_parts;
  });
  Object.assign(looks, told.looks);
  few = told.few;
  read.set(id, found);
  return found;
}

const lower = (metric) => index.metrics[metric][0] === "lower";
const isShare = (metric) => index.metrics[metric][1] === 100;
const digits = (metric) => (isShare(metric) ? 1 : 3);
// A metric with its unit, and which direction is better where that is not plain.
const inUnit = (metric) => `${metric}${isShare(metric) ? ", 0 to 100" : ""}${lower(metric) ? ", lower is better" : ""}`;
const fullFor = (run) => run.bench.runs.find((one) => one.full && one !== run);
// Full attention first, then by name, and budgets in their order.
const inOrder = (a, b) =>
  Number(b.full) - Number(a.full) || natural(a.label, b.label) || (a.size || 0) - (b.size || 0)
  || (a.comm_size || 0) - (b.comm_size || 0);

// Full attention stays beside what a search or one `comm` leaves.
const goneMethods = () => fromList(state.get("hide"));
const shown = (list = runs) => {
  const gone = new Set(goneMethods());
  const [name, comm] = [(state.get("q") || "").trim().toLowerCase(), state.get("comm")];
  return list.filter((run) => !gone.has(run.method)
    && (run.full || (`${run.label} ${run.method}`.toLowerCase().includes(name) && (!comm || run.comm === comm))));
};

function hide(methods) {
  setState({ hide: asList(methods) });
  update();
}
