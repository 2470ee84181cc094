// Data that are not in the page: scripts that hand over packed text, loaded once each. From disk nothing else can be read.
// Not here: what is in them.
const SHARED = new Set(["data-index", "data-charts", "data-vega", "data-methods", "data-evidence"]);
const arriving = new Map(); // by path: { promise, done }
let bench = null; // the benchmark that is shown, by its folder

// A file calls this with its name and text; whose folder it is of says the script that is being run.
window.kvbench = (name, text) => {
  const path = document.currentScript.dataset.path;
  if (arriving.has(path)) arriving.get(path).done(text);
};

function loadText(path) {
  if (!arriving.has(path)) {
    const one = {};
    one.promise = new Promise((done, fail) => {
      one.done = done;
      const node = el("script", { src: `data/${path}.js`, "data-path": path });
      node.addEventListener("error", () => { arriving.delete(path); fail(new Error(`${path} cannot be loaded`)); });
      document.head.append(node);
    });
    arriving.set(path, one);
  }
  return arriving.get(path).promise;
}
packedText = (id) => loadText(SHARED.has(id) ? id : `${bench}/${id}`);

const shared = new Map(); // what was unpacked of the files that all benchmarks share
function once(id, make = (tree) => tree) {
  if (!shared.has(id)) shared.set(id, unpack(id).then((text) => make(JSON.parse(text))));
  return shared.get(id);
}
