// MRI physics, as chasm.mri has it: centred Fourier transform, masks, scores. Images are rows after rows.

/** Round half to even, as numpy and Python do. */
export function roundHalfEven(x) {
  const floor = Math.floor(x);
  if (x - floor !== 0.5) return Math.round(x);
  return floor % 2 === 0 ? floor : floor + 1;
}

// Twiddle factors and Bluestein's chirps, by length.
const plans = new Map();

function plan(n) {
  if (plans.has(n)) return plans.get(n);
  const p = {n, cos: new Float64Array(n), sin: new Float64Array(n)};
  for (let k = 0; k < n; k++) {
    p.cos[k] = Math.cos((2 * Math.PI * k) / n);
    p.sin[k] = -Math.sin((2 * Math.PI * k) / n);
  }
  if (n & (n - 1)) {
    let m = 1;
    while (m < 2 * n - 1) m *= 2;
    p.m = m;
    p.chirp = [new Float64Array(n), new Float64Array(n)];
    const b = [new Float64Array(m), new Float64Array(m)];
    for (let k = 0; k < n; k++) {
      const angle = (Math.PI * ((k * k) % (2 * n))) / n;
      p.chirp[0][k] = Math.cos(angle);
      p.chirp[1][k] = -Math.sin(angle);
      b[0][k] = b[0][(m - k) % m] = Math.cos(angle);
      b[1][k] = b[1][(m - k) % m] = Math.sin(angle);
    }
    fftInPlace(b[0], b[1]);
    p.filter = b;
  }
  plans.set(n, p);
  return p;
}

/** Forward transform of one line, unscaled, of any length. */
function fftInPlace(re, im) {
  const n = re.length;
  if (n === 1) return;
  const p = plan(n);
  if (n & (n - 1)) return bluestein(re, im, p);
  for (let i = 1, j = 0; i < n; i++) {
    let bit = n >> 1;
    for (; j & bit; bit >>= 1) j ^= bit;
    j ^= bit;
    if (i < j) {
      [re[i], re[j]] = [re[j], re[i]];
      [im[i], im[j]] = [im[j], im[i]];
    }
  }
  for (let length = 2; length <= n; length *= 2) {
    const half = length / 2, step = n / length;
    for (let start = 0; start < n; start += length) {
      for (let k = 0; k < half; k++) {
        const c = p.cos[k * step], s = p.sin[k * step], a = start + k, b = a + half;
        const tr = re[b] * c - im[b] * s, ti = re[b] * s + im[b] * c;
        re[b] = re[a] - tr;
        im[b] = im[a] - ti;
        re[a] += tr;
        im[a] += ti;
      }
    }
  }
}

function bluestein(re, im, p) {
  const {n, m, chirp: [cr, ci], filter: [fr, fi]} = p;
  const ar = new Float64Array(m), ai = new Float64Array(m);
  for (let k = 0; k < n; k++) {
    ar[k] = re[k] * cr[k] - im[k] * ci[k];
    ai[k] = re[k] * ci[k] + im[k] * cr[k];
  }
  fftInPlace(ar, ai);
  for (let k = 0; k < m; k++) {  // conjugated, so that a forward transform goes back
    const r = ar[k] * fr[k] - ai[k] * fi[k], i = ar[k] * fi[k] + ai[k] * fr[k];
    ar[k] = r;
    ai[k] = -i;
  }
  fftInPlace(ar, ai);
  for (let k = 0; k < n; k++) {
    const r = ar[k] / m, i = -ai[k] / m;
    re[k] = r * cr[k] - i * ci[k];
    im[k] = r * ci[k] + i * cr[k];
  }
}

