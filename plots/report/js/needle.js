// Needle maps: score by depth and by the prompts' true lengths, a panel per variant.
const MOST_MAPS = 40;

function mapsOf(list) {
  const once = new Map();
  for (const run of list) {
    const key = `${run.group}|${run.variant}|${run.task}`;
    if (run.parts.some((part) => part.heat) && !once.has(key)) once.set(key, run);
  }
  return [...once.values()].sort(inOrder);
}

async function drawNeedles(list) {
  const all = mapsOf(list);
  const maps = all.slice(0, MOST_MAPS);
  const names = new Map(maps.map((run) => [run, nameIn(run, maps)]));
  const cells = maps.flatMap((run) => run.parts.flatMap((part) => (part.heat || []).map(([asked, depth, score, n, tokens]) =>
    ({ variant: names.get(run), asked, depth, score, n, tokens }))));
  // Prompts of one length that was asked for have about as many tokens, whatever the depth: their mean names the column.
  const lengths = new Map();
  for (const cell of cells) grouped(lengths, cell.asked).push(cell.tokens);
  for (const cell of cells) {
    const counts = lengths.get(cell.asked);
    cell.length = number(counts.reduce((sum, one) => sum + one, 0) / counts.length, 0);
  }
  $("needle-more").textContent = all.length > maps.length ? `The first ${maps.length} of ${all.length} maps; filters choose others.` : "";
  if (!cells.length) { clearChart("needle-chart", "No needle run passes the filters."); return; }
  const order = [...lengths.keys()].sort((a, b) => a - b).map((asked) => cells.find((cell) => cell.asked === asked).length);
  const columns = Math.max(1, Math.floor(($("needle-chart").clientWidth - 90) / 264));
  await draw("needle-chart", { ...specs.heatmap, columns }, { "@variants": unique(cells.map((one) => one.variant)), "@lengths": unique(order) }, { cells });
}
