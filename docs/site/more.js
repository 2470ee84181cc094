"use strict";
const csvCell = (value) => {
const text = !is(value) ? "" : String(value);
const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};
const csv = (rows) => rows.map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";
const TEX = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "≈": "$\\approx$", "·": "$\\cdot$", "−": "--" };
const tex = (text) => String(text).replace(/[\\~^≈·−]|[&%$#_{}]/g, (sign) => TEX[sign] || `\\${sign}`);
function texTable(head, rows, caption, label) {
const line = (cells) => `${cells.map(tex).join(" & ")} \\\\`;
return ["\\begin{table}", "\\centering", `\\caption{${tex(caption)}}`, `\\label{tab:${label.replace(/[^A-Za-z0-9]+/g, "-").toLowerCase()}}`,
`\\begin{tabular}{l${"r".repeat(head.length - 1)}}`, "\\toprule", line(head), "\\midrule", ...rows.map(line), "\\bottomrule",
"\\end{tabular}", "\\end{table}", ""].join("\n");
}
function save(name, type, text) {
const url = URL.createObjectURL(new Blob([text], { type }));
const anchor = el("a", { href: url, download: name });
document.body.append(anchor);
anchor.click();
anchor.remove();
setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
async function copy(text, from) {
let done = true;
try {
await navigator.clipboard.writeText(text);
} catch { // a browser that gives a page from disk no clipboard
const area = el("textarea", {}, text);
document.body.append(area);
area.select();
done = document.execCommand("copy");
area.remove();
}
const before = from.textContent;
from.textContent = done ? "copied" : "not copied";
setTimeout(() => { from.textContent = before; }, 1500);
}
const COLUMNS = {
verified: (run) => run.verdict, rank: (run, part) => ranked(part), folder: (run) => run.folder, task: (run) => run.task, dataset: (run, part) => part.dataset, model: (run) => run.model,
method: (run) => run.method, label: (run) => run.label, budget: (run) => run.budget, comm: (run) => run.comm,
metric: (run, part) => part.metric, n: (run, part) => part.n, n_oom: (run) => run.n_oom, score: (run, part) => part.score,
low: (run, part) => part.ci && part.ci[0], high: (run, part) => part.ci && part.ci[1], standing: (run, part) => part.standing,
vs_full: (run, part) => part.paired && part.paired.mean, vs_full_low: (run, part) => part.paired && part.paired.ci && part.paired.ci[0],
vs_full_high: (run, part) => part.paired && part.paired.ci && part.paired.ci[1], vs_full_n: (run, part) => part.paired && part.paired.n,
p: (run, part) => part.paired && part.paired.p, p_is_bound: (run, part) => part.paired && part.paired.p_is_bound,
p_holm: (run, part) => part.paired && part.paired.holm, p_holm_is_bound: (run, part) => part.paired && part.paired.holm_is_bound,
within_budget: (run, part) => !part.over, tokens_budget: (run) => run.audit.tokens_budget_mean,
tokens_attended: (run, part) => part.cost.tokens, share_attended: (run, part) => part.cost.share,
device_bytes: (run, part) => part.cost.device, device_and_host_bytes: (run, part) => part.cost.resident,
share_of_bytes: (run, part) => part.cost.memory, quality_kept: (run, part) => { const kept = quality(run, part); return kept && kept.value; }, moved_bytes_per_step: (run, part) => part.cost.moved, tpot_s: (run) => run.audit.tpot_s, conditions: (run) => run.group,
};
function scoresCsv(list) {
const rows = list.map(([run, part]) => Object.values(COLUMNS).map((of) => of(run, part)));
return csv([Object.keys(COLUMNS), ...rows]);
}
const texCell = (part) => (part ? `${part.over ? "! " : ""}${part.standing === "tie" ? "≈ " : ""}${number(part.score, digits(part.metric))}` : "-");
const MOST_WORDS = 700; // of a text; the table has their square
const wordsOf = (text) => text.match(/\s+|[^\s]+/g) || [];
function compareWords(ours, theirs) {
const [a, b] = [wordsOf(ours), wordsOf(theirs)];
const plain = a.map((word) => [word, true]);
if (a.length > MOST_WORDS || b.length > MOST_WORDS) return plain;
const width = b.length + 1;
const longest = new Uint16Array((a.length + 1) * width);
for (let i = a.length - 1; i >= 0; i -= 1) {
for (let j = b.length - 1; j >= 0; j -= 1) {
longest[i * width + j] = a[i] === b[j] ? longest[(i + 1) * width + j + 1] + 1
: Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
}
}
const found = [];
let [i, j] = [0, 0];
while (i < a.length) {
if (j < b.length && a[i] === b[j]) { found.push([a[i], true]); i += 1; j += 1; }
else if (j < b.length && longest[i * width + j + 1] >= longest[(i + 1) * width + j]) j += 1;
else { found.push([a[i], !a[i].trim()]); i += 1; }
}
return found;
}
function marked(ours, theirs) {
return el("pre", { class: "answer" }, ours ? compareWords(ours, theirs).map(([word, same]) => (same ? word : el("mark", {}, word))) : "(nothing)");
}
const PAGE = 200; // samples in the list at first
async function answersOf(run) {
const start = run.bench.starts.filter((one) => one <= run.i).pop();
const columns = (await once(`${run.bench.id}/data-samples-${start}`))[run.i - start];
return new Map(columns.at.map((at, i) => [at, sampleOf(columns, at, i)]));
}
function sampleOf(columns, at, i) {
const of = (key) => (columns[key] ? columns[key][i] : null);
const ledger = Object.keys(columns).filter((key) => key.startsWith("ledger."));
return { at, score: of("score"), prediction: of("prediction") || "", generated: of("generated"), error: of("error"), strip: of("strip"),
ledger: Object.fromEntries(ledger.map((key) => [key.slice(7), of(key)])), fields: of("fields"), report: of("report") };
}
const originOf = async (run) => (await once(`${run.bench.id}/data-origins`))[run.i];
const commandOf = ({ command }) => [el("pre", { class: "command" }, command), button("copy command", (event) => copy(command, event.currentTarget))];
const listOf = (tree) => Object.entries(tree).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
function factsOf(run, { id, versions, params, notes, files, env, command, same_as, ...facts }) {
const hashes = Object.fromEntries(Object.entries(files).map(([name, sha]) => [`sha256 ${name}`, sha]));
const entries = { id, folder: run.kept ? null : run.folder, "handed in by": run.by, "why no more": run.why, "superseded by": run.superseded_by, machine: run.kept ? null : run.machine,
...(run.kept ? {} : facts), ...env, versions: listOf(versions), parameters: listOf(params), ...hashes, "the same run under other budgets": same_as.join(", "), notes: notes.join("; ") };
return Object.entries(entries).filter(([, value]) => is(value) && value !== "").flatMap(([key, value]) => [el("dt", {}, key.replaceAll("_", " ")), el("dd", {}, String(value))]);
}
async function drawOrigins(sides) {
const found = await Promise.all(sides.map(originOf));
$("origins").replaceChildren(...sides.map((run, i) => el("details", { open: i === 1 && state.get("at") === "provenance" }, el("summary", {}, `${"AB"[i]}: ${run.variant} `, verdictOf(run), " ", oldMark(run)),
el("div", { class: "titled" }, commandOf(found[i])), el("dl", {}, factsOf(run, found[i])))));
}
function chosenRuns(shuffled) {
const list = [...shuffled].sort(inOrder);
const full = list.find((run) => run.full) || list[0];
const a = list.find((run) => run.key === state.get("a")) || full;
const other = a && (list.find((run) => run !== a) || a);
return [a, list.find((run) => run.key === state.get("b")) || other];
}
function drawRunChoice(list) {
const [a, b] = chosenRuns(list);
for (const [id, run] of [["run-a", a], ["run-b", b]]) {
$(id).replaceChildren(...(run ? [el("option", { value: run.key }, run.variant)] : []));
$(id).dataset.all = "";
}
}
function fillRunChoice(select) {
if (select.dataset.all) return;
const chosen = select.value;
select.replaceChildren(...[...runs].sort(inOrder).map((run) => el("option", { value: run.key, selected: run.key === chosen }, run.variant)));
select.dataset.all = "yes";
}
function keptSamples(both, two, texts, isLower) {
const which = state.get("which") || "all"; // of the samples
const words = (state.get("find") || "").toLowerCase();
const dataset = state.get("dataset");
const flip = isLower ? -1 : 1;
return both.filter((one) => {
const other = two.get(one.at);
const difference = flip * ((one.score ?? -Infinity) - (other.score ?? -Infinity));
const wanted = { all: true, differ: one.score !== other.score, a: difference > 0, b: difference < 0 }[which];
const about = texts[one.at];
if (!wanted || (dataset && about.dataset !== dataset)) return false;
return !words || [about.id, ...about.references, one.prediction, other.prediction].join("\n").toLowerCase().includes(words);
});
}
async function drawRun() {
drawRunChoice(runs);
$("cut").textContent = runs[0].bench.cut;
await drawSamples();
}
let drawingSamples = 0;
async function drawSamples(limit = PAGE) {
const turn = (drawingSamples += 1);
const [a, b] = chosenRuns(runs);
const [texts, one, two] = await Promise.all([once(`${a.bench.id}/data-asked`), answersOf(a), answersOf(b), drawOrigins([a, b])]);
if (turn !== drawingSamples) return; // the reader chose others meanwhile
const both = [...one.values()].filter((sample) => two.has(sample.at));
options($("dataset"), [["", "all datasets"], ...unique(both.map((sample) => texts[sample.at].dataset)).sort(natural).map((name) => [name, name])], state.get("dataset") || "");
const kept = keptSamples(both, two, texts, lower(a.parts[0] ? a.parts[0].metric : "score"));
$("samples-count").textContent = both.length ? `${kept.length} of ${both.length} samples that A and B were both asked`
: "A and B were asked no sample in common.";
const buttons = kept.slice(0, limit).map((sample) => el("button", { type: "button", "data-at": sample.at, onclick: () => pick(sample.at, true), onkeydown: walk },
el("span", {}, texts[sample.at].id), el("span", {}, `${number(sample.score, 1)} | ${number(two.get(sample.at).score, 1)}`)));
if (kept.length > limit) buttons.push(button(`${kept.length - limit} more`, () => drawSamples(limit + PAGE)));
$("sample-list").replaceChildren(...buttons);
function pick(at, byHand) {
if (byHand) setState({ sample: texts[at].id, a: a.key, b: b.key });
for (const each of $("sample-list").children) each.setAttribute("aria-current", String(each.dataset.at === String(at)));
$("sample").replaceChildren(...detail(texts[at], [a, one.get(at)], [b, two.get(at)]));
}
const wanted = kept.find((sample) => texts[sample.at].id === state.get("sample"));
if (kept.length) pick((wanted || kept[0]).at, false);
else $("sample").replaceChildren(none("No sample to show."));
}
function walk(event) {
const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
const next = step && event.currentTarget[step];
if (next) { event.preventDefault(); next.focus(); next.click(); }
}
function detail(about, ...sides) {
const length = about.tokens === about.original_tokens ? "" : ` (cut from ${about.original_tokens})`;
const end = about.end || {};
const isKept = sides.every(([run]) => run.kept);
const here = () => new URL(address({ at: "samples", sample: about.id }), location.href).href;
return [
el("div", { class: "titled" }, el("h3", {}, about.id), button("copy link", (event) => copy(here(), event.currentTarget))),
el("p", { class: "hint" }, `${about.dataset} · ${about.tokens ? `prompt of ${about.tokens} tokens` : ""}${length}${isKept ? "" : `, ${about.sha}`}`),
...(end.context || end.question || end.cue ? [el("strong", {}, "What was asked"),
el("pre", { class: "prompt" }, end.evidence ? el("mark", {}, `${end.evidence}\n\n`) : "", el("span", { class: "context" }, end.context || ""), el("b", {}, end.question || ""), el("i", {}, end.cue || ""))]
: [el("p", { class: "hint" }, isKept ? "Only scores are kept, no answers: the command above gives them again." : "This run was made before prompts were written beside the answers.")]),
...(isKept ? [] : [el("strong", {}, about.references.length > 1 ? "References" : "Reference"),
...(about.references.length ? about.references.map((text) => el("pre", {}, text)) : [none("none")])]),
el("div", { class: "sides" }, sides.map(([run, one], i) => el("div", { class: "side" },
el("h4", {}, `${"AB"[i]}: ${run.variant}`),
el("p", { class: "hint" }, one.score === null && one.error ? `out of memory: ${one.error}` : `score ${number(one.score, 1)} · ${one.generated} tokens generated`),
strip(one.strip, run), run.kept ? null : marked(one.prediction, sides[1 - i][1].prediction),
folded("Ledger", one.ledger), folded("Task's columns", one.fields), folded("Method's report", one.report)))),
];
}
function strip(levels, run) {
if (!levels) return null;
const shares = [...levels].map((sign) => (sign.charCodeAt(0) - 48) / 63);
const mean = shares.reduce((sum, share) => sum + share, 0) / shares.length;
const text = `${number(100 * mean, 1)} % of the prompt attended to at the last step, mean over heads and layers`;
const bars = shares.map((share, i) => svg("rect", { x: i, y: 0, width: 1, height: 1, "shape-rendering": "crispEdges", "fill-opacity": share.toFixed(2) }));
return el("figure", { class: "strip" },
svg("svg", { viewBox: `0 0 ${shares.length} 1`, preserveAspectRatio: "none", role: "img", "aria-label": `${run.variant}: ${text}` }, bars),
el("figcaption", {}, el("span", {}, "start"), el("span", {}, text), el("span", {}, "end")));
}
function folded(title, tree) {
if (!tree || !Object.keys(tree).length) return null;
return el("details", {}, el("summary", {}, title), el("pre", {}, typeof tree === "string" ? tree : JSON.stringify(tree, null, 1)));
}
function pivot(id, sortedAs, { rows, columns, head, label, caption }) {
const cellOf = (row, { key }) => row.cells.get(key) || [null, null];
$(id).replaceChildren(rows.length ? sheet(sortedAs, label, [
{ key: head, title: head, cell: (row) => row.first },
...columns.map((column) => ({ ...column, value: (row) => { const part = cellOf(row, column)[1]; return part && part.score; }, cell: (row) => scoreCell(...cellOf(row, column)) })),
], rows, update) : none("No run passes the filters."));
$(`${id}-tex`).onclick = (event) => copy(texTable([head, ...columns.map(({ title }) => title)],
rows.map((row) => [row.name, ...columns.map((column) => texCell(cellOf(row, column)[1]))]), ...caption), event.currentTarget);
}
function rowsBy(members, nameOf, keyOf, firstOf) {
const rows = new Map();
for (const [run, part] of members) {
if (!rows.has(nameOf(run))) rows.set(nameOf(run), { name: nameOf(run), method: run.method, first: firstOf(run), cells: new Map() });
const { cells: of } = rows.get(nameOf(run));
if (!of.has(keyOf(run, part))) of.set(keyOf(run, part), [run, part]);
}
return [...rows.values()];
}
function drawBudgets() {
view = chosenRows(shown());
const { rows, dataset, metric } = view;
const columns = budgetsOf(rows.map(([run]) => run).filter((run) => run.budget !== "full")).map((key) => ({ key, title: key }));
if (rows.some(([run]) => run.budget === "full")) columns.unshift({ key: "full", title: "full attention" });
pivot("differences", "by", { columns, head: "method", label: "Differences to full attention", rows: rowsBy(rows, (run) => run.series, (run) => run.budget, (run) => nameCell(run.method, run.series)),
caption: [`${runs[0].task}, ${dataset}: ${inUnit(metric)} by budget. ${runs[0].group}. ≈ marks what is not shown to be worse than the best.`, `${runs[0].task}-${dataset}`] });
}
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
const MOST_MAPS = 40;
function drawNeedles() {
const all = shown().filter((run) => run.parts.some((part) => part.heat)).sort(inOrder);
const maps = all.slice(0, MOST_MAPS);
const cellsOf = (run) => run.parts.flatMap((part) => part.heat || []);
$("needle-more").textContent = all.length > maps.length ? `The first ${maps.length} of ${all.length} maps; filters choose others.` : "";
if (!maps.length) { $("needle-chart").replaceChildren(none("No run of this benchmark has needles at lengths and depths.")); return; }
const lengths = new Map();
for (const [asked, , , , tokens] of maps.flatMap(cellsOf)) grouped(lengths, asked).push(tokens);
const named = new Map([...lengths].sort(([a], [b]) => a - b).map(([asked, counts]) => [asked, number(counts.reduce((sum, one) => sum + one, 0) / counts.length, 0)]));
const panels = maps.map((run) => ({ title: run.variant, cells: cellsOf(run).map(([asked, depth, score, n, tokens]) => ({ column: named.get(asked), row: depth, share: score / 100,
text: [run.variant, `tokens, mean ${number(tokens, 0)}`, `length asked ${asked}`, `depth ${depth} %`, `score ${number(score, 1)}`, `n ${n}`].join("\n") })) }));
heatMaps("needle-chart", { panels, columns: unique([...named.values()]), rows: unique(maps.flatMap(cellsOf).map(([, depth]) => depth)).sort((a, b) => a - b), xTitle: "prompt in tokens", yTitle: "depth in %",
label: "Scores by length and depth, a map per variant" });
}
const badge = (text) => [el("span", { class: "badge" }, text), " "];
function drawMultiple(node, about, rows) {
const text = rows.map((row) => `${row.variant}: ${signed(row.mean, 1)} at ${number(row.share, 2)} of the cache`).join("; ");
plot(node, { isSmall: true, height: 150, level: 0, label: `${about.task}, ${about.model}: ${text}`,
x: { title: "share of the cache", include: [0, 1] }, y: { title: "Δ to full attention", include: [-10, 10] },
points: rows.map((row) => ({ x: row.share, y: row.mean, method: row.method, hollow: !row.less, text: "" })) });
}
async function drawMethod() {
const [cards, evidence] = await Promise.all([once("data-methods"), once("data-evidence", rowsOf)]);
const names = unique([...Object.keys(cards), ...evidence.map((row) => row.method)]).sort(natural);
const name = names.includes(state.get("m")) ? state.get("m") : names[0];
options($("method-choice"), names.map((one) => [one, one]), name);
const card = cards[name];
const own = card ? card.name : name;
const rows = evidence.filter((row) => row.method === own || row.method === name);
const traits = [...(card ? card.traits : ["a file of its author's"]), rows.some((row) => row.whole) ? "leaves layers whole" : null,
rows.some((row) => row.host) ? "host memory" : null, rows.some((row) => row.learned) ? "learned or calibrated" : null].filter(Boolean);
const golden = card ? (card.golden ? "compared with vectors of the authors' code" : "no vectors of the authors' code") : "conformance kit alone";
const multiples = index.benchmarks.map((about) => [about, rows.filter((row) => row.at === about.id && is(row.mean) && is(row.share) && looks[row.method]), el("div", {})]).filter(([, found]) => found.length);
$("method-card").replaceChildren(
el("h2", {}, card ? card.title : name),
el("p", {}, [golden, ...traits].flatMap(badge)),
card ? el("p", {}, card.idea) : "",
card ? el("dl", {}, Object.entries(card.parts).flatMap(([key, text]) => [el("dt", {}, key), el("dd", {}, text)])) : "",
card && card.paper ? el("p", {}, card.paper, " ", card.link ? el("a", { href: card.link, rel: "noreferrer" }, card.link) : "") : "",
card ? el("div", { class: "titled" }, el("pre", { class: "command" }, card.command), button("copy command", (event) => copy(card.command, event.currentTarget))) : "",
card && card.bibtex ? el("div", { class: "titled" }, el("pre", { class: "command" }, card.bibtex), button("copy BibTeX", (event) => copy(card.bibtex, event.currentTarget))) : "",
el("h3", {}, "On every benchmark"),
multiples.length ? el("div", { class: "multiples" }, multiples.map(([about, , node]) => el("figure", {}, node, el("figcaption", {}, link({ at: "picture", bench: about.id, of: null, budget: null }, `${about.task} · ${about.model}, question ${about.question}`)))))
: none("No run of it stands beside full attention with its bytes."),
multiples.length ? el("p", { class: "hint" }, "Differences to full attention in the benchmark's points. Filled: shown to be worse.") : "");
for (const [about, found, node] of multiples) drawMultiple(node, about, found);
}
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
