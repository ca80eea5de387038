// Canvases that share one zoom, place, brightness and contrast.
/** Grey or RGB planes as pixels, after brightness and contrast. */
function toPixels(values, H, W, low, high) {
  const pixels = new Uint8ClampedArray(4 * H * W), n = H * W, colours = values.length === 3 * n;
  const scale = 255 / (high - low || 1);
  for (let i = 0; i < n; i++) {
    for (let c = 0; c < 3; c++) pixels[4 * i + c] = (values[colours ? c * n + i : i] - low) * scale;
    pixels[4 * i + 3] = 255;
  }
  return new ImageData(pixels, W, H);
}

/** Differences around zero: blue below, red above. */
function toSigned(values, H, W, factor) {
  const pixels = new Uint8ClampedArray(4 * H * W), n = H * W, planes = values.length / n;
  for (let i = 0; i < n; i++) {
    let v = 0;
    for (let c = 0; c < planes; c++) v += values[c * n + i] / planes;
    v *= 255 * factor;
    pixels.set([v > 0 ? v : 0, Math.abs(v) / 3, v < 0 ? -v : 0, 255], 4 * i);
  }
  return new ImageData(pixels, W, H);
}

/** A whole factor that makes differences visible: their root mean square becomes a tenth of the range. */
function visible(values) {
  const rms = Math.sqrt(values.reduce((sum, v) => sum + v * v, 0) / values.length);
  return rms ? Math.min(100, Math.max(1, Math.round(0.1 / rms))) : 1;
}

/** The letters at the edges of slices: those of the direction that is nearest to where columns and rows (from below) run. */
function edgesOf([columns, rows]) {
  const ends = (direction) => {
    const along = direction.reduce((best, v, i) => (Math.abs(v) > Math.abs(direction[best]) ? i : best), 0);
    const [less, more] = ['LR', 'PA', 'IS'][along];
    return direction[along] < 0 ? [more, less] : [less, more];
  };
  const [left, right] = ends(columns), [bottom, top] = ends(rows);
  return {left, right, top, bottom};
}

