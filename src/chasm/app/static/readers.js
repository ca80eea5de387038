// Files into scans: {name, H, W, count, slice(i) -> {channels: [{re, im}], mask}, spacing, note}. Those of NIfTI and DICOM
// have an affine and its code, where their files say it; those of NIfTI a plane, planes and cut(plane). Nothing leaves the page.
import {readDicom} from './dicom.js';
import {FileError, INSTEAD, MAX_BYTES, MAX_SIDE, MIN_SIDE, bytes, finite} from './files.js';
import {readNifti} from './nifti.js';
import {fft2c, looksLikeKspace, magnitude} from './physics.js';

/** Read what was dropped: one file, or the files of one DICOM series. */
export async function readScan(files, local = null) {
  if (!files.length) throw new FileError('No file was given.');
  const size = files.reduce((sum, file) => sum + file.size, 0), name = files[0].name;
  if (size === 0) throw new FileError(`${name} is empty.`);
  if (size > MAX_BYTES) {
    const told = `${(size / 2 ** 30).toFixed(1)} GB, and a page can hold ${MAX_BYTES / 2 ** 20} MB`;
    throw new FileError(`${name}: ${told}: ${INSTEAD}.`);
  }
  const first = new Uint8Array(await bytes(files[0].slice(0, 400), name));
  const kind = recognise(first, name);
  const reader = {nifti: readNifti, picture: readPicture, npy: readNpy, hdf5: readHdf5, dicom: readDicom}[kind];
  if (files.length > 1 && kind !== 'dicom') {
    throw new FileError(`${files.length} files: only the files of a DICOM series go together. Drop one file.`);
  }
  let scan;
  try {
    if (!reader) throw new FileError(`${name}: not a NIfTI, DICOM, PNG, JPEG, NumPy or HDF5 file.`);
    scan = check(await reader(files, {head: first, hasServer: local !== null}), name);
  } catch (error) {
    if (local) return local(files, error);
    if (error instanceof FileError) throw error;
    throw new FileError(`${name} cannot be read as ${kind}: ${error.message ?? error}. If the file is not damaged, ${INSTEAD}.`);
  }
  if (kind === 'npy' || kind === 'nifti') refuseKspace(scan, name);
  return {...scan, name: name.replace(/\.(gz|nii|h5|npy|png|jpe?g|dcm|ima)$/gi, '').replace(/\.nii$/i, '')};
}

function recognise(head, name) {
  const text = String.fromCharCode(...head.subarray(0, 8));
  if (text.startsWith('\x89PNG') || text.startsWith('\xff\xd8\xff')) return 'picture';
  if (text.startsWith('\x89HDF')) return 'hdf5';
  if (text.startsWith('\x93NUMPY')) return 'npy';
  if (String.fromCharCode(...head.subarray(128, 132)) === 'DICM') return 'dicom';
  const view = new DataView(head.buffer, head.byteOffset, head.length);
  const isHeader = head.length >= 348 && (view.getInt32(0, true) === 348 || view.getInt32(0, false) === 348);
  if (isHeader || (head[0] === 0x1f && head[1] === 0x8b && /\.nii\.gz$/i.test(name))) return 'nifti';
  return /\.(dcm|ima)$/i.test(name) ? 'dicom' : 'unknown';
}

function check(scan, name) {
  const {H, W, count} = scan;
  if (!(H >= MIN_SIDE && W >= MIN_SIDE)) {
    throw new FileError(`${name}: ${H} x ${W} pixels are too few: ${MIN_SIDE} x ${MIN_SIDE} or more.`);
  }
  if (H > MAX_SIDE || W > MAX_SIDE) {
    throw new FileError(`${name}: ${H} x ${W} pixels are more than ${MAX_SIDE} a side: cut a part out of it, or make it smaller.`);
  }
  if (!(count >= 1)) throw new FileError(`${name} holds no slice.`);
  const fits = (plane) => ((cut) => Math.min(cut.H, cut.W) >= MIN_SIDE && Math.max(cut.H, cut.W) <= MAX_SIDE)(scan.cut(plane));
  return scan.planes ? {...scan, planes: scan.planes.filter(fits)} : scan;
}

