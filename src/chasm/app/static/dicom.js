// DICOM files as the slices of one volume: in the order, and at the place, that chasm.data.dicom gives them.
import {FileError, INSTEAD, bytes, finite, loadScript} from './files.js';

const SYNTAXES = ['1.2.840.10008.1.2', '1.2.840.10008.1.2.1'];  // little-endian, not compressed
const MAX_UNEVEN = 0.1;  // of the distance between slices: how far one may lie from its place on the grid

export async function readDicom(files, {hasServer}) {
  if (!globalThis.dicomParser) await loadScript('vendor/dicomParser.min.js');
  const found = [];
  for (const file of files) found.push(...await readFrames(file, hasServer));
  const [{H, W, series}] = found;
  if (found.some((f) => f.series !== series)) {
    throw new FileError('These files belong to several DICOM series. Drop the files of one.');
  }
  if (found.some((f) => f.H !== H || f.W !== W)) throw new FileError('The slices differ in size.');
  const frames = inOrder(found), slice = (i) => ({channels: [{re: finite(frames[i].values), im: null}]});
  return {H, W, count: frames.length, slice, ...placeOf(frames)};
}

async function readFrames(file, hasServer) {
  let data;
  try {
    data = dicomParser.parseDicom(new Uint8Array(await bytes(file, file.name)));
  } catch (error) {
    throw new FileError(`${file.name}: not a DICOM file (${error.exception ?? error}).`);
  }
  const syntax = data.string('x00020010') ?? SYNTAXES[0];
  if (!SYNTAXES.includes(syntax)) throw new FileError(`${file.name}: its pixels are compressed (${syntax}): ${INSTEAD}.`);
  if (hasServer && data.elements.x52009230) throw new FileError(`${file.name}: chasm reads the place of every frame.`);
  const H = data.uint16('x00280010'), W = data.uint16('x00280011'), bits = data.uint16('x00280100');
  const element = data.elements.x7fe00010, count = Number(data.string('x00280008') ?? 1);
  if (!element || ![8, 16].includes(bits)) throw new FileError(`${file.name}: no pixels of 8 or 16 bits in it.`);
  if ((data.uint16('x00280002') ?? 1) > 1) throw new FileError(`${file.name}: a colour DICOM image: ${INSTEAD}.`);
  const signed = data.uint16('x00280103') === 1, n = H * W;
  const type = bits === 8 ? (signed ? Int8Array : Uint8Array) : signed ? Int16Array : Uint16Array;
  const {buffer, byteOffset} = data.byteArray, start = byteOffset + element.dataOffset;
  const length = n * count * type.BYTES_PER_ELEMENT;
  if (buffer.byteLength < start + length) throw new FileError(`${file.name} is cut short.`);
  const slope = Number(data.string('x00281053') ?? 1), inter = Number(data.string('x00281052') ?? 0);
  let values = Float32Array.from(new type(buffer.slice(start, start + length)), (v) => v * slope + inter);
  if (data.string('x00280004') === 'MONOCHROME1') {  // small values are shown bright
    const highest = values.reduce((a, b) => Math.max(a, b), -Infinity);
    values = values.map((v) => highest - v);
  }
  const numbers = (tag, expected) => {
    const list = (data.string(tag) ?? '').split('\\').map(Number);
    return list.length === expected && list.every(Number.isFinite) ? list : null;
  };
  const facts = {
    H, W, series: data.string('x0020000e'), instance: Number(data.string('x00200013') ?? 0),
    place: count > 1 ? null : numbers('x00200032', 3),  // of several frames, a file gives that of the first
    axes: numbers('x00200037', 6), spacing: numbers('x00280030', 2),
    thickness: Number(data.string('x00180088') ?? data.string('x00180050')) || 1,
  };
  return Array.from({length: count}, (_, i) => ({...facts, values: values.subarray(i * n, (i + 1) * n)}));
}

/** Frames by instance number if their places then run one way, else by place. */
function inOrder(found) {
  const frames = found.sort((a, b) => a.instance - b.instance), {axes} = frames[0];
  if (!axes || frames.some((f) => !f.place)) return frames;
  const normal = cross(axes), along = frames.map((f) => dot(f.place, normal));
  const steps = along.slice(1).map((v, i) => v - along[i]);
  if (steps.every((v) => v > 0) || steps.every((v) => v < 0)) return frames;
  return frames.map((f, i) => [along[i], f]).sort(([a], [b]) => a - b).map(([, f]) => f);
}

/** Where the slices lie, as {spacing, affine, code}, or why that is not known, as {spacing, note}. */
function placeOf(frames) {
  const [first] = frames, {axes, thickness, H} = first, count = frames.length, [dy, dx] = first.spacing ?? [1, 1];
  const unknown = (why) => ({spacing: [dx, dy, thickness], note: `${why}: saved files do not say where the slices lie in the patient`});
  if (!first.spacing || frames.some((f) => !f.place || !f.axes)) return unknown('no place in these files');
  if (frames.some((f) => f.axes.some((v, i) => Math.abs(v - axes[i]) > 1e-3))) return unknown('slices of several directions');
  const columns = axes.slice(0, 3), rows = axes.slice(3), last = frames.at(-1).place;
  const step = count > 1 ? last.map((v, r) => (v - first.place[r]) / (count - 1)) : cross(axes).map((v) => v * thickness);
  const gap = Math.hypot(...step);
  const off = frames.map(({place}, k) => Math.hypot(...place.map((v, r) => v - first.place[r] - k * step[r])));
  if (!(gap > 0) || off.some((v) => v > MAX_UNEVEN * gap)) return unknown('slices that are not evenly spaced, or of several volumes');
  const lowest = first.place.map((v, r) => v + (H - 1) * dy * rows[r]);  // affines count rows from below
  const affine = [columns.map((v) => v * dx), rows.map((v) => -v * dy), step, lowest];
  // DICOM counts to the left and to the back, NIfTI to the right and to the front.
  return {spacing: [dx, dy, gap], affine: affine.map(([x, y, z]) => [-x, -y, z]), code: 1};
}

const dot = (a, b) => a.reduce((sum, v, i) => sum + v * b[i], 0);
const cross = ([a, b, c, d, e, f]) => [b * f - c * e, c * d - a * f, a * e - b * d];
