// Runs first, without modules: the chosen theme, and a word where the page cannot work.
(() => {
  const theme = localStorage.getItem('chasm-theme');
  if (theme) document.documentElement.dataset.theme = theme;
  const problem = location.protocol === 'file:'
    ? 'This page must come from a web server, of your own machine too: python3 -m http.server -d FOLDER'
    : typeof WebAssembly === 'undefined' || typeof OffscreenCanvas === 'undefined'
      ? 'This browser is too old: it lacks WebAssembly or OffscreenCanvas.' : '';
  if (problem) addEventListener('DOMContentLoaded', () => {
    const message = document.getElementById('message');
    message.hidden = false;
    message.firstElementChild.textContent = problem;
  });
})();
