// A method: what its card says, and how it did on every benchmark.
const badge = (text) => [el("span", { class: "badge" }, text), " "];

// Full attention is the line at 0: differences to it, in the benchmark's points, by the share of the cache.
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
