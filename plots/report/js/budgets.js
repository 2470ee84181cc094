// Budgets: what was asked, what was measured.
const AUDIT = {
  variant: [(r) => r, (r) => `${r.task} · ${r.variant}`],
  "tokens asked": [(r) => (r.full ? null : r.audit.tokens_budget_mean), (v) => number(v, 1)],
  "tokens attended": [(r) => r.audit.tokens_attended_mean, (v) => number(v, 1)],
  "of full attention": [(r) => r.audit.effective_ratio, (v) => number(v)],
  "find KB/step asked": [(r) => r.audit.comm_bytes, (v) => scaled(v, 1e3)],
  "find KB/step": [(r) => r.audit.bytes_find_per_step, (v) => scaled(v, 1e3)],
  "searched KB/step": [(r) => r.audit.bytes_searched_per_step, (v) => scaled(v, 1e3)],
  "KV KB/step": [(r) => r.audit.bytes_moved_kv_per_step, (v) => scaled(v, 1e3)],
  "device MB": [(r) => r.audit.bytes_resident_device, (v) => scaled(v, 1e6, 2)],
  "host MB": [(r) => r.audit.bytes_resident_host, (v) => scaled(v, 1e6, 2)],
  "allocated MB": [(r) => r.audit.bytes_resident_device_actual, (v) => scaled(v, 1e6, 2)],
  "cache hits": [(r) => r.audit.cache_hit_rate, (v) => number(v)],
  "prefill s": [(r) => r.audit.prefill_s, (v) => number(v, 2)],
  "s/token": [(r) => r.audit.tpot_s, (v) => number(v)],
  "layers whole": [(r) => r.whole_layers, (v) => (is(v) ? String(v) : "-")],
  "within budget": [(r) => r.audit.within_budget, (v) => (!is(v) ? "-" : v ? "yes" : "! no")],
};

function drawAudit(list) {
  const [by, direction] = sortedBy("audit", "variant");
  const [value] = AUDIT[by] || AUDIT.variant;
  const order = [...list].sort((x, y) => {
    if (value === AUDIT.variant[0]) return direction * (natural(x.task, y.task) || inOrder(x, y));
    const [u, v] = [value(x), value(y)];
    return is(u) && is(v) ? direction * (u - v) : Number(!is(u)) - Number(!is(v));
  });
  const head = el("tr", {}, Object.keys(AUDIT).map((name) => sortable("audit", name, name, by, direction, () => drawAudit(shown()), [])));
  const several = severalGroups(list);
  const body = lazily(el("tbody", {}), order, (run) => el("tr", {}, Object.entries(AUDIT).map(([name, [of, show]]) => {
    const text = show(of(run));
    if (name !== "variant") return el("td", { class: text.startsWith("!") ? "flag" : null }, text);
    return el("th", { scope: "row" }, text, several ? el("span", { class: "sub" }, run.group) : null);
  })));
  $("audit").replaceChildren(list.length ? table(head, body, "Budgets") : none("No run passes the filters."));
}
