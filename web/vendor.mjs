// Copies the libraries of the page from node_modules into the package, compressed, with their licences and checksums.
// Run by `make web` after `npm ci`. The result is committed, so that pip users need no node.
import {createHash} from 'node:crypto';
import {existsSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync} from 'node:fs';
import {gzipSync} from 'node:zlib';

const target = new URL('../src/chasm/app/static/vendor/', import.meta.url);
const modules = new URL('node_modules/', import.meta.url);
const files = {
  'ort.wasm.min.mjs': 'onnxruntime-web/dist/ort.wasm.min.mjs',
  'ort-wasm-simd-threaded.mjs': 'onnxruntime-web/dist/ort-wasm-simd-threaded.mjs',
  'ort-wasm-simd-threaded.wasm': 'onnxruntime-web/dist/ort-wasm-simd-threaded.wasm',
  'hdf5_hl.js': 'h5wasm/dist/esm/hdf5_hl.js',
  'hdf5_util.js': 'h5wasm/dist/esm/hdf5_util.js',
  'file_handlers.js': 'h5wasm/dist/esm/file_handlers.js',
  'niivue.umd.js': '@niivue/niivue/dist/niivue.umd.js',
  'dicomParser.min.js': 'dicom-parser/dist/dicomParser.min.js',
};

rmSync(target, {recursive: true, force: true});
mkdirSync(target, {recursive: true});
const manifest = {packages: {}, sha256: {}};
for (const [name, source] of Object.entries(files)) {
  // Source maps are not shipped, and browsers would ask for them.
  const isText = /\.m?js$/.test(name);
  let content = readFileSync(new URL(source, modules));
  if (isText) content = Buffer.from(content.toString().replace(/\n\/\/# sourceMappingURL=.*\s*$/, '\n'));
  manifest.sha256[name] = createHash('sha256').update(content).digest('hex');
  writeFileSync(new URL(`${name}.gz`, target), gzipSync(content, {level: 9}));
}

let licences = 'Licences of the libraries in this folder, and of what they contain.\n';
const lock = JSON.parse(readFileSync(new URL('package-lock.json', import.meta.url)));
for (const [path, {version, license, dev}] of Object.entries(lock.packages)) {
  if (!path || dev || path.includes('@types') || path.includes('@rollup')) continue;
  const name = path.replace('node_modules/', '');
  manifest.packages[name] = version;
  const folder = new URL(`${name}/`, modules);
  const own = existsSync(folder) && readdirSync(folder).find((file) => /^licen[cs]e/i.test(file));
  const kept = new URL(`licences/${name.replace('/', '-')}.txt`, import.meta.url);
  const text = own ? readFileSync(new URL(own, folder)) : existsSync(kept) ? readFileSync(kept) : `${license}\n`;
  licences += `\n${'='.repeat(80)}\n${name} ${version} (${license})\n${'='.repeat(80)}\n\n${text}`;
}
writeFileSync(new URL('LICENCES.txt', target), licences);
writeFileSync(new URL('manifest.json', target), JSON.stringify(manifest, null, 2) + '\n');
