// One run: how far it is believed, where it comes from, what it answered next to full attention.
async function drawRun() {
  const [a, b] = chosenRuns(runs);
  drawRunChoice(runs);
  await drawSamples();
  if (!b) return;
  const origin = JSON.parse(await unpack(`data-origin-${b.i}`));
  const facts = [["id", b.id], ["handed in by", b.by], ["verified", b.verdict], ["why no more", b.why], ["superseded by", b.superseded_by], ["machine", b.machine]];
  $("origin").replaceChildren(el("p", {}, verdictOf(b), " ", oldMark(b)),
    el("dl", {}, facts.filter(([, value]) => value).flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)])), ...originOf(origin));
  const about = index.benchmarks.find((one) => one.id === bench);
  $("cut").textContent = about ? about.cut : "";
}
