// Samples: what was asked, and what two runs answered.
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

// --- where a run comes from ---

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

// --- answers ---

// The two runs that the reader compares: those of the address, or full attention and the first other one.
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

// All runs to choose from, made when the reader is about to: of thousands, two lists are half of the page.
function fillRunChoice(select) {
  if (select.dataset.all) return;
  const chosen = select.value;
  select.replaceChildren(...[...runs].sort(inOrder).map((run) => el("option", { value: run.key, selected: run.key === chosen }, run.variant)));
  select.dataset.all = "yes";
}

// Which of the samples that both were asked pass the reader's filters.
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

// Which parts of the prompt the last step attended to, from its beginning on the left to its end.
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
