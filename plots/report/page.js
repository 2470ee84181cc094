"use strict";
// The report's behaviour. Everything from a run reaches the page as text: `textContent`, attributes, chart data.
// Not here: numbers, but for means over what is shown. They come from plots/report/.
(() => {
  const $ = (id) => document.getElementById(id);
  const read = (id) => JSON.parse($(id).textContent);
  const { runs, metrics, looks } = read("data-overview");
  runs.forEach((run, i) => (run.i = i));

  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return node;
  }
  const unique = (values) => [...new Set(values)];
  const number = (value, digits = 3) =>
    value === null || value === undefined ? "-" : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const signed = (value, digits = 3) => (value > 0 ? "+" : "") + number(value, digits);
  const scaled = (value, unit, digits = 1) => (value === null || value === undefined ? "-" : number(value / unit, digits));
  const none = (text) => el("p", { class: "none" }, text);
  const column = (run, part) => `${run.task} · ${part.dataset}`;
  const lower = (metric) => metrics[metric] === "lower";

  async function unpack(id) {
    const bytes = Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  // --- filters ---

  const FILTERS = { task: "Task", method: "Method", model: "Model", budget: "Ratio", comm: "Comm" };
  const hidden = Object.fromEntries(Object.keys(FILTERS).map((key) => [key, new Set()]));
  // Full attention has neither a ratio nor a comm, so these two filters leave it in.
  const shows = (run) =>
    Object.keys(FILTERS).every((key) => (run.full && (key === "budget" || key === "comm")) || !hidden[key].has(run[key]));
  const shown = () => runs.filter(shows);

  function buildFilters() {
    const form = $("filters");
    for (const [key, title] of Object.entries(FILTERS)) {
      const others = key === "budget" || key === "comm" ? runs.filter((run) => !run.full) : runs;
      const values = unique(others.map((run) => run[key])).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      const boxes = values.map((value) =>
        el("label", {}, el("input", { type: "checkbox", checked: true, "data-filter": key, value, onchange: (event) => {
          if (event.target.checked) hidden[key].delete(value); else hidden[key].add(value);
          label(); update();
        } }), value));
      const summary = el("summary", {});
      const label = () => {
        const left = values.length - hidden[key].size;
        summary.textContent = left === values.length ? `${title}: all` : `${title}: ${left} of ${values.length}`;
      };
      const all = el("button", { type: "button", onclick: () => {
        const wanted = hidden[key].size > 0;
        hidden[key] = new Set(wanted ? [] : values);
        boxes.forEach((box) => (box.firstChild.checked = wanted));
        label(); update();
      } }, "all / none");
      label();
      form.append(el("details", {}, summary, el("div", { class: "menu" }, all, boxes)));
    }
    form.append(el("output", { id: "count" }));
    form.addEventListener("submit", (event) => event.preventDefault());
    const close = (but) => form.querySelectorAll("details[open]").forEach((menu) => menu !== but && (menu.open = false));
    document.addEventListener("click", (event) => close(event.target.closest("#filters details")));
    form.addEventListener("focusin", (event) => close(event.target.closest("details")));
    form.addEventListener("keydown", (event) => {
      const menu = event.target.closest("details[open]");
      if (event.key === "Escape" && menu) { menu.open = false; menu.firstChild.focus(); }
    });
  }

  // --- overview ---

  function byGroup(list) {
    const groups = new Map();
    for (const run of list) groups.set(run.group, [...(groups.get(run.group) || []), run]);
    return groups;
  }

  function drawMatrix(list) {
    const sections = [];
    for (const [group, members] of byGroup(list)) {
      const columns = unique(members.flatMap((run) => run.parts.map((part) => column(run, part))));
      const rows = new Map();
      for (const run of members) {
        const cells = rows.get(run.variant) || new Map();
        rows.set(run.variant, cells);
        for (const part of run.parts) if (!cells.has(column(run, part))) cells.set(column(run, part), [run, part]);
      }
      const order = [...rows.keys()].sort((a, b) => isFull(rows.get(b)) - isFull(rows.get(a)) || a.localeCompare(b, "en", { numeric: true }));
      const metricOf = (name) => [...rows.values()].map((cells) => cells.get(name)).find(Boolean)[1].metric;
      const head = el("tr", {}, el("th", { scope: "col" }, "variant"), columns.map((name) => {
        const metric = metricOf(name);
        return el("th", { scope: "col" }, name, el("span", { class: "sub" }, metric + (lower(metric) ? ", lower is better" : "")));
      }));
      const body = order.map((variant) => el("tr", {}, el("th", { scope: "row" }, variant), columns.map((name) => cell(rows.get(variant).get(name)))));
      sections.push(el("h3", {}, group), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": group }, el("table", {}, el("thead", {}, head), el("tbody", {}, body))));
    }
    $("matrix").replaceChildren(...(sections.length ? sections : [none("No run passes the filters.")]));
  }
  const isFull = (cells) => Number([...cells.values()][0][0].full);

  function cell(found) {
    if (!found) return el("td", {}, "-");
    const [run, part] = found;
    const range = part.ci ? `${number(part.ci[0])} to ${number(part.ci[1])}` : "no interval";
    const lines = [el("span", {}, part.over ? el("span", { class: "flag", title: "over budget" }, "! ") : null, number(part.score)), el("small", {}, `${range}, n ${part.n}`)];
    let tone = "";
    let title = run.n_oom ? `${run.n_oom} samples ran out of memory` : null;
    if (part.paired) {
      const { mean, ci, n, more, same, less, p, holm, family, unit } = part.paired;
      const sign = holm < 0.05 ? Math.sign(mean) : 0; // LEVEL of plots/stats.py
      tone = { 1: "good", "-1": "bad", 0: "" }[lower(part.metric) ? -sign : sign];
      lines.push(el("small", { class: tone }, `${signed(mean)}${unit ? " " + unit : ""} (${ci ? `${signed(ci[0])} to ${signed(ci[1])}` : "no interval"}), n ${n}`));
      title = `${more} above full attention, ${same} equal, ${less} below; p ${number(p)}, Holm's over ${family} ${number(holm)}` + (title ? `; ${title}` : "");
    }
    if (run.n_oom) lines.push(el("small", { class: "flag" }, `${run.n_oom} out of memory`));
    return el("td", { class: tone ? `${tone}-bg` : null, title, tabindex: title ? 0 : null, "aria-description": title }, lines);
  }

  // --- charts ---

  const COSTS = {
    device: ["KV and metadata on the device, bytes", (a) => a.bytes_resident_device],
    moved: ["moved per step to attend and to find, bytes", (a) => sum([a.bytes_moved_kv_per_step, a.bytes_moved_meta_per_step, a.bytes_searched_per_step])],
    resident: ["KV and metadata on device and host, bytes", (a) => sum([a.bytes_resident_device, a.bytes_resident_host])],
    tokens: ["tokens attended per step", (a) => a.tokens_attended_mean],
    tpot: ["seconds per output token (of a shared batch)", (a) => a.tpot_s],
  };
  const sum = (values) => (values.every((v) => v === null) ? null : values.reduce((total, v) => total + (v || 0), 0));
  const methods = unique(runs.map((run) => run.method)).sort();
  const views = {};
  let specs = null;
  let drawing = Promise.resolve();

  function points(list) {
    const [, cost] = COSTS[$("pareto-cost").value];
    const found = [];
    const measured = list.filter((run) => run.parts.some((part) => column(run, part) === $("pareto-task").value));
    for (const run of list) for (const part of run.parts) {
      if (column(run, part) !== $("pareto-task").value || part.score === null || cost(run.audit) === null) continue;
      const against = part.paired ? `${signed(part.paired.mean)} (${part.paired.ci ? part.paired.ci.map(signed).join(" to ") : "no interval"}), n ${part.paired.n}` : "-";
      const variant = nameIn(run, measured);
      found.push({ run: run.i, method: run.method, variant, metric: part.metric, cost: cost(run.audit), score: part.score, n: part.n,
        low: part.ci ? part.ci[0] : part.score, high: part.ci ? part.ci[1] : part.score,
        interval: part.ci ? `${number(part.ci[0])} to ${number(part.ci[1])}` : "-", against_full: against,
        description: `${variant}: ${number(part.score)} at ${number(cost(run.audit), 0)}` });
    }
    return found;
  }
  const severalGroups = (list) => unique(list.map((run) => run.group)).length > 1;
  // A run's name among these: its group is said only where there are several.
  const nameIn = (run, list) => (severalGroups(list) ? `${run.variant} · ${run.group}` : run.variant);

  // Full attention is the same run under every budget: one panel says it.
  const firstOfEach = (list) => [...new Map([...list].reverse().map((run) => [`${run.group}|${run.variant}|${run.task}`, run])).values()].reverse();

  function frontOf(found) {
    const sign = found.length && lower(found[0].metric) ? -1 : 1;
    const front = [];
    for (const point of [...found].sort((a, b) => a.cost - b.cost || sign * (b.score - a.score)))
      if (!front.length || sign * point.score > sign * front[front.length - 1].score) front.push(point);
    return front;
  }

  // A specification's words that start with @ are the page's to say.
  function fill(node, words) {
    if (Array.isArray(node)) return node.length === 1 && Array.isArray(words[node[0]]) ? words[node[0]] : node.map((one) => fill(one, words));
    if (node && typeof node === "object") return Object.fromEntries(Object.entries(node).map(([key, value]) => [key, fill(value, words)]));
    return typeof node === "string" && node in words ? words[node] : node;
  }
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  async function draw(id, spec, words, datasets) {
    const colours = { "@muted": css("--muted"), "@surface": css("--surface"), "@methods": methods, "@colours": methods.map((name) => looks[name].colour || css("--text")), "@shapes": methods.map((name) => looks[name].shape) };
    const axis = { labelColor: css("--muted"), titleColor: css("--text"), gridColor: css("--line"), domainColor: css("--line"), tickColor: css("--line"), titleFontWeight: 500 };
    const config = { background: null, font: getComputedStyle(document.body).fontFamily, view: { stroke: css("--line") }, axis,
      legend: { orient: $(id).clientWidth < 560 ? "bottom" : "right", columns: $(id).clientWidth < 560 ? 3 : 1, labelColor: css("--text"), titleColor: css("--muted"), labelLimit: 220 }, header: { labelColor: css("--text") } };
    if (views[id]) views[id].finalize();
    const made = await window.vegaEmbed($(id), { ...fill(spec, { ...colours, ...words }), datasets, config },
      { actions: false, renderer: "svg", tooltip: { theme: dark() ? "dark" : "light" } });
    views[id] = made.view;
    return made.view;
  }

  async function drawCharts() {
    if (!specs) return;
    const list = shown();
    const found = points(list);
    drawPointTable(found);
    if (found.length) {
      const view = await draw("pareto-chart", specs.pareto, { "@score": `${found[0].metric}, ${lower(found[0].metric) ? "lower" : "higher"} is better`, "@cost": COSTS[$("pareto-cost").value][0] }, { points: found, front: frontOf(found) });
      view.addEventListener("click", (event, item) => { if (item && item.datum && Number.isInteger(item.datum.run)) compareWithFull(item.datum.run); });
    } else clear("pareto-chart", "No run that passes the filters measured this.");
    const needles = firstOfEach(list.filter((run) => run.parts.some((part) => part.heat)));
    const cells = needles.flatMap((run) => run.parts.flatMap((part) => (part.heat || []).map(([length, depth, score, n]) => ({ variant: nameIn(run, needles), length, depth, score, n }))));
    if (cells.length) {
      const columns = Math.max(1, Math.floor(($("needle-chart").clientWidth - 130) / 250));
      await draw("needle-chart", { ...specs.heatmap, columns }, { "@variants": unique(cells.map((one) => one.variant)) }, { cells });
    } else clear("needle-chart", "No needle run passes the filters.");
    document.documentElement.dataset.charts = String(Number(document.documentElement.dataset.charts || 0) + 1);
  }
  function clear(id, sentence) {
    if (views[id]) { views[id].finalize(); delete views[id]; }
    $(id).replaceChildren(none(sentence));
  }
  const redraw = () => (drawing = drawing.then(drawCharts));

  function drawPointTable(found) {
    const front = new Set(frontOf(found).map((point) => point.run));
    const rows = found.map((point) => el("tr", {}, el("th", { scope: "row" }, point.variant), el("td", {}, number(point.score)), el("td", {}, point.interval), el("td", {}, number(point.cost, 1)),
      el("td", {}, front.has(point.run) ? "front" : ""), el("td", {}, el("button", { type: "button", onclick: () => compareWithFull(point.run) }, "answers"))));
    const head = ["variant", "score", "95 %", "cost", "", ""].map((name) => el("th", { scope: "col" }, name));
    $("pareto-table").replaceChildren(el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows))));
  }

  function options(select, entries) {
    const before = select.value;
    select.replaceChildren(...entries.map(([value, text]) => el("option", { value }, text)));
    if (entries.some(([value]) => String(value) === before)) select.value = before;
  }

  // --- samples ---

  let answers = null;
  let current = null;
  const PAGE = 200;
  let limit = PAGE;
  const answer = ([at, score, status, prediction, generated, error, ledger, fields, report]) => ({ at, score, status, prediction, generated, error, ledger, fields, report });

  async function needSamples() {
    if (!answers) {
      answers = unpack("data-samples").then((text) => {
        const data = JSON.parse(text);
        return { asked: data.asked, of: data.answers.map((lines) => new Map(lines.map((line) => [line[0], answer(line)]))) };
      });
    }
    return answers;
  }

  function compareWithFull(i) {
    const run = runs[i];
    const full = runs.find((other) => other.full && other.group === run.group && other.task === run.task && other.i !== i);
    $("run-b").value = String(i);
    if (full && [...$("run-a").options].some((option) => option.value === String(full.i))) $("run-a").value = String(full.i);
    limit = PAGE;
    drawSamples();
    $("samples").scrollIntoView();
    $("run-b").focus({ preventScroll: true });
  }

  async function drawSamples() {
    const { asked, of } = await needSamples();
    const [a, b] = [runs[$("run-a").value], runs[$("run-b").value]];
    if (!a || !b) {
      $("sample-list").replaceChildren(); $("sample").replaceChildren(none("No run passes the filters.")); $("samples-count").textContent = "";
      return;
    }
    const words = $("find").value.toLowerCase();
    const flip = lower(a.parts[0] ? a.parts[0].metric : "score") ? -1 : 1;
    const both = [...of[a.i].values()].filter((one) => of[b.i].has(one.at));
    const kept = both.filter((one) => {
      const two = of[b.i].get(one.at);
      const difference = flip * ((one.score ?? -Infinity) - (two.score ?? -Infinity));
      const wanted = { all: true, differ: one.score !== two.score, a: difference > 0, b: difference < 0 }[$("which").value];
      const text = [asked[one.at].id, ...asked[one.at].references, one.prediction, two.prediction].join("\n").toLowerCase();
      return wanted && text.includes(words);
    });
    $("samples-count").textContent = both.length ? `${kept.length} of ${both.length} samples that A and B were both asked` : "A and B were asked no sample in common; choose two runs of one task and model.";
    const buttons = kept.slice(0, limit).map((one) => {
      const two = of[b.i].get(one.at);
      return el("button", { type: "button", "data-at": one.at, onclick: () => pick(one.at), onkeydown: walk }, el("span", {}, asked[one.at].id), el("span", {}, `${number(one.score, 2)} | ${number(two.score, 2)}`));
    });
    if (kept.length > limit) buttons.push(el("button", { type: "button", onclick: () => { limit += PAGE; drawSamples(); } }, el("span", {}, `${kept.length - limit} more`), el("span", {})));
    $("sample-list").replaceChildren(...buttons);
    function pick(at) {
      current = at;
      for (const button of $("sample-list").children) button.setAttribute("aria-current", String(button.dataset.at === String(at)));
      $("sample").replaceChildren(...detail(asked[at], [a, of[a.i].get(at)], [b, of[b.i].get(at)]));
    }
    if (!kept.length) $("sample").replaceChildren(none("No sample to show."));
    else pick(kept.some((one) => one.at === current) ? current : kept[0].at);
  }

  function walk(event) {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    const next = step && event.currentTarget[step];
    if (next) { event.preventDefault(); next.focus(); next.click(); }
  }

  function detail(asked, ...sides) {
    const length = asked.tokens === asked.original_tokens ? "" : ` (cut from ${asked.original_tokens})`;
    return [
      el("h3", {}, asked.id),
      el("p", { class: "hint" }, `${asked.dataset} · prompt of ${asked.tokens} tokens${length}, ${asked.sha}`),
      el("strong", {}, asked.references.length > 1 ? "References" : "Reference"),
      ...(asked.references.length ? asked.references.map((text) => el("pre", {}, text)) : [none("none")]),
      el("div", { class: "sides" }, sides.map(([run, one], i) => el("div", { class: "side" },
        el("h4", {}, `${"AB"[i]}: ${run.variant}`),
        el("p", { class: "hint" }, one.status === "oom" ? `out of memory: ${one.error}` : `score ${number(one.score)} · ${one.generated} tokens generated`),
        el("pre", {}, one.prediction || "(nothing)"),
        more("Ledger", one.ledger), more("Task's columns", one.fields), more("Method's report", one.report)))),
    ];
  }
  function more(title, tree) {
    if (!tree || !Object.keys(tree).length) return null;
    return el("details", {}, el("summary", {}, title), el("pre", {}, typeof tree === "string" ? tree : JSON.stringify(tree, null, 1)));
  }

  // --- budgets ---

  const AUDIT = [
    ["variant", (r) => `${r.task} · ${nameIn(r, shown().filter((other) => other.task === r.task))}`, String],
    ["tokens asked", (r) => r.audit.tokens_budget_mean, (v) => number(v, 1)],
    ["tokens attended", (r) => r.audit.tokens_attended_mean, (v) => number(v, 1)],
    ["of full attention", (r) => r.audit.effective_ratio, (v) => number(v)],
    ["find KB/step asked", (r) => r.audit.comm_bytes, (v) => scaled(v, 1e3)],
    ["find KB/step", (r) => r.audit.bytes_moved_meta_per_step, (v) => scaled(v, 1e3)],
    ["searched KB/step", (r) => r.audit.bytes_searched_per_step, (v) => scaled(v, 1e3)],
    ["KV KB/step", (r) => r.audit.bytes_moved_kv_per_step, (v) => scaled(v, 1e3)],
    ["device MB", (r) => r.audit.bytes_resident_device, (v) => scaled(v, 1e6, 2)],
    ["host MB", (r) => r.audit.bytes_resident_host, (v) => scaled(v, 1e6, 2)],
    ["allocated MB", (r) => r.audit.bytes_resident_device_actual, (v) => scaled(v, 1e6, 2)],
    ["cache hits", (r) => r.audit.cache_hit_rate, (v) => number(v)],
    ["prefill s", (r) => r.audit.prefill_s, (v) => number(v, 2)],
    ["s/token", (r) => r.audit.tpot_s, (v) => number(v)],
    ["within budget", (r) => r.audit.within_budget, (v) => (v === null ? "-" : v ? "yes" : "! no")],
  ];
  let sorted = [0, 1];

  function drawAudit(list) {
    const [by, direction] = sorted;
    const order = [...list].sort((x, y) => {
      const [u, v] = [AUDIT[by][1](x), AUDIT[by][1](y)];
      if (u === null || v === null) return Number(u === null) - Number(v === null);
      return direction * (typeof u === "string" ? u.localeCompare(v, "en", { numeric: true }) : u - v);
    });
    const head = AUDIT.map(([name], i) => el("th", { scope: "col", "aria-sort": i === by ? (direction > 0 ? "ascending" : "descending") : null },
      el("button", { type: "button", onclick: () => { sorted = [i, i === by ? -direction : 1]; drawAudit(shown()); $("audit").querySelectorAll("th button")[i].focus(); } }, name)));
    const rows = order.map((run) => el("tr", {}, AUDIT.map(([, value, show], i) => {
      const text = show(value(run));
      return el(i ? "td" : "th", { scope: i ? null : "row", class: text.startsWith("!") ? "flag" : null }, text);
    })));
    $("audit").replaceChildren(list.length ? el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Budgets" }, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows))) : none("No run passes the filters."));
  }

  // --- provenance ---

  function drawOrigins(list) {
    const kept = list.map((run) => {
      const { versions, params, notes, files, env, ...facts } = run.provenance;
      const entries = { ...facts, ...env, versions: pairs(versions), parameters: pairs(params), ...Object.fromEntries(Object.entries(files).map(([name, sha]) => [`sha256 ${name}`, sha])), notes: notes.join("; ") };
      const terms = Object.entries(entries).filter(([, value]) => value !== null && value !== "");
      return el("details", {}, el("summary", {}, `${run.folder} — ${run.variant}`), el("dl", {}, terms.flatMap(([key, value]) => [el("dt", {}, key.replaceAll("_", " ")), el("dd", {}, String(value))])));
    });
    $("origins").replaceChildren(...(kept.length ? kept : [none("No run passes the filters.")]));
  }
  const pairs = (tree) => Object.entries(tree).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");

  // --- theme ---

  const THEMES = ["system", "light", "dark"];
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  let theme = "system";
  try { theme = THEMES.includes(localStorage.kvbenchTheme) ? localStorage.kvbenchTheme : "system"; } catch { /* a page from disk may have no storage */ }
  const dark = () => theme === "dark" || (theme === "system" && night.matches);
  function applyTheme() {
    if (theme === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
    $("theme").textContent = `Theme: ${theme}`;
  }
  $("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try { localStorage.kvbenchTheme = theme; } catch { /* as above */ }
    applyTheme(); redraw();
  });
  night.addEventListener("change", () => theme === "system" && redraw());

  // --- all together ---

  function update() {
    const list = shown();
    $("count").textContent = `${list.length} of ${runs.length} runs`;
    drawMatrix(list); drawAudit(list); drawOrigins(list);
    options($("pareto-task"), unique(list.flatMap((run) => run.parts.map((part) => column(run, part)))).map((name) => [name, name]));
    const entries = list.map((run) => [run.i, `${run.task} · ${nameIn(run, list.filter((other) => other.task === run.task))}`]);
    const isNew = !$("run-a").value;
    options($("run-a"), entries); options($("run-b"), entries);
    if (isNew && list.length) {
      const full = list.find((run) => run.full) || list[0];
      const other = list.find((run) => !run.full && run.group === full.group && run.task === full.task) || list[list.length - 1];
      $("run-a").value = full.i; $("run-b").value = other.i;
    }
    if (answers) drawSamples();
    redraw();
  }

  applyTheme();
  buildFilters();
  options($("pareto-cost"), Object.entries(COSTS).map(([key, [title]]) => [key, title]));
  for (const id of ["pareto-task", "pareto-cost"]) $(id).addEventListener("change", redraw);
  for (const id of ["run-a", "run-b", "which"]) $(id).addEventListener("change", () => { limit = PAGE; drawSamples(); });
  $("find").addEventListener("input", () => { limit = PAGE; drawSamples(); });
  let width = window.innerWidth;
  let timer = 0;
  window.addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { if (width !== window.innerWidth) { width = window.innerWidth; redraw(); } }, 150);
  });
  update();
  // What is heavy waits for the first paint.
  requestAnimationFrame(() => setTimeout(async () => {
    await drawSamples();
    new Function(await unpack("data-vega"))();
    specs = read("data-charts");
    redraw();
  }));
})();
