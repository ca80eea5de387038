// Gains over frequency, and the shared basis, of one mixer.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function fit(canvas) {
  const box = canvas.getBoundingClientRect(), density = devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(box.width * density));
  canvas.height = Math.max(1, Math.round(box.height * density));
  const context = canvas.getContext('2d');
  context.scale(density, density);
  return [context, box.width, box.height];
}

/** gains: one list of channels for each frequency, from zero to the highest; bands: factors of equal parts of them. */
export function drawGains(canvas, gains, bands) {
  const [context, width, height] = fit(canvas), left = 38, bottom = height - 26, right = width - 10, top = 10;
  const factor = (k) => bands[Math.floor((k * bands.length) / gains.length)];
  const sorted = gains.map((row, k) => row.map((v) => v * factor(k)).sort((a, b) => a - b));
  const high = Math.max(1.2, ...sorted.map((row) => row.at(-1))) * 1.05, low = Math.min(0, ...sorted.map((row) => row[0]));
  const x = (k) => left + ((right - left) * k) / Math.max(1, gains.length - 1);
  const y = (v) => bottom - ((bottom - top) * (v - low)) / (high - low);
  context.font = '12px system-ui, sans-serif';
  context.fillStyle = context.strokeStyle = colour('--quiet');
  context.globalAlpha = 0.35;
  for (let b = 1; b < bands.length; b++) {
    const at = x((b * gains.length) / bands.length - 0.5);
    context.fillRect(at, top, 1, bottom - top);
  }
  context.fillRect(left, y(1), right - left, 1);
  context.globalAlpha = 1;
  context.fillText('1', left - 14, y(1) + 4);
  context.fillText(high.toFixed(1), 4, top + 8);
  context.fillText(low.toFixed(0), left - 14, bottom + 4);
  context.fillText('0', left, height - 8);
  context.textAlign = 'right';
  context.fillText('highest frequency', right, height - 8);
  context.textAlign = 'left';
  const accent = colour('--accent');
  context.fillStyle = context.strokeStyle = accent;
  context.globalAlpha = 0.2;
  context.beginPath();
  sorted.forEach((row, k) => context.lineTo(x(k), y(row.at(-1))));
  for (let k = sorted.length - 1; k >= 0; k--) context.lineTo(x(k), y(sorted[k][0]));
  context.fill();
  context.globalAlpha = 1;
  context.lineWidth = 2;
  context.beginPath();
  sorted.forEach((row, k) => context.lineTo(x(k), y(row[Math.floor(row.length / 2)])));
  context.stroke();
}

/** basis: C rows of C numbers in [-1, 1]. */
export function drawBasis(canvas, basis) {
  const C = basis.length, pixels = new ImageData(C, C);
  basis.flat().forEach((v, i) => {
    const strength = Math.min(1, Math.sqrt(Math.abs(v)));  // small entries are what was learned
    const rest = 255 * (1 - strength);
    pixels.data.set(v >= 0 ? [255 - 60 * strength, rest, rest, 255] : [rest, rest, 255 - 60 * strength, 255], 4 * i);
  });
  const picture = new OffscreenCanvas(C, C);
  picture.getContext('2d').putImageData(pixels, 0, 0);
  const [context, width, height] = fit(canvas), side = Math.min(width, height);
  context.imageSmoothingEnabled = false;
  context.drawImage(picture, 0, 0, side, side);
}
