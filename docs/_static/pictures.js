/* The three pictures of the page "Understand". Plain JavaScript; the data comes from pictures-data.js, made at build time. */
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function element(parent, name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}

function paint(canvas, values, side) {
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d");
  const image = context.createImageData(side, side);
  values.forEach((value, i) => image.data.set([value, value, value, 255], 4 * i));
  context.putImageData(image, 0, 0);
}

/* --- one gain ------------------------------------------------------------------------------------ */

function oneGain(box) {
  const { size: n, brain } = window.chasmPictures;
  const K = Math.floor(n / 2) + 1;
  const kinds = {
    keep: () => 1,
    low: (k, cut) => (k <= cut ? 1 : 0.05),
    high: (k, cut) => (k < cut ? 0.05 : 1),
    one: (k, cut) => (k === cut ? 4 : 1),
  };
  let kind = "low";
  const slider = box.querySelector("input");
  const [input, output] = box.querySelectorAll("canvas");
  const chart = box.querySelector("svg");
  const buttons = box.querySelectorAll("button");
  const angle = (t) => (2 * Math.PI * t) / n;
  const cosines = Array.from({ length: n }, (_, t) => Math.cos(angle(t)));

  // A real gain is an even filter along the axis, so one column of it is all that is needed.
  function filtered(gains) {
    const kernel = new Float64Array(n);
    for (let t = 0; t < n; t++) {
      for (let k = 0; k < K; k++) kernel[t] += (k === 0 || 2 * k === n ? 1 : 2) * gains[k] * cosines[(k * t) % n];
      kernel[t] /= n;
    }
    const result = new Array(n * n);
    for (let x = 0; x < n; x++)
      for (let y = 0; y < n; y++) {
        let sum = 0;
        for (let s = 0; s < n; s++) sum += kernel[(y - s + n) % n] * brain[s * n + x];
        result[y * n + x] = Math.max(0, Math.min(255, sum));
      }
    return result;
  }

  function draw() {
    const cut = Number(slider.value);
    const gains = Array.from({ length: K }, (_, k) => kinds[kind](k, cut));
    box.querySelector("output").textContent = `k = ${cut}`;
    paint(output, filtered(gains), n);
    chart.replaceChildren();
    element(chart, "line", { x1: 8, x2: 208, y1: 192, y2: 192, class: "axis-line" });
    const unit = 168 / Math.max(...gains);
    gains.forEach((gain, k) => {
      const height = unit * gain;
      const chosen = kind !== "keep" && k === cut ? "bar chosen" : "bar";
      element(chart, "rect", { x: 9 + 4 * k, y: 192 - height, width: 3, height, class: chosen });
    });
    element(chart, "line", { x1: 8, x2: 208, y1: 192 - unit, y2: 192 - unit, class: "one-line" });
    element(chart, "text", { x: 208, y: 188 - unit, "text-anchor": "end" }, "gain 1");
    element(chart, "text", { x: 8, y: 208 }, "slow waves");
    element(chart, "text", { x: 208, y: 208, "text-anchor": "end" }, "fast waves");
    buttons.forEach((button) => button.setAttribute("aria-pressed", button.dataset.kind === kind));
    slider.disabled = kind === "keep";
  }

  paint(input, brain, n);
  slider.max = K - 1;
  slider.addEventListener("input", draw);
  buttons.forEach((button) =>
    button.addEventListener("click", () => {
      kind = button.dataset.kind;
      draw();
    }),
  );
  draw();
}

/* --- a shared basis ------------------------------------------------------------------------------ */