/** Centred orthonormal transform of an image {re, im}; returns a new one. */
export function fft2c(image, H, W, inverse = false) {
  const re = Float32Array.from(image.re), im = image.im ? Float32Array.from(image.im) : new Float32Array(H * W);
  for (const [lines, n, stride, step] of [[H, W, 1, W], [W, H, W, 1]]) {
    const r = new Float64Array(n), i = new Float64Array(n), scale = 1 / Math.sqrt(n);
    const before = n - Math.floor(n / 2), after = Math.floor(n / 2);  // ifftshift, fftshift
    for (let line = 0; line < lines; line++) {
      const first = line * step;
      for (let k = 0; k < n; k++) {
        const from = first + ((k + n - before) % n) * stride;
        r[k] = re[from];
        i[k] = inverse ? -im[from] : im[from];
      }
      fftInPlace(r, i);
      for (let k = 0; k < n; k++) {
        const to = first + ((k + after) % n) * stride;
        re[to] = r[k] * scale;
        im[to] = (inverse ? -i[k] : i[k]) * scale;
      }
    }
  }
  return {re, im};
}

/** The columns that a mask keeps: Uint8Array(n). Equispaced ones are those of chasm.mri.create_mask. */
export function createMask(kind, n, acceleration, offset = 0, seed = 4) {
  const fraction = 0.32 / acceleration, low = roundHalfEven(n * fraction);
  const first = Math.floor((n - low + 1) / 2), mask = new Uint8Array(n);
  mask.fill(1, first, first + low);
  if (!(acceleration > 1)) throw new Error(`acceleration must be above 1, got ${acceleration}`);
  if (kind === 'equispaced-plain') {
    for (let k = offset; k < n; k += Math.round(acceleration)) mask[k] = 1;
    return mask;
  }
  if (low * acceleration >= n) throw new Error(`${low} centre lines leave nothing of the x${acceleration} budget`);
  if (kind === 'equispaced') {
    const step = (acceleration * (low - n)) / (low * acceleration - n);
    for (let i = 0, at = offset; at < n - 1; i++, at = offset + i * step) mask[roundHalfEven(at)] = 1;
    return mask;
  }
  const random = generator(seed), lines = createMask('equispaced', n, acceleration).reduce((a, b) => a + b, 0);
  for (let left = lines - low; left > 0;) {
    const k = Math.floor(random() * n);
    if (!mask[k]) {
      mask[k] = 1;
      left--;
    }
  }
  return mask;
}

/** How lines differ from those of the training, as chasm.reconstruct.likeness says it. task: of the model. */
export function unlikeLines(mask, {kind, masks, trained}) {
  if (masks === 'measured') return [];
  const found = [], lines = mask.reduce((a, b) => a + b, 0), acceleration = mask.length / lines;
  const digits = (x) => Number(x.toPrecision(3));
  const isNear = Math.abs(Math.log(acceleration / trained.acceleration)) < Math.log(1.1);
  if (!isNear && (masks === 'fixed' || Math.abs(lines - mask.length / trained.acceleration) > 2)) {
    found.push(`acceleration ${digits(acceleration)} (trained on ${digits(trained.acceleration)})`);
  }
  if (!trained.columns) return [...found, `whole columns (trained on ${kind} points)`];
  const own = describeLines(mask), usual = describeLines(maskOf(trained)), center = (usual.center * mask.length) / trained.width;
  if (own.spacing && usual.spacing && own.spacing !== usual.spacing) found.push(`${own.spacing} lines (trained on ${usual.spacing} ones)`);
  if (own.center < center / 1.5 - 2 || own.center > center * 1.5 + 2) {
    found.push(`${own.center} line${own.center === 1 ? '' : 's'} in the centre (trained on ${roundHalfEven(center)})`);
  }
  const shared = own.outside.filter((c) => usual.outside.includes(c)).length, isFixed = masks === 'fixed' && trained.width === mask.length;
  if (isFixed && !found.length && shared < 0.9 * own.outside.length) found.push('lines at other columns (trained on one fixed mask)');
  return found;
}

function maskOf({width, columns}) {
  const mask = new Uint8Array(width);
  for (const c of columns) mask[c] = 1;
  return mask;
}

/** The number of lines in the centre, those outside of it, and how these follow each other. */
function describeLines(mask) {
  let first = Math.floor(mask.length / 2), end = first;
  while (first > 0 && mask[first - 1]) first--;
  while (end < mask.length && mask[end]) end++;
  const kept = [...mask.keys()].filter((c) => mask[c]), sides = [kept.filter((c) => c < first), kept.filter((c) => c >= end)];
  const gaps = sides.flatMap((side) => side.slice(1).map((c, i) => c - side[i]));
  const isEven = Math.max(...gaps) - Math.min(...gaps) <= 1;  // distances are rounded
  const spacing = isEven ? 'equispaced' : 'irregular';
  return {center: end - first, outside: sides.flat(), spacing: gaps.length < 5 ? '' : spacing};  // few are alike by chance
}

