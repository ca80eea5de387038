// Shared by all readers: limits, errors for the person at the screen, and bytes of files.

export const MAX_BYTES = 768 * 2 ** 20;  // a tab has 2 to 4 GB, and decoding needs several copies
export const MIN_SIDE = 32, MAX_SIDE = 2048;  // the networks are made for these
export const MAX_ENLARGED_SIDE = 1024;  // of an enlarged picture: one of 2048 was not done after two minutes in one thread
export const INSTEAD = "'chasm reconstruct' reads it without a browser";

/** An error whose text is for the person at the screen. */
export class FileError extends Error {}

export async function bytes(blob, name) {
  try {
    return await blob.arrayBuffer();
  } catch {
    throw new FileError(`${name} cannot be read: it was moved or changed, or there is not enough memory. Drop it again.`);
  }
}

export function finite(values) {
  for (const v of values) {
    if (!Number.isFinite(v)) throw new FileError('A value in the file is infinite or not a number: repair the file first.');
  }
  return values;
}

/** Load a library that is a script and not a module. */
export function loadScript(src) {
  return new Promise((resolve, reject) => {
    const script = Object.assign(document.createElement('script'), {src, onload: resolve});
    script.onerror = () => reject(new FileError(`${src} cannot be loaded: is the server still running?`));
    document.head.append(script);
  });
}
