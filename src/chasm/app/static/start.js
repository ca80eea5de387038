// Runs first, without modules: sets the chosen theme, and shows a message if the page cannot work.
(() => {
  const theme = localStorage.getItem('chasm-theme');
  if (theme) document.documentElement.dataset.theme = theme;
  const problem = location.protocol === 'file:'
    ? 'This page must come from a web server. One on your own machine is enough: python3 -m http.server -d FOLDER'
    : typeof WebAssembly === 'undefined' || typeof OffscreenCanvas === 'undefined'
      ? 'This browser is too old: it lacks WebAssembly or OffscreenCanvas.' : '';
  if (problem) addEventListener('DOMContentLoaded', () => {
    const message = document.getElementById('message');
    message.hidden = false;
    message.firstElementChild.textContent = problem;
  });
})();