function sharedBasis(box) {
  const K = 12;
  const slider = box.querySelector("input");
  const pictures = box.querySelectorAll("svg");
  const radii = (k) => [82 * (0.35 + 0.65 * Math.cos((0.5 * Math.PI * k) / (K - 1)) ** 2), 82 * (0.3 + (0.65 * k) / (K - 1))];
  const angles = [(k) => 15 + 47 * k + 20 * Math.sin(2.1 * k), () => 32];

  function shape(svg, k, angle, kind) {
    const [a, b] = radii(k);
    const group = element(svg, "g", { transform: `translate(100 100) rotate(${-angle})` });
    element(group, "ellipse", { rx: a, ry: b, class: kind });
    if (kind === "shape") {
      element(group, "line", { x1: -a, x2: a, y1: 0, y2: 0, class: "direction first" });
      element(group, "line", { x1: 0, x2: 0, y1: -b, y2: b, class: "direction second" });
    }
  }

  function matrix(k, degrees) {
    const [a, b] = radii(k).map((radius) => radius / 55);
    const c = Math.cos((degrees * Math.PI) / 180);
    const s = Math.sin((degrees * Math.PI) / 180);
    return [a * c * c + b * s * s, (a - b) * c * s, a * s * s + b * c * c].map((value) => value.toFixed(2));
  }

  function cell(value) {
    const made = document.createElement("span");
    made.textContent = value;
    return made;
  }

  function draw() {
    const k = Number(slider.value);
    box.querySelector("output").textContent = `k = ${k}`;
    pictures.forEach((svg, i) => {
      svg.replaceChildren();
      for (let other = 0; other < K; other++) shape(svg, other, angles[i](other), "ghost");
      shape(svg, k, angles[i](k), "shape");
      const [p, q, r] = matrix(k, angles[i](k));
      box.querySelectorAll(".matrix")[i].replaceChildren(...[p, q, q, r].map(cell));
    });
  }

  let timer = null;
  const button = box.querySelector("button");
  button.addEventListener("click", () => {
    if (timer) {
      clearInterval(timer);
      timer = null;
    } else {
      timer = setInterval(() => {
        slider.value = (Number(slider.value) + 1) % K;
        draw();
      }, 500);
    }
    button.textContent = timer ? "stop" : "play";
  });
  slider.max = K - 1;
  slider.addEventListener("input", draw);
  draw();
}

/* --- one axis after the other -------------------------------------------------------------------- */

function twoPasses(box) {
  const { grid: n, height, both } = window.chasmPictures;
  const canvases = box.querySelectorAll("canvas");
  const middle = Math.floor(n / 2);

  function draw(row, column) {
    const shifted = (values) =>
      Array.from({ length: n * n }, (_, i) => {
        const y = (Math.floor(i / n) - row + middle + 2 * n) % n;
        const x = ((i % n) - column + middle + 2 * n) % n;
        return values[y * n + x];
      });
    const pixel = new Array(n * n).fill(0);
    pixel[middle * n + middle] = 255;
    [pixel, height, both].forEach((values, i) => paint(canvases[i], shifted(values), n));
  }

  canvases.forEach((canvas) =>
    canvas.addEventListener("click", (event) => {
      const place = canvas.getBoundingClientRect();
      const at = (value, start, length) => Math.max(0, Math.min(n - 1, Math.floor((n * (value - start)) / length)));
      draw(at(event.clientY, place.top, place.height), at(event.clientX, place.left, place.width));
    }),
  );
  draw(middle, middle);

  const sliders = box.querySelectorAll("input");
  function numbers() {
    const [C, side] = Array.from(sliders, (slider) => Number(slider.value));
    const K = Math.floor(side / 2) + 1;
    const outputs = box.querySelectorAll("output");
    outputs[0].textContent = C;
    outputs[1].textContent = side;
    const counts = { dense: side * K * C * C, untied: 2 * K * ((C * (C - 1)) / 2 + C), shared: C * (C - 1) + 2 * K * C };
    for (const name in counts)
      box.querySelector(`[data-count="${name}"]`).textContent = counts[name].toLocaleString("en-US");
  }
  sliders.forEach((slider) => slider.addEventListener("input", numbers));
  numbers();
}

document.addEventListener("DOMContentLoaded", () => {
  const pictures = { "one-gain": oneGain, "shared-basis": sharedBasis, "two-passes": twoPasses };
  for (const name in pictures) {
    const box = document.getElementById(`play-${name}`);
    if (box) pictures[name](box);
  }
});
