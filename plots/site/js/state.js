// What the reader looks at, as the part of the address after `#`: who opens the same address sees the same.
// Not here: what follows from it; `main.js` draws the page again.
const state = new Map();
let seenHash = null;

function readState() {
  seenHash = location.hash;
  state.clear();
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) state.set(key, value);
}

function address(changes) {
  const merged = new Map([...state, ...Object.entries(changes || {})]);
  return "#" + new URLSearchParams([...merged].filter(([, value]) => is(value) && value !== "").map(([k, v]) => [k, String(v)]));
}

// `push` makes a step that the browser's Back returns from.
function setState(changes, push) {
  const to = address(changes);
  if (to === location.hash || (to === "#" && !location.hash)) return;
  history[push ? "pushState" : "replaceState"](null, "", to);
  readState();
}

// Sets of words in one value.
const asList = (words) => [...words].map((word) => word.replace(/[%,]/g, encodeURIComponent)).join(",");
const fromList = (text) => (text ? text.split(",").map(decodeURIComponent) : []);

// A link to a state of this page: a plain click goes there without loading, any other is the browser's.
function link(changes, ...children) {
  const node = el("a", { href: address(changes) }, ...children);
  node.addEventListener("click", (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    go(changes);
  });
  return node;
}

function go(changes) {
  setState(changes, true);
  show();
}
