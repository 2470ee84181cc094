// Two texts word by word: which words only one of them has, by a longest common subsequence.
const MOST_WORDS = 700; // of a text; the table has their square

const wordsOf = (text) => text.match(/\s+|[^\s]+/g) || [];

// Pairs of word and whether the other text has it in the same order.
function compareWords(ours, theirs) {
  const [a, b] = [wordsOf(ours), wordsOf(theirs)];
  const plain = a.map((word) => [word, true]);
  if (a.length > MOST_WORDS || b.length > MOST_WORDS) return plain;
  const width = b.length + 1;
  const longest = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      longest[i * width + j] = a[i] === b[j] ? longest[(i + 1) * width + j + 1] + 1
        : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  const found = [];
  let [i, j] = [0, 0];
  while (i < a.length) {
    if (j < b.length && a[i] === b[j]) { found.push([a[i], true]); i += 1; j += 1; }
    else if (j < b.length && longest[i * width + j + 1] >= longest[(i + 1) * width + j]) j += 1;
    else { found.push([a[i], !a[i].trim()]); i += 1; }
  }
  return found;
}

// A text with the words marked that the other one has not.
function marked(ours, theirs) {
  return el("pre", { class: "answer" }, ours ? compareWords(ours, theirs).map(([word, same]) => (same ? word : el("mark", {}, word))) : "(nothing)");
}
