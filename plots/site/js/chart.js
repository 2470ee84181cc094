// The page's pictures, as SVG: points with their intervals and the lines that join them, and maps of cells.
// Not here: which data a picture has.
const CIRCLE = "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0Z";
const shapeOf = (method) => looks[method].shape.replace("circle", CIRCLE);
// A method's mark next to its name, as the charts draw it.
const mark = (method) => svg("svg", { viewBox: "-1.3 -1.3 2.6 2.6", width: 14, height: 14, "aria-hidden": "true" },
  svg("path", { d: shapeOf(method), fill: colourOf(method) }));
const words = (x, y, text, more) => svg("text", { x, y, fill: css("--muted"), "font-size": 12, ...more }, text);
const CLOSE = 11; // pixels: marks that are closer stand side by side

// --- axes ---

function ticksOf([low, high], { isLog, halves }) {
  if (isLog && high / low > 3) {
    const found = [];
    if (halves) for (let at = 2 ** Math.ceil(Math.log2(low) - 1e-9); at <= high * 1.0001; at *= 2) found.push(at);
    else for (let at = 10 ** Math.floor(Math.log10(low)); at <= high; at *= 10) found.push(...[1, 2, 5].map((n) => n * at).filter((n) => n >= low && n <= high));
    if (found.length > 1) return found;
  }
  const rough = (high - low) / 5 || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((n) => n * unit >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step);
  return found;
}

const fraction = (value) => (value < 0.9 && Math.abs(Math.log2(value) % 1) < 1e-9 ? `1/${Math.round(1 / value)}` : plain(value));
const plain = (value) => String(Number(value.toPrecision(3)));
function short(value) {
  const unit = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => Math.abs(value) >= size) || [1, ""];
  return plain(value / unit[0]) + unit[1];
}

// Where the values of points lie, with some room on both sides.
function domainOf(values, isLog, include = []) {
  const all = [...values, ...include].filter(is);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  if (isLog) { const room = Math.max((high / low) ** 0.06, 1.06); return [low / room, high * room]; }
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - room, high + room];
}

function scaleOf([low, high], [from, to], isLog) {
  const of = isLog ? Math.log : Number;
  return (value) => from + ((of(value) - of(low)) / (of(high) - of(low))) * (to - from);
}

// --- points ---

// Marks at about one place stand side by side, the highest first; whether there were any.
function spread(points, room) {
  const groups = [];
  for (const point of [...points].sort((a, b) => a.px - b.px)) {
    const last = groups[groups.length - 1];
    if (last && point.px - last[0].px < CLOSE) last.push(point); else groups.push([point]);
  }
  const middles = groups.map((group) => group.reduce((sum, point) => sum + point.px, 0) / group.length);
  groups.forEach((group, i) => {
    const near = Math.min(...[middles[i - 1], middles[i + 1]].filter(is).map((other) => Math.abs(other - middles[i])), room);
    const step = Math.min(15, (0.8 * near) / group.length);
    const start = Math.min(Math.max(middles[i] - (step * (group.length - 1)) / 2, CLOSE), Math.max(CLOSE, room - step * (group.length - 1) - CLOSE));
    if (group.length > 1) group.sort((a, b) => b.y - a.y).forEach((point, j) => { point.px = start + j * step; });
  });
  return groups.some((group) => group.length > 1);
}

