// Files that a person can keep: a NIfTI volume, a PNG of one slice.

/**
 * A NIfTI-1 file of float32 slices (H, W), rows from top to bottom.
 * affine: columns, rows from below, slices and origin, in millimetres to the right, front and up; else spacing alone.
 * code: what the affine is relative to, as NIfTI has it; 0 if that is not known.
 */
export function nifti(slices, H, W, {spacing = [1, 1, 1], affine = null, code = 0} = {}) {
  const buffer = new ArrayBuffer(352 + 4 * slices.length * H * W), view = new DataView(buffer);
  view.setInt32(0, 348, true);
  [3, W, H, slices.length, 1, 1, 1, 1].forEach((n, i) => view.setInt16(40 + 2 * i, n, true));
  view.setInt16(70, 16, true);
  view.setInt16(72, 32, true);
  [1, ...spacing].forEach((v, i) => view.setFloat32(76 + 4 * i, v, true));
  view.setFloat32(108, 352, true);
  view.setFloat32(112, 1, true);
  view.setUint8(123, 2);  // millimetres
  view.setInt16(254, code || 2, true);  // an sform; 2: aligned to something
  const columns = affine ?? [...spacing.map((v, i) => [0, 1, 2].map((r) => (r === i ? v : 0))), [0, 0, 0]];
  columns.forEach((column, c) => column.forEach((v, r) => view.setFloat32(280 + 16 * r + 4 * c, v, true)));
  [0x6e, 0x2b, 0x31, 0].forEach((v, i) => view.setUint8(344 + i, v));
  const values = new Float32Array(buffer, 352);
  slices.forEach((slice, z) => {
    for (let y = 0; y < H; y++) values.set(slice.subarray(y * W, (y + 1) * W), z * H * W + (H - 1 - y) * W);
  });
  return new Blob([buffer], {type: 'application/octet-stream'});
}

export function save(blob, name) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
