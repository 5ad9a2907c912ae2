// Light, dark, or as the system is; remembered on this machine.
(() => {
  const KEY = "lamella-theme";
  const root = document.documentElement;

  function remembered() {
    try {
      return localStorage.getItem(KEY) || "auto";
    } catch {
      return "auto"; // Storage may be forbidden; the page works without.
    }
  }

  function remember(theme) {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // Then it lasts until the page is left.
    }
  }

  root.dataset.theme = remembered();
  document.addEventListener("DOMContentLoaded", () => {
    const choice = document.getElementById("theme");
    choice.value = root.dataset.theme;
    choice.addEventListener("change", () => {
      root.dataset.theme = choice.value;
      remember(choice.value);
    });
  });
})();
