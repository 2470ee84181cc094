// Budgets: what was asked, what was measured.
const AUDIT = {
  variant: [(r) => r, (r) => `${r.task} · ${r.variant}`],
  "budget, tokens": [(r) => (r.full ? null : r.audit.tokens_budget_mean), (v) => number(v, 1)],
  "attended, tokens": [(r) => r.audit.tokens_attended_mean, (v) => number(v, 1)],
  "share of the cache": [(r) => r.audit.effective_ratio, (v) => number(v)],
  "comm, KB/step": [(r) => r.audit.comm_bytes, (v) => scaled(v, 1e3)],
  "index read, KB/step": [(r) => r.audit.bytes_find_per_step, (v) => scaled(v, 1e3)],
  "searched, KB/step": [(r) => r.audit.bytes_searched_per_step, (v) => scaled(v, 1e3)],
  "KV moved, KB/step": [(r) => r.audit.bytes_moved_kv_per_step, (v) => scaled(v, 1e3)],
  "device, MB": [(r) => r.audit.bytes_resident_device, (v) => scaled(v, 1e6, 2)],
  "while reading, MB": [(r) => r.audit.bytes_prefill_peak, (v) => scaled(v, 1e6, 2)],
  "host, MB": [(r) => r.audit.bytes_resident_host, (v) => scaled(v, 1e6, 2)],
  "allocated, MB": [(r) => r.audit.bytes_resident_device_actual, (v) => scaled(v, 1e6, 2)],
  "cache hits": [(r) => r.audit.cache_hit_rate, (v) => number(v)],
  "prefill, s": [(r) => r.audit.prefill_s, (v) => number(v, 2)],
  "s/token": [(r) => r.audit.tpot_s, (v) => number(v)],
  "requests at once": [(r) => r.audit.largest_batch, (v) => number(v)],
  "tokens/s of so many": [(r) => r.audit.tokens_per_s_at_largest, (v) => number(v, 1)],
  "to full attention's": [(r) => r.audit.throughput_ratio, (v) => number(v, 2)],
  "uncompressed layers": [(r) => r.whole_layers, (v) => (is(v) ? String(v) : "-")],
  "within budget": [(r) => r.audit.within_budget, (v) => (!is(v) ? "-" : v ? "yes" : "! no")],
};
const TIMED = ["requests at once", "tokens/s of so many", "to full attention's"]; // columns that others than timed runs leave empty

function drawAudit(list) {
  const several = severalGroups(list);
  const order = [...list].sort((x, y) => natural(x.task, y.task) || inOrder(x, y));
  const entries = Object.entries(AUDIT).filter(([name, [of]]) => !TIMED.includes(name) || list.some((run) => is(of(run))));
  const columns = entries.map(([name, [of, show]]) => ({ key: name, title: name, value: name === "variant" ? null : of, cell: (run) => {
    const text = show(of(run));
    if (name !== "variant") return el("td", { class: text.startsWith("!") ? "flag" : null }, text);
    return el("th", { scope: "row" }, text, several ? el("span", { class: "sub" }, run.group) : null);
  } }));
  $("audit").replaceChildren(list.length ? sheet("audit", "Budgets", columns, order, () => drawAudit(shown())) : none("No run passes the filters."));
}