/** Refuse complex numbers that are k-space: they are taken as images, as chasm.reconstruct.inputs takes them. */
function refuseKspace({H, W, count, slice}, name) {
  const [image] = slice(Math.floor(count / 2)).channels;
  if (image.im && looksLikeKspace(image, H, W)) {
    throw new FileError(`${name} looks like k-space, and arrays are read as images here: 'chasm reconstruct --as kspace' reads it.`);
  }
}

/** Slices of a stack (count, H, W) of real numbers, or of complex ones that follow each other. */
function stack(values, count, H, W, complex = false) {
  const n = H * W, step = complex ? 2 : 1;
  const slice = (i) => {
    const part = values.subarray(i * n * step, (i + 1) * n * step);
    if (!complex) return {channels: [{re: finite(Float32Array.from(part)), im: null}]};
    const re = new Float32Array(n), im = new Float32Array(n);
    for (let k = 0; k < n; k++) {
      re[k] = part[2 * k];
      im[k] = part[2 * k + 1];
    }
    return {channels: [{re: finite(re), im: finite(im)}]};
  };
  return {H, W, count, slice};
}

async function readPicture([file]) {
  const options = {colorSpaceConversion: 'none', premultiplyAlpha: 'none'};
  const picture = await createImageBitmap(file, options);
  const [W, H] = [picture.width, picture.height].map((n) => Math.min(n, MAX_SIDE));
  check({H, W, count: 1}, file.name);
  const context = new OffscreenCanvas(W, H).getContext('2d', {willReadFrequently: true});
  context.drawImage(picture, (W - picture.width) >> 1, (H - picture.height) >> 1);
  const {data} = context.getImageData(0, 0, W, H), n = H * W;
  const planes = [0, 1, 2].map((c) => Float32Array.from({length: n}, (_, i) => data[4 * i + c] / 255));
  const isGrey = planes[0].every((v, i) => v === planes[1][i] && v === planes[2][i]);
  const channels = (isGrey ? planes.slice(0, 1) : planes).map((re) => ({re, im: null}));
  const full = [picture.height, picture.width];  // of which this may be the middle
  return {H, W, full, count: 1, slice: () => ({channels}), note: isGrey ? '' : 'a colour picture'};
}

const NUMPY = {f4: Float32Array, f8: Float64Array, u1: Uint8Array, u2: Uint16Array, i1: Int8Array, i2: Int16Array,
  i4: Int32Array, u4: Uint32Array, b1: Uint8Array, c8: Float32Array, c16: Float64Array};

async function readNpy([file]) {
  const buffer = await bytes(file, file.name), view = new DataView(buffer);
  const wide = view.getUint8(6) > 1, length = wide ? view.getUint32(8, true) : view.getUint16(8, true);
  const start = (wide ? 12 : 10) + length;
  const header = new TextDecoder('latin1').decode(new Uint8Array(buffer, wide ? 12 : 10, length));
  const [, order, type] = /'descr':\s*'([<>|=])(\w+)'/.exec(header) ?? [];
  const shape = (/'shape':\s*\(([^)]*)\)/.exec(header)?.[1] ?? '').split(',').filter((s) => s.trim()).map(Number);
  if (!NUMPY[type] || order === '>' || /'fortran_order':\s*True/.test(header)) {
    throw new FileError(`${file.name}: an array of ${type ?? 'objects'} in this order is not read here: ${INSTEAD}.`);
  }
  if (shape.length < 2 || shape.length > 3) {
    throw new FileError(`${file.name}: expected (H, W) or (slices, H, W), got (${shape.join(', ')}).`);
  }
  const [H, W] = shape.slice(-2), count = shape.length === 3 ? shape[0] : 1, complex = type[0] === 'c';
  const needed = count * H * W * (complex ? 2 : 1);
  const array = NUMPY[type];
  if (buffer.byteLength - start < needed * array.BYTES_PER_ELEMENT) throw new FileError(`${file.name} is cut short.`);
  return stack(new array(buffer.slice(start), 0, needed), count, H, W, complex);
}

