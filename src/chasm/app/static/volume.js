// The three views of a volume, which niivue draws: as large as the page allows, with few empty parts.
import {loadScript} from './files.js';

const AXIAL = 0, CORONAL = 1, SAGITTAL = 2;  // as niivue counts them
const MAX_HEIGHT = 0.8;  // of the window

/** The ways to place three views of a volume of X x Y x Z millimetres: {width, height, views: [{type, left, top, w, h}]}. */
function arrangements([X, Y, Z]) {
  const all = [{type: AXIAL, w: X, h: Y}, {type: CORONAL, w: X, h: Z}, {type: SAGITTAL, w: Y, h: Z}];
  const place = (views) => ({
    views,
    width: Math.max(...views.map(({left, w}) => left + w)),
    height: Math.max(...views.map(({top, h}) => top + h)),
  });
  const inRow = all.map((view, i) => ({...view, left: [0, X, 2 * X][i], top: 0}));
  const inColumn = all.map((view, i) => ({...view, left: 0, top: [0, Y, Y + Z][i]}));
  const besides = all.map((first) => {
    const [upper, lower] = all.filter((view) => view !== first);
    return [{...first, left: 0, top: 0}, {...upper, left: first.w, top: 0}, {...lower, left: first.w, top: upper.h}];
  });
  return [inRow, ...besides, inColumn].map(place);
}

export class VolumeView {
  constructor(section, canvas) {
    this.section = section;
    this.canvas = canvas;
    addEventListener('resize', () => this.fit());
  }

  /** Draw a NIfTI file, given as a Blob. */
  async show(blob, name) {
    if (!globalThis.niivue) await loadScript('vendor/niivue.umd.js');
    this.section.hidden = false;
    if (!this.viewer) {
      this.viewer = new niivue.Niivue({backColor: [0, 0, 0, 1], crosshairWidth: 1, logLevel: 'error'});
      await this.viewer.attachToCanvas(this.canvas);
    }
    await this.viewer.loadFromArrayBuffer(await blob.arrayBuffer(), name);
    this.fit();
  }

  /** Choose the arrangement with the largest pictures, and give the canvas its shape. */
  fit() {
    const volume = this.viewer?.volumes[0];
    if (!volume || this.section.hidden) return;
    const size = [1, 2, 3].map((axis) => volume.dimsRAS[axis] * volume.pixDimsRAS[axis]);
    this.section.style.width = '';
    const across = this.section.clientWidth, down = MAX_HEIGHT * innerHeight;
    const scaleOf = ({width, height}) => Math.min(across / width, down / height);
    const best = arrangements(size).reduce((a, b) => (scaleOf(b) > scaleOf(a) ? b : a)), scale = scaleOf(best);
    this.section.style.width = `${scale * best.width}px`;
    this.section.style.height = `${scale * best.height}px`;
    const share = ({left, top, w, h}) => [left / best.width, top / best.height, w / best.width, h / best.height];
    this.viewer.setCustomLayout(best.views.map((view) => ({sliceType: view.type, position: share(view)})));
    this.viewer.resizeListener();
  }
}