// `x` and `y` are { title, isLog, halves, include, show }; a point { x, y, low, high, method, series, hollow, faint,
// size, text, pick }; `front` are places that a broad band joins, `level` is a height with a line across.
function plot(id, { x, y, points, front = [], level = null, label, height = 360, isSmall = false }) {
  const node = typeof id === "string" ? $(id) : id;
  const width = Math.max(200, node.clientWidth || 320);
  const box = isSmall ? { left: 34, right: 8, top: 22, bottom: 36 } : { left: 46, right: 14, top: 26, bottom: 46 };
  const right = width - box.right;
  const bottom = height - box.bottom;
  const xs = domainOf(points.map((point) => point.x), x.isLog, x.include);
  const ys = domainOf(points.flatMap((point) => [point.y, point.low, point.high]), false, y.include);
  const at = { x: scaleOf(xs, [0, right - box.left], x.isLog), y: scaleOf(ys, [bottom, box.top], false) };
  for (const point of points) point.px = at.x(point.x);
  const isSpread = !isSmall && spread(points, right - box.left);
  for (const point of points) Object.assign(point, { px: box.left + point.px, py: at.y(point.y) });

  const line = (x1, y1, x2, y2, stroke, more) => svg("line", { x1, y1, x2, y2, stroke, ...more });
  const grid = [
    ...ticksOf(ys, y).flatMap((tick) => [line(box.left, at.y(tick), right, at.y(tick), css("--line")),
      words(box.left - 6, at.y(tick) + 4, (y.show || plain)(tick), { "text-anchor": "end" })]),
    ...ticksOf(xs, x).flatMap((tick) => { const px = box.left + at.x(tick); return [line(px, bottom, px, bottom + 4, css("--muted")),
      words(px, bottom + 17, (x.show || plain)(tick), { "text-anchor": "middle" })]; }),
    line(box.left, bottom, right, bottom, css("--muted")),
    words(isSmall ? 4 : 8, 13, y.title, { fill: css("--text") }),
    words((box.left + right) / 2, height - 6, x.title, { "text-anchor": "middle", fill: css("--text") }),
    is(level) ? line(box.left, at.y(level), right, at.y(level), css("--text"), { "stroke-dasharray": "3 3", opacity: 0.6, class: "level" }) : null,
  ];
  const steps = front.map((point, i) => `${i ? `H${point.px}V${point.py}` : `M${point.px},${point.py}`}`).join("");
  const band = front.length > 1 ? svg("path", { d: steps, fill: "none", stroke: css("--text"), "stroke-width": 7, opacity: 0.18, class: "front" }) : null;
  const series = new Map();
  for (const point of points) if (point.series) grouped(series, point.series).push(point);
  const joined = [...series.values()].filter((each) => each.length > 1).map((each) => svg("polyline", {
    points: each.sort((a, b) => a.x - b.x).map((point) => `${point.px},${point.py}`).join(" "), fill: "none", stroke: colourOf(each[0].method),
    "stroke-width": 1.6, "stroke-dasharray": looks[each[0].method].dash || null, opacity: each[0].faint ? 0.2 : 0.8, "data-method": each[0].method }));
  const bars = points.filter((point) => is(point.low) && point.high > point.low).map((point) => line(point.px, at.y(point.low), point.px, at.y(point.high),
    colourOf(point.method), { "stroke-width": 1.6, opacity: point.faint ? 0.18 : 0.75, class: "bar", "data-method": point.method }));
  const tip = el("div", { class: "tip", hidden: true });
  const order = [...points].sort((a, b) => Number(b.faint) - Number(a.faint));
  const marks = order.map((point, i) => markOf(point, i, tip, width, isSmall));
  node.replaceChildren(svg("svg", { width, height, role: isSmall ? "img" : "group", "aria-label": label, "font-family": getComputedStyle(document.body).fontFamily,
    onkeydown: isSmall ? null : (event) => walkMarks(event, order, marks) }, grid, band, joined, bars, marks), tip);
  return isSpread;
}

function markOf(point, i, tip, width, isSmall) {
  const colour = colourOf(point.method);
  const r = point.size || (isSmall ? 4 : 5.5);
  const show = () => {
    tip.replaceChildren(...point.text.split("\n").map((text, j) => el(j ? "div" : "strong", {}, text)));
    tip.hidden = false;
    tip.style.left = `${Math.max(0, Math.min(point.px + 12, width - tip.offsetWidth))}px`;
    tip.style.top = `${point.py + 14}px`;
  };
  const shape = svg("path", { d: shapeOf(point.method), transform: `translate(${point.px.toFixed(1)},${point.py.toFixed(1)}) scale(${r})`, stroke: colour,
    "stroke-width": 2 / r, fill: point.hollow ? css("--surface") : colour, opacity: point.faint ? 0.35 : 1, "data-method": point.method });
  if (isSmall) return shape;
  const hide = () => { tip.hidden = true; };
  const open = (event) => point.pick(event.currentTarget);
  return fillNode(shape, { class: "mark", tabindex: i === 0 ? 0 : -1, role: "button", "aria-label": point.text.replaceAll("\n", ", "),
    onclick: open, onpointerenter: show, onpointerleave: hide, onfocus: show, onblur: hide,
    onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(event); } } }, []);
}

