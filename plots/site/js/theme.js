// Light, dark, or as the reader's system says.
const THEMES = ["system", "light", "dark"];
const night = window.matchMedia("(prefers-color-scheme: dark)");
let theme = "system";
try {
  theme = THEMES.includes(localStorage.kvbenchTheme) ? localStorage.kvbenchTheme : "system";
} catch { /* a page from disk may have no storage */ }
const dark = () => theme === "dark" || (theme === "system" && night.matches);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function applyTheme() {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
}

function listenToTheme(redraw) {
  $("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try { localStorage.kvbenchTheme = theme; } catch { /* as above */ }
    applyTheme();
    redraw();
  });
  night.addEventListener("change", () => theme === "system" && redraw());
}

// A method's colour, the same in every chart, whatever is shown.
const colourOf = (method) => looks[method][dark() ? "dark" : "light"];
