// A card with all that is known of one score: for a tap, a click or the Enter key on a cell or on a point of a chart.
const tone = (part) => (part.paired ? { 1: "good", "-1": "bad", 0: "" }[lower(part.metric) ? -part.paired.sign : part.paired.sign] : "");

// What the corrected test says, in words.
function verdict(part) {
  const { holm, holm_is_bound: isBound, family, n, sign } = part.paired;
  if (n < few) return tooFew(n);
  const test = `p ${pWords(holm, isBound)}${family > 1 ? ` after Holm over ${family}` : ""}, n ${n}`;
  if (sign) return `${sign > 0 ? "higher" : "lower"} than full attention (${test})`;
  return `no significant difference to full attention (${test})`;
}
function difference({ metric, paired: { mean, ci, unit, n: samples } }) {
  const n = unit ? 3 : digits(metric);
  return `${signed(mean, n)}${unit ? ` ${unit}` : ""}${ci && samples >= few ? ` (${signed(ci[0], n)} to ${signed(ci[1], n)})` : ""}`;
}
const tested = (part) => difference(part) + (part.paired.n < few ? "" : `, p ${pWords(part.paired.holm, part.paired.holm_is_bound)}`);
const tooFew = (n) => `${n === 1 ? "one sample is" : `${n} samples are`} too few to compare`;
// The interval of a score; of an average each dataset is a sample.
const endsOf = (part) => (part.ci && (part.of ? part.of.length : part.n) >= few ? range(part.ci, digits(part.metric)) : "");
const STANDINGS = {
  bold: "best under this budget, by the corrected test",
  tie: "not shown to be worse than the best under this budget: a tie",
  "": null,
};

function facts(run, part) {
  const pair = part.paired;
  const kept = quality(run, part);
  return [
    ["score", `${number(part.score, digits(part.metric))} ${part.metric === "score" ? "" : part.metric}`],
    ["95 %", endsOf(part) || "-"],
    ["samples", part.of ? `${part.n}, of ${part.of.length} datasets that count alike` : String(part.n)],
    ["Δ vs full attention", pair ? difference(part) : run.full ? null : "no sample with the same prompt"],
    ["test", pair ? verdict(part) : null],
    ["uncorrected", pair && pair.n >= few ? `p ${pWords(pair.p, pair.p_is_bound)}` : null],
    ["quality kept", kept ? `${number(kept.value, 2)}${kept.ends ? ` (${kept.ends})` : ""} of full attention's ${kept.base}` : null],
    ["pairs", pair ? `${pair.more} above full attention, ${pair.same} equal, ${pair.less} below` : null],
    ["standing", STANDINGS[part.standing]],
    ["bytes held", is(part.cost.memory) ? `${number(part.cost.memory)} of the full cache's` : null],
    ["device", is(part.cost.device) ? `${scaled(part.cost.device, 1e6, 2)} MB` : null],
    ["tokens", is(part.cost.tokens) ? `${number(part.cost.tokens, 1)} attended per step${run.full ? "" : `, ${number(run.audit.tokens_budget_mean, 1)} of the prompt allowed`}` : null],
    ["moved", is(part.cost.moved) ? `${scaled(part.cost.moved, 1e3)} KB per step` : null],
    ["budget", part.over ? "! exceeded" : null],
    ["layers", run.whole_layers ? `the first ${run.whole_layers} are not compressed and lie outside the budget` : null],
    ["search", run.unpriced ? "reads all keys, outside every budget: a reference, on no front" : null],
    ["believed", run.kept ? `${run.verdict}: only scores are kept, no answers` : `${run.verdict}${run.why ? `: ${run.why}` : ""}`],
    ["memory", run.n_oom ? `${run.n_oom} samples ran out of memory` : null],
  ].filter(([, value]) => value);
}

// Where the answers of a run stand next to those of full attention.
function toSamples(run, part) {
  const full = fullFor(run);
  const dataset = part && !part.of ? part.dataset : null;
  return { bench: run.bench.id, a: (full || run).key, b: run.key, dataset, sample: null, at: "samples" };
}

let cardFrom = null;
function openCard(run, part, from) {
  cardFrom = from;
  const rows = facts(run, part).flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)]);
  const command = el("div", { class: "titled" });
  const close = button("✕", closeCard, { "aria-label": "close", class: "close" });
  $("card").replaceChildren(close,
    el("h3", {}, run.variant), el("p", { class: "hint" }, [run.task, part.dataset, run.group].filter((text, i, all) => all.indexOf(text) === i).join(" · ")),
    el("dl", {}, rows), command,
    el("p", { class: "links" }, link(toSamples(run, part), run.kept ? "scores of its samples" : "answers and origin"), link({ at: "method", m: run.preset }, "about the method")));
  more().then(() => originOf(run)).then((origin) => command.replaceChildren(...commandOf(origin)));
  $("card").hidden = false;
  close.focus({ preventScroll: true });
}

function closeCard() {
  $("card").hidden = true;
  if (cardFrom && cardFrom.isConnected) cardFrom.focus({ preventScroll: true });
  cardFrom = null;
}

// A table cell with a score, what it is worth, and its card.
function scoreCell(run, part) {
  if (!part) return el("td", { class: "absent" }, "-");
  const strong = part.standing === "bold" ? "strong" : "span";
  const signs = [part.over ? el("span", { class: "flag", title: "over budget" }, "! ") : null,
    part.standing === "tie" ? el("span", { class: "tie", title: STANDINGS.tie }, "≈ ") : null];
  const lines = [el("span", {}, signs, el(strong, { class: "score" }, number(part.score, digits(part.metric)))),
    el("small", {}, endsOf(part) ? `${endsOf(part)}, ` : "", link(toSamples(run, part), `n ${part.n}`))];
  if (part.paired) lines.push(el("small", { class: tone(part) }, tested(part)));
  if (run.n_oom) lines.push(el("small", { class: "flag" }, `${run.n_oom} out of memory`));
  const open = (event) => openCard(run, part, event.currentTarget);
  return el("td", { class: `cell ${tone(part) && `${tone(part)}-bg`}`, tabindex: 0, "aria-haspopup": "dialog",
    title: facts(run, part).map((pair) => pair.join(": ")).join("\n"),
    onclick: open, onkeydown: (event) => { if (event.key === "Enter" && event.target === event.currentTarget) open(event); } }, lines);
}

function listenToCards() {
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !$("card").hidden) closeCard(); });
  document.addEventListener("click", (event) => {
    if (!$("card").hidden && !event.target.closest("#card, .cell, .chart, .points")) { cardFrom = null; closeCard(); }
  });
}
