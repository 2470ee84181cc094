// A method: what its card says, and how it did on every benchmark.
const badge = (text) => [el("span", { class: "badge" }, text), " "];

// Full attention is the line at 0: differences to it, in the benchmark's points, by the share of the cache.
function multiple(about, rows) {
  const found = rows.filter((row) => is(row.mean) && is(row.share));
  if (!found.length) return null;
  const most = Math.max(10, ...found.map((row) => Math.abs(row.mean)));
  const x = (share) => 6 + 188 * Math.min(1, share);
  const y = (mean) => 50 - (44 * mean) / most;
  const text = found.map((row) => `${row.variant}: ${signed(row.mean, 1)} at ${number(row.share, 2)} of the cache`).join("; ");
  return el("figure", {},
    svg("svg", { viewBox: "0 0 200 100", role: "img", "aria-label": text },
      svg("line", { x1: 0, x2: 200, y1: 50, y2: 50, stroke: css("--muted"), "stroke-dasharray": "3 3" }),
      found.map((row) => svg("circle", { cx: x(row.share), cy: y(row.mean), r: 4, fill: row.less ? css("--bad") : css("--accent") }))),
    el("figcaption", {}, link({ at: "board", bench: about.id, view: null }, `${about.task} · ${about.model}`), ` · Δ to full attention, up to ±${number(most, 0)}; red: shown to be worse`));
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
  const multiples = index.benchmarks.map((about) => multiple(about, rows.filter((row) => row.at === about.id))).filter(Boolean);
  $("method-card").replaceChildren(
    el("h2", {}, card ? card.title : name),
    el("p", {}, [golden, ...traits].flatMap(badge)),
    card ? el("p", {}, card.idea) : "",
    card ? el("dl", {}, Object.entries(card.parts).flatMap(([key, text]) => [el("dt", {}, key), el("dd", {}, text)])) : "",
    card && card.paper ? el("p", {}, card.paper, " ", card.link ? el("a", { href: card.link, rel: "noreferrer" }, card.link) : "") : "",
    card ? el("div", { class: "titled" }, el("pre", { class: "command" }, card.command), button("copy command", (event) => copy(card.command, event.currentTarget))) : "",
    card && card.bibtex ? el("div", { class: "titled" }, el("pre", { class: "command" }, card.bibtex), button("copy BibTeX", (event) => copy(card.bibtex, event.currentTarget))) : "",
    el("h3", {}, "On every benchmark"),
    multiples.length ? el("div", { class: "multiples" }, multiples) : none("No run of it stands beside full attention."));
}
