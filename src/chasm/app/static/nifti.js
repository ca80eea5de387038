// NIfTI volumes as upright slices of one plane, as chasm.data.nifti cuts them, and where those slices lie.
import {FileError, INSTEAD, MAX_BYTES, bytes, finite} from './files.js';

const TYPES = {2: Uint8Array, 4: Int16Array, 8: Int32Array, 16: Float32Array, 64: Float64Array, 256: Int8Array,
  512: Uint16Array, 768: Uint32Array, 32: Float32Array, 1792: Float64Array};
// plane -> the axes (right, front, up = 0, 1, 2) of its columns, of its rows counted from below, and of its slices
const PLANES = {axial: [0, 1, 2], coronal: [0, 2, 1], sagittal: [1, 2, 0]};
const norm = (v) => Math.hypot(...v);

export async function readNifti([file], {head}) {
  const buffer = head[0] === 0x1f ? await unpack(file) : await bytes(file, file.name);
  if (buffer.byteLength < 352) throw new FileError(`${file.name} is cut short.`);
  const view = new DataView(buffer);
  if (view.getInt32(0, true) !== 348) {
    const what = view.getInt32(0, false) === 348 ? 'big-endian NIfTI' : 'not a NIfTI-1 file';
    throw new FileError(`${file.name}: ${what}: ${INSTEAD}.`);
  }
  const float = (at) => view.getFloat32(at, true);
  const [X, Y, Z, T] = [1, 2, 3, 4].map((i) => Math.max(1, view.getInt16(40 + 2 * i, true)));
  const code = view.getInt16(70, true), type = TYPES[code], complex = code === 32 || code === 1792;
  if (!type) throw new FileError(`${file.name}: NIfTI data type ${code} is not read here: ${INSTEAD}.`);
  const offset = Math.max(352, float(108)), needed = X * Y * Z * (complex ? 2 : 1) * type.BYTES_PER_ELEMENT;
  if (buffer.byteLength - offset < needed) throw new FileError(`${file.name} is cut short.`);
  const slope = Number.isFinite(float(112)) && float(112) ? float(112) : 1;
  const inter = Number.isFinite(float(116)) && float(112) ? float(116) : 0;  // a slope of zero: values as stored
  const stored = new type(buffer.slice(offset, offset + needed));
  const value = complex ? (at, part) => stored[2 * at + part] : (at) => stored[at] * slope + inter;
  const {affine, code: affineCode} = affineOf(view, [X, Y, Z]), volume = orient([X, Y, Z], affine, file.name);
  const note = T > 1 ? `the first of ${T} volumes` : '';
  const cut = (plane) => ({...slices(volume, plane, value, complex), cut, note, code: affineCode, planes: Object.keys(PLANES)});
  return cut(acquiredPlane(volume));
}

/** The content of a .nii.gz, unless it is larger than a page can hold. */
async function unpack(file) {
  const reader = file.stream().pipeThrough(new DecompressionStream('gzip')).getReader(), parts = [];
  let size = 0;
  try {
    for (let part; size <= MAX_BYTES && !(part = await reader.read()).done; size += part.value.length) parts.push(part.value);
  } catch {
    throw new FileError(`${file.name} is damaged or cut short: it cannot be unpacked.`);
  }
  if (size > MAX_BYTES) {
    reader.cancel();
    throw new FileError(`${file.name}: more than ${MAX_BYTES / 2 ** 20} MB when unpacked: ${INSTEAD}.`);
  }
  return new Blob(parts).arrayBuffer();
}

/** Voxels to millimetres to the right, front and up: {affine: four columns of three, code}. The sform goes before the qform. */
function affineOf(view, lengths) {
  const float = (at) => view.getFloat32(at, true), sizes = [80, 84, 88].map((at) => Math.abs(float(at)) || 1);
  const [qform, sform] = [252, 254].map((at) => view.getInt16(at, true));
  if (sform > 0) return {affine: [0, 1, 2, 3].map((c) => [0, 1, 2].map((r) => float(280 + 16 * r + 4 * c))), code: sform};
  if (qform > 0) {
    const [b, c, d] = [256, 260, 264].map(float), a = Math.sqrt(Math.max(0, 1 - b * b - c * c - d * d));
    const rotation = [
      [a * a + b * b - c * c - d * d, 2 * (b * c + a * d), 2 * (b * d - a * c)],
      [2 * (b * c - a * d), a * a + c * c - b * b - d * d, 2 * (c * d + a * b)],
      [2 * (b * d + a * c), 2 * (c * d - a * b), a * a + d * d - b * b - c * c],
    ];
    const signs = [1, 1, float(76) < 0 ? -1 : 1];
    const columns = rotation.map((column, i) => column.map((v) => v * sizes[i] * signs[i]));
    return {affine: [...columns, [268, 272, 276].map(float)], code: qform};
  }
  const columns = [[-sizes[0], 0, 0], [0, sizes[1], 0], [0, 0, sizes[2]]];  // as nibabel: x to the left, the middle at 0
  return {affine: [...columns, [0, 1, 2].map((r) => -columns[r][r] * (lengths[r] - 1) / 2)], code: 0};
}

/** For each of right, front and up: the stored axis that runs so, its length, size and step in the file. */
function orient(lengths, affine, name) {
  const strides = [1, lengths[0], lengths[0] * lengths[1]], axes = [], free = [0, 1, 2];
  for (const stored of [0, 1, 2]) {
    const column = affine[stored], size = norm(column);
    const to = free.reduce((best, a) => (Math.abs(column[a]) > Math.abs(column[best]) ? a : best), free[0]);
    if (!(size > 0 && column[to])) throw new FileError(`${name}: an axis has no direction: ${INSTEAD}.`);
    free.splice(free.indexOf(to), 1);
    const isBackward = column[to] < 0, n = lengths[stored], stride = strides[stored];
    axes[to] = {n, size, first: isBackward ? (n - 1) * stride : 0, step: isBackward ? -stride : stride,
      column: column.map((v) => (isBackward ? -v : v)), shift: isBackward ? column.map((v) => v * (n - 1)) : [0, 0, 0]};
  }
  const origin = [0, 1, 2].map((r) => affine[3][r] + axes.reduce((sum, axis) => sum + axis.shift[r], 0));
  return {axes, origin};
}

/** The plane of the only axis of length 1, or else across the coarsest axis. */
function acquiredPlane({axes}) {
  const single = [0, 1, 2].filter((a) => axes[a].n === 1), largest = Math.max(...axes.map((axis) => axis.size));
  const coarsest = axes[2].size > 0.999 * largest ? 2 : axes.findIndex((axis) => axis.size === largest);
  const across = single.length === 1 ? single[0] : coarsest;
  return Object.keys(PLANES).find((plane) => PLANES[plane][2] === across);
}

function slices({axes, origin}, plane, value, complex) {
  const [columns, rows, across] = PLANES[plane].map((a) => axes[a]), W = columns.n, H = rows.n;
  const slice = (z) => {
    const take = (part) => {
      const plane = new Float32Array(H * W), start = columns.first + rows.first + across.first + z * across.step;
      for (let y = 0; y < H; y++) {
        const row = start + (H - 1 - y) * rows.step;  // rows are shown from top to bottom
        for (let x = 0; x < W; x++) plane[y * W + x] = value(row + x * columns.step, part);
      }
      return finite(plane);
    };
    return {channels: [{re: take(0), im: complex ? take(1) : null}]};
  };
  const affine = [columns.column, rows.column, across.column, origin];
  return {H, W, count: across.n, slice, plane, affine, spacing: [columns.size, rows.size, across.size]};
}