async function readHdf5([file], {hasServer}) {
  const h5 = await import('./vendor/hdf5_hl.js');
  const {FS} = await h5.ready;
  FS.writeFile('/scan.h5', new Uint8Array(await bytes(file, file.name)));
  const open = new h5.File('/scan.h5', 'r');
  try {
    const names = open.keys();
    const key = ['kspace', 'reconstruction', 'reconstruction_rss', 'reconstruction_esc', 'image'].find((k) => names.includes(k));
    if (!key) throw new FileError(`${file.name}: no kspace or reconstruction in it, only: ${names.join(', ')}.`);
    return key === 'kspace' ? readKspace(open, names, file.name, hasServer) : readVolume(open.get(key), file.name, key);
  } finally {
    open.close();
    FS.unlink('/scan.h5');
  }
}

function readVolume(dataset, name, key) {
  const shape = dataset.shape;
  if (shape.length < 2 || shape.length > 3) throw new FileError(`${name}: ${key} has the shape ${shape.join(' x ')}.`);
  const [H, W] = shape.slice(-2);
  return {...stack(dataset.value, shape.length === 3 ? shape[0] : 1, H, W), note: `read: ${key}`};
}

function readKspace(open, names, name, hasServer) {
  const dataset = open.get('kspace'), shape = dataset.shape, [count, coils] = shape.length === 4 ? shape : [shape[0], 1];
  if (shape.length < 3 || shape.length > 4) {
    throw new FileError(`${name}: kspace: expected (slices, H, W) or (slices, coils, H, W), got ${shape.join(' x ')}.`);
  }
  const hasHeader = names.includes('ismrmrd_header');
  if (hasServer && (coils > 1 || hasHeader)) throw new FileError(`${name}: chasm combines coils and cuts the margins.`);
  const [H, W] = shape.slice(-2);
  let mask = names.includes('mask') ? Uint8Array.from(open.get('mask').value, Number) : null;
  if (mask && mask.length !== W) throw new FileError(`${name}: the mask has ${mask.length} columns, k-space ${W}.`);
  const all = dataset.value;  // h5wasm gives compounds {r, i} as one array after the other
  const flat = ArrayBuffer.isView(all) ? all : Float32Array.from(all.flat(Infinity), Number);
  if (flat.length !== 2 * count * coils * H * W) throw new FileError(`${name}: kspace is not complex.`);
  const kspace = stack(flat, count * coils, H, W, true), isStored = mask !== null;
  mask ??= filledColumns(kspace.slice(coils * Math.floor(count / 2)).channels[0], W);
  if (mask && coils > 1) throw new FileError(`${name}: undersampled k-space of ${coils} coils: ${INSTEAD}.`);
  const image = (i) => fft2c(kspace.slice(i).channels[0], H, W, true);
  const slice = (i) => ({channels: [coils > 1 ? rootSumOfSquares(image, i * coils, coils) : image(i)], mask});
  const notes = [mask ? 'k-space, as it was measured' : 'fully sampled k-space'];
  if (mask && !isStored) notes.push('no mask in the file: the columns that hold anything are taken as measured');
  if (coils > 1) notes.push(`root-sum-of-squares of ${coils} coils, so no phase: 'chasm app' combines them with it`);
  if (hasHeader) notes.push('with the margins of the field of view');
  return {H, W, count, slice, note: notes.join(', ')};
}

/** The columns that hold anything, if there are empty ones between them; else null: those at the edges are zero-padding. */
function filledColumns({re, im}, W) {
  const filled = new Uint8Array(W);
  for (let i = 0; i < re.length; i++) if (re[i] || im[i]) filled[i % W] = 1;
  const inside = filled.subarray(filled.indexOf(1), filled.lastIndexOf(1) + 1);
  return inside.includes(0) ? filled : null;
}

function rootSumOfSquares(image, first, coils) {
  const sum = magnitude(image(first)).map((v) => v * v);
  for (let c = 1; c < coils; c++) magnitude(image(first + c)).forEach((v, i) => (sum[i] += v * v));
  return {re: sum.map(Math.sqrt), im: null};
}