// Arrows go to the next mark to that side.
function walkMarks(event, points, marks) {
  const [key, sign] = { ArrowRight: ["px", 1], ArrowLeft: ["px", -1], ArrowDown: ["py", 1], ArrowUp: ["py", -1] }[event.key] || [];
  const here = points[marks.indexOf(event.target)];
  if (!key || !here) return;
  event.preventDefault();
  const other = key === "px" ? "py" : "px";
  const place = (point) => [sign * point[key], point[other], points.indexOf(point)];
  const before = (a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2];
  const next = points.filter((point) => before(place(point), place(here)) > 0).sort((a, b) => before(place(a), place(b)))[0];
  if (!next) return;
  event.target.setAttribute("tabindex", -1);
  const node = marks[points.indexOf(next)];
  node.setAttribute("tabindex", 0);
  node.focus();
}

// --- maps of cells ---

// Cividis, even in lightness and nearly the same for all colour vision.
const CIVIDIS = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]];
function heatColour(share) {
  const at = Math.min(1, Math.max(0, share)) * (CIVIDIS.length - 1);
  const i = Math.min(CIVIDIS.length - 2, Math.floor(at));
  return `rgb(${CIVIDIS[i].map((value, k) => Math.round(value + (at - i) * (CIVIDIS[i + 1][k] - value))).join()})`;
}

// A panel each of `panels`, { title, cells }, whose cells are { column, row, share, text }.
function heatMaps(id, { panels, columns, rows, xTitle, yTitle, label }) {
  const [left, top, wide, high] = [46, 22, 190, 130];
  const [panelWidth, panelHeight] = [left + wide + 16, top + high + 56];
  const across = Math.max(1, Math.min(panels.length, Math.floor($(id).clientWidth / panelWidth)));
  const [w, h] = [wide / columns.length, high / rows.length];
  const drawn = panels.map(({ title, cells }, i) => {
    const middle = left + wide / 2;
    return svg("g", { class: "panel", transform: `translate(${(i % across) * panelWidth},${Math.floor(i / across) * panelHeight})` },
      words(middle, 14, title.length > 30 ? `${title.slice(0, 29)}…` : title, { "text-anchor": "middle", fill: css("--text"), class: "title" }, svg("title", {}, title)),
      cells.map((cell) => svg("rect", { x: left + columns.indexOf(cell.column) * w, y: top + rows.indexOf(cell.row) * h, width: w, height: h,
        fill: heatColour(cell.share), stroke: css("--surface") }, svg("title", {}, cell.text))),
      columns.map((name, k) => words(0, 0, name, { "text-anchor": "end", class: "column", transform: `translate(${left + (k + 0.5) * w + 4},${top + high + 12}) rotate(-40)` })),
      rows.map((name, k) => words(left - 4, top + (k + 0.5) * h + 4, name, { "text-anchor": "end" })),
      words(middle, top + high + 48, xTitle, { "text-anchor": "middle" }), i % across ? null : words(0, 0, yTitle, { "text-anchor": "middle", transform: `translate(10,${top + high / 2}) rotate(-90)` }));
  });
  const [width, height] = [across * panelWidth, Math.ceil(panels.length / across) * panelHeight];
  const key = [0, 25, 50, 75, 100].flatMap((score, i) => [svg("rect", { x: left + i * 38, y: height + 6, width: 38, height: 10, fill: heatColour(score / 100) }),
    words(left + (i + 0.5) * 38, height + 30, score, { "text-anchor": "middle" })]);
  $(id).replaceChildren(svg("svg", { width, height: height + 36, role: "img", "aria-label": label, "font-family": getComputedStyle(document.body).fontFamily }, drawn, key));
}

// The picture as it stands, on white or on black, as a file of its own.
function saveChart(id) {
  const drawn = $(id).querySelector("svg");
  if (!drawn) return;
  const copied = drawn.cloneNode(true);
  copied.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copied.setAttribute("style", `background:${css("--surface")}`);
  save(`kvbench-${id}.svg`, "image/svg+xml", new XMLSerializer().serializeToString(copied));
}