/** The mask of the training where it is asked for and fits, else one by the same rule. */
function chosenMask({kind, acceleration}, width, {trained, ...task}) {
  const isTrained = kind === task.kind && acceleration === task.acceleration && trained.columns && width === trained.width;
  return isTrained ? maskOf(trained) : createMask(kind, width, acceleration);
}

/** Numbers in [0, 1) that a seed decides. */
function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t = (t + Math.imul(t ^ (t >>> 7), t | 61)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

export function magnitude({re, im}) {
  if (!im) return Float32Array.from(re, Math.abs);
  return re.map((r, i) => Math.hypot(r, im[i]));
}

/** Whether a complex image {re, im} is likely k-space: its energy is in fewer values than that of its transform. */
export function looksLikeKspace(image, H, W) {
  const largest = (values) => {
    const sorted = magnitude(values).sort(), few = Math.max(1, Math.floor(H * W / 64));
    return sorted.subarray(-few).reduce((sum, v) => sum + v * v, 0);
  };
  return largest(image) > largest(fft2c(image, H, W));
}

export function range(values) {
  let low = Infinity, high = -Infinity;
  for (const v of values) {
    if (v < low) low = v;
    if (v > high) high = v;
  }
  return [low, high];
}

/** PSNR with the maximum of the target as range, and NMSE; both images clamped to [0, 1], as protocol "hifi" has it. */
export function scores(image, target) {
  let error = 0, energy = 0, high = 0;
  for (let i = 0; i < target.length; i++) {
    const t = clamp(target[i]), d = clamp(image[i]) - t;
    error += d * d;
    energy += t * t;
    if (t > high) high = t;
  }
  return {psnr: 10 * Math.log10((high * high * target.length) / error), nmse: error / energy};
}

/** Resize one channel with the Catmull-Rom kernel, widened where it reduces: what Pillow and the task do. */
export function bicubic(pixels, H, W, h, w) {
  const kernel = (x) => {
    x = Math.abs(x);
    if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
    return x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0;
  };
  const weights = (n, m) => {
    const scale = n / m, widened = Math.max(scale, 1), reach = 2 * widened;
    return Array.from({length: m}, (_, i) => {
      const centre = (i + 0.5) * scale;
      const first = Math.max(Math.trunc(centre - reach + 0.5), 0);
      const last = Math.min(Math.trunc(centre + reach + 0.5), n);
      const values = Array.from({length: last - first}, (_, k) => kernel((k + first - centre + 0.5) / widened));
      const sum = values.reduce((a, b) => a + b, 0);
      return {first, values: values.map((v) => v / sum)};
    });
  };
  const across = new Float32Array(H * w), out = new Float32Array(h * w);
  weights(W, w).forEach(({first, values}, x) => {
    for (let y = 0; y < H; y++) {
      let sum = 0;
      for (let k = 0; k < values.length; k++) sum += values[k] * pixels[y * W + first + k];
      across[y * w + x] = sum;
    }
  });
  weights(H, h).forEach(({first, values}, y) => {
    for (let x = 0; x < w; x++) {
      let sum = 0;
      for (let k = 0; k < values.length; k++) sum += values[k] * across[(first + k) * w + x];
      out[y * w + x] = sum;
    }
  });
  return out;
}

/** The middle of a slice that is larger than a side may be: {slice, H, W}. */
export function middle(slice, H, W, most) {
  const h = Math.min(H, most), w = Math.min(W, most), top = (H - h) >> 1, left = (W - w) >> 1;
  if (h === H && w === W) return {slice, H, W};
  const cut = (values) => values && Float32Array.from({length: h * w}, (_, i) => values[(top + Math.floor(i / w)) * W + left + (i % w)]);
  return {slice: {...slice, channels: slice.channels.map(({re, im}) => ({re: cut(re), im: cut(im)}))}, H: h, W: w};
}

/**
 * What the network gets, and what it is compared with, of one slice of a scan.
 * slice: {channels: [{re, im}], mask}; H, W; task: of the model; sampling: {kind, acceleration, isEnlarged}.
 * Returns {input: Float32Array, channels, H, W, mask, target, plain, low, scale}: target and plain are magnitudes (or RGB planes)
 * that the network's output is shown beside, in its own scale; value = low + scale * shown.
 */
export function prepare(slice, H, W, task, {isEnlarged, ...sampling}) {
  if (task.name !== 'superres') return prepareScan(slice, H, W, task, sampling);
  return isEnlarged ? enlarge(slice, H, W, task) : prepareColour(slice, H, W, task);
}

function prepareScan(slice, H, W, task, sampling) {
  const mask = slice.mask ?? chosenMask(sampling, W, task);
  const image = slice.channels[0];
  let low = 0, scale, scaled = image, target = null;
  if (slice.mask) {  // measured: scaled by the zero-filled image, since there is no other
    scale = range(magnitude(image))[1] || 1;
  } else if (task.complex) {
    scale = range(magnitude(image))[1] || 1;
  } else {
    scaled = {re: magnitude(image), im: null};
    const [least, most] = range(scaled.re);
    low = least;
    scale = most > least ? most - least : 1;
  }
  scaled = {re: scaled.re.map((v) => (v - low) / scale), im: scaled.im ? scaled.im.map((v) => v / scale) : null};
  if (!slice.mask) target = magnitude(scaled);
  const k = fft2c(scaled, H, W);
  for (let i = 0; i < H * W; i++) {
    if (!mask[i % W]) k.re[i] = k.im[i] = 0;
  }
  const plain = fft2c(k, H, W, true), input = new Float32Array(2 * H * W);
  input.set(plain.re);
  input.set(plain.im, H * W);
  return {input, channels: 2, H, W, mask, target, plain: magnitude(plain), low, scale};
}

const clamp = (v) => Math.min(1, Math.max(0, v));

/** Three planes in [0, 1]; scans, which are not, are divided by their maximum. */
function colours({channels}) {
  const planes = channels.map(magnitude), high = Math.max(1, ...planes.map((plane) => range(plane)[1]));
  const scaled = planes.map((plane) => (high > 1 ? plane.map((v) => v / high) : plane));
  return scaled.length === 3 ? scaled : [scaled[0], scaled[0], scaled[0]];
}

/** The picture is the target, and the network gets it shrunk and enlarged again. */
function prepareColour(slice, H, W, task) {
  const [h, w] = [Math.floor(H / task.factor), Math.floor(W / task.factor)], [height, width] = [h * task.factor, w * task.factor];
  const n = height * width, input = new Float32Array(3 * n), target = new Float32Array(3 * n);
  colours(slice).forEach((plane, c) => {
    const cut = new Float32Array(n);  // rows and columns that the factor does not divide are left out
    for (let y = 0; y < height; y++) cut.set(plane.subarray(y * W, y * W + width), y * width);
    const small = bicubic(cut, height, width, h, w).map((v) => roundHalfEven(clamp(v) * 255) / 255);
    input.set(bicubic(small, h, w, height, width).map(clamp), c * n);
    target.set(cut, c * n);
  });
  return {input, channels: 3, H: height, W: width, mask: null, target, plain: input, low: 0, scale: 1};
}

/** The network gets the picture enlarged; there is nothing to compare with. */
function enlarge(slice, h, w, task) {
  const [H, W] = [h * task.factor, w * task.factor], input = new Float32Array(3 * H * W);
  colours(slice).forEach((plane, c) => input.set(bicubic(plane, h, w, H, W).map(clamp), c * H * W));
  return {input, channels: 3, H, W, mask: null, target: null, plain: input, low: 0, scale: 1};
}

/** The network's output as it is shown: magnitude, or RGB planes in [0, 1]. */
export function shown(output, task) {
  if (task.name === 'superres') return output.map(clamp);
  const n = output.length / 2;
  return magnitude({re: output.subarray(0, n), im: output.subarray(n)});
}
