// What the reader takes away: CSV, TeX, SVG, and text for the clipboard.

// A cell that begins like a formula is one to a spreadsheet.
const csvCell = (value) => {
  const text = !is(value) ? "" : String(value);
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};
const csv = (rows) => rows.map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";

const TEX = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "≈": "$\\approx$", "·": "$\\cdot$", "−": "--" };
const tex = (text) => String(text).replace(/[\\~^≈·−]|[&%$#_{}]/g, (sign) => TEX[sign] || `\\${sign}`);

// A table as booktabs has it; the first column is text, the others are numbers.
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
// What a cell says in a table on paper.
const texCell = (part) => (part ? `${part.over ? "! " : ""}${part.standing === "tie" ? "≈ " : ""}${number(part.score, digits(part.metric))}` : "-");