export class Views {
  constructor(root, onChange = () => {}) {
    this.compare = root.querySelector('#compare');
    this.small = [...root.querySelectorAll('canvas[data-view]')];
    this.zoom = 1;
    this.x = this.y = 0.5;
    this.level = 0.5;
    this.window = 1;
    this.wipe = 0.5;
    this.left = 'plain';
    this.pictures = {};
    this.setPlace({});
    this.onChange = onChange;
    for (const canvas of [this.compare, ...this.small]) this.listen(canvas);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.compare);
  }

  /** Pixels are as high and wide as a scan says, and its edges have the letters that radiologists know. */
  setPlace({spacing: [dx, dy] = [1, 1], affine, code}) {
    this.aspect = dx > 0 && dy > 0 ? dy / dx : 1;
    this.edges = affine && code ? edgesOf(affine) : null;
    this.compare.title = this.edges ? 'R, L: right and left of the patient; A, P: front and back; S, I: head and feet' : '';
  }

  /** images: {target, plain, output, changed}: values in [0, 1], null where there is none. */
  show(images, H, W) {
    this.H = H;
    this.W = W;
    this.images = images;
    this.make();
  }

  make() {
    if (!this.images) return;
    const {H, W, images} = this, low = this.level - this.window / 2, high = this.level + this.window / 2;
    const difference = (a, b) => (a && b ? a.map((v, i) => v - b[i]) : null);
    const made = {};
    for (const name of ['target', 'plain', 'output']) made[name] = images[name] && toPixels(images[name], H, W, low, high);
    const error = difference(images.output, images.target)?.map(Math.abs);
    made.error = error && toPixels(error.map((v) => 5 * v), H, W, 0, 1);
    this.factors = {};
    for (const [name, other] of [['residual', images.plain], ['changed', images.unchanged]]) {
      const values = difference(images.output, other);
      this.factors[name] = values ? visible(values) : 1;
      made[name] = values && toSigned(values, H, W, this.factors[name]);
    }
    this.pictures = {};
    for (const [name, pixels] of Object.entries(made)) {
      if (!pixels) continue;
      const canvas = new OffscreenCanvas(W, H);
      canvas.getContext('2d').putImageData(pixels, 0, 0);
      this.pictures[name] = canvas;
    }
    this.draw();
  }

  draw() {
    for (const canvas of this.small) {
      canvas.closest('figure').hidden = !this.pictures[canvas.dataset.view];
      this.paint(canvas, this.pictures[canvas.dataset.view]);
    }
    const {output, plain} = this.pictures;
    this.paint(this.compare, output ?? plain, output && this.pictures[this.left]);
  }

  paint(canvas, picture, left = null) {
    const box = canvas.getBoundingClientRect(), density = devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(box.width * density));
    canvas.height = Math.max(1, Math.round(box.height * density));
    if (!picture) return;
    const context = canvas.getContext('2d'), [across, down] = this.scale(canvas);
    const place = [canvas.width / 2 - this.x * this.W * across, canvas.height / 2 - this.y * this.H * down, this.W * across, this.H * down];
    context.imageSmoothingEnabled = Math.min(across, down) < 3;
    context.drawImage(picture, ...place);
    if (left) this.paintLeft(canvas, context, left, place);
    if (canvas === this.compare) this.label(canvas, context);
  }

  /** The other picture, up to the line where the two meet. */
  paintLeft(canvas, context, left, place) {
    const edge = Math.round(this.wipe * canvas.width), density = devicePixelRatio || 1;
    context.save();
    context.beginPath();
    context.rect(0, 0, edge, canvas.height);
    context.clip();
    context.clearRect(0, 0, edge, canvas.height);
    context.drawImage(left, ...place);
    context.restore();
    context.fillStyle = '#ffd54a';
    context.fillRect(edge - density / 2, 0, density, canvas.height);
  }

  /** Where right, left, front, back, head and feet are. */
  label(canvas, context) {
    if (!this.edges) return;
    const {width, height} = canvas, size = 15 * (devicePixelRatio || 1), {left, right, top, bottom} = this.edges;
    Object.assign(context, {font: `600 ${size}px system-ui, sans-serif`, textAlign: 'center', textBaseline: 'middle'});
    Object.assign(context, {fillStyle: '#ffd54a', strokeStyle: '#000', lineWidth: size / 5, lineJoin: 'round'});
    const places = [[left, size, height / 2], [right, width - size, height / 2], [top, width / 2 + size, size], [bottom, width / 2 + size, height - size]];
    for (const place of places) {
      context.strokeText(...place);
      context.fillText(...place);
    }
  }

  /** Pixels of a canvas for one of the picture: across, down. */
  scale(canvas) {
    const scale = Math.min(canvas.width / this.W, canvas.height / (this.H * this.aspect)) * this.zoom;
    return [scale, scale * this.aspect];
  }

  setZoom(zoom) {
    this.zoom = Math.min(32, Math.max(1, zoom));
    if (this.zoom === 1) this.x = this.y = 0.5;
    // A finger scrolls the page over a picture that fits, and moves one that is enlarged.
    for (const canvas of [this.compare, ...this.small]) canvas.style.touchAction = this.zoom > 1 ? 'none' : '';
    this.draw();
  }

  reset() {
    Object.assign(this, {level: 0.5, window: 1, wipe: 0.5});
    this.setZoom(1);
    this.make();
    this.onChange();
  }

  listen(canvas) {
    const touches = new Map();
    canvas.addEventListener('contextmenu', (event) => event.preventDefault());
    canvas.addEventListener('wheel', (event) => {
      event.preventDefault();
      this.setZoom(this.zoom * (event.deltaY < 0 ? 1.15 : 1 / 1.15));
    }, {passive: false});
    canvas.addEventListener('dblclick', () => this.setZoom(this.zoom > 1 ? 1 : 3));
    canvas.addEventListener('pointerdown', (event) => {
      canvas.setPointerCapture(event.pointerId);
      touches.set(event.pointerId, event);
    });
    for (const end of ['pointerup', 'pointercancel']) canvas.addEventListener(end, (event) => touches.delete(event.pointerId));
    canvas.addEventListener('pointermove', (event) => {
      const last = touches.get(event.pointerId);
      if (!last) return;
      if (touches.size === 2) {
        const other = [...touches.values()].find((touch) => touch.pointerId !== event.pointerId);
        const reach = (a) => Math.hypot(a.clientX - other.clientX, a.clientY - other.clientY);
        this.setZoom((this.zoom * reach(event)) / (reach(last) || 1));
      } else {
        const dx = event.clientX - last.clientX, dy = event.clientY - last.clientY;
        if (event.shiftKey || event.buttons === 2) {
          this.window = Math.min(2, Math.max(0.05, this.window + dx / 200));
          this.level = Math.min(1, Math.max(0, this.level - dy / 200));
          this.make();
          this.onChange();
        } else if (this.zoom === 1 && canvas === this.compare) {
          const box = canvas.getBoundingClientRect();
          this.wipe = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
          this.draw();
          this.onChange();
        } else if (this.W) {
          const [across, down] = this.scale(canvas).map((scale) => scale / (devicePixelRatio || 1));
          this.x = Math.min(1, Math.max(0, this.x - dx / (this.W * across)));
          this.y = Math.min(1, Math.max(0, this.y - dy / (this.H * down)));
          if (this.zoom === 1) this.x = this.y = 0.5;
          this.draw();
        }
      }
      touches.set(event.pointerId, event);
    });
  }

  /** The reconstruction as it is shown, one pixel for each of its own. */
  async png() {
    return this.pictures.output.convertToBlob({type: 'image/png'});
  }
}
