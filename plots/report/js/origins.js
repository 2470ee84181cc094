// Where each run comes from, and the command that makes it again. Unpacked when the reader comes here.
let origins = null;
let listed = [];
const pairs = (tree) => Object.entries(tree).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");

function originOf(origin) {
  const { versions, params, notes, files, env, command, same_as, ...facts } = origin;
  const hashes = Object.fromEntries(Object.entries(files).map(([name, sha]) => [`sha256 ${name}`, sha]));
  const entries = { ...facts, ...env, versions: pairs(versions), parameters: pairs(params), ...hashes,
    "the same run under other budgets": same_as.join(", "), notes: notes.join("; ") };
  const terms = Object.entries(entries).filter(([, value]) => is(value) && value !== "");
  return [el("div", { class: "titled" }, el("pre", { class: "command" }, command), button("copy command", (event) => copy(command, event.currentTarget))),
    el("dl", {}, terms.flatMap(([key, value]) => [el("dt", {}, key.replaceAll("_", " ")), el("dd", {}, String(value))]))];
}

async function fillOrigin(node, run) {
  origins = origins || unpack("data-origins").then(JSON.parse);
  const all = await origins;
  if (node.childElementCount === 1) node.append(...originOf(all[run.i]));
}

function drawOrigins(list) {
  listed = [...list].sort((a, b) => natural(a.folder, b.folder));
  const wanted = state.get("run");
  const first = listed.find((run) => run.key === wanted);
  if (first) listed = [first, ...listed.filter((run) => run !== first)];
  const box = el("div", {});
  lazily(box, listed, (run) => {
    const node = el("details", {}, el("summary", {}, `${run.folder} — ${run.variant}`));
    node.addEventListener("toggle", () => node.open && fillOrigin(node, run));
    if (run === first) node.open = true;
    return node;
  });
  $("origins").replaceChildren(listed.length ? box : none("No run passes the filters."));
}
