// The page: reacts to what a person chooses, shows pictures and scores, and saves files.
import {renderCard} from './card.js';
import {drawBasis, drawGains} from './learned.js';
import {DeadWorker, Network, Stopped} from './network.js';
import {createMask, middle, prepare, scores, shown, unlikeLines} from './physics.js';
import {readScan} from './readers.js';
import {FileError, MAX_BYTES, MAX_ENLARGED_SIDE} from './files.js';
import {Views} from './views.js';
import {VolumeView} from './volume.js';
import {nifti, save} from './writers.js';

const BANDS = ['lowest', 'low', 'middle', 'high', 'highest'];
const $ = (id) => document.getElementById(id);
const state = {site: null, model: null, scan: null, index: 0, bands: BANDS.map(() => 1), turn: 0, choice: 0};
const network = new Network();
const volumeView = new VolumeView($('volume'), $('volume-canvas'));
const views = new Views(document, () => {
  $('level').value = 1 - views.level;
  $('window').value = 2.05 - views.window;
  $('wipe').value = views.wipe;
});

function say(text, canStop = false) {
  $('status').textContent = text;
  $('status').classList.toggle('busy', text.endsWith(' ..'));
  $('stop').hidden = !canStop;
}

const seconds = (ms) => `${(ms / 1000).toFixed(ms < 9950 ? 1 : 0)} s`;
const duration = (ms) => (ms < 90000 ? seconds(ms) : `${Math.round(ms / 60000)} min`);

function complain(error) {
  if (error instanceof Stopped) return say(error.message);
  const expected = error instanceof FileError || error instanceof DeadWorker;
  $('message').hidden = false;
  $('message').firstElementChild.textContent = error.message || String(error);
  $('restart').hidden = !(error instanceof DeadWorker);
  say('');
  if (!expected) console.error(error);
}

function calm() {
  $('message').hidden = true;
}

/** Run something that a person started, and show the error if it fails. */
async function act(work) {
  calm();
  try {
    await work();
  } catch (error) {
    complain(error);
  }
}

async function fetchFile(path) {
  const answer = await fetch(path).catch(() => ({ok: false, status: 'no answer'}));
  if (!answer.ok) throw new FileError(`${path} cannot be fetched (${answer.status}): is the server still running?`);
  return answer;
}

async function fetchJson(path) {
  return (await fetchFile(path)).json();
}

async function begin() {
  state.site = await fetchJson('site.json');
  $('privacy').textContent = state.site.convert
    ? 'Files stay on this machine: the page talks only to the chasm command that serves it.'
    : 'Files stay in this page: it has no server to send them to.';
  if (state.site.convert) $('formats').textContent += '; with the help of chasm also a file of ISMRMRD, Siemens or compressed DICOM';
  for (const name of state.site.models) $('model').add(new Option(name));
  $('model').value = state.site.models[0];
  await chooseModel();
}

async function chooseModel() {
  const name = $('model').value, folder = `models/${encodeURIComponent(name)}/`;
  const choice = ++state.choice, isLatest = () => choice === state.choice;
  state.turn++;  // what is being computed is of the model before
  say(`Loading ${name} ..`);
  const model = await fetchJson(`${folder}page.json`);
  if (!isLatest()) return;  // another model was chosen meanwhile
  state.model = model;
  const {ms, threads} = await network.load(new URL(folder, location.href).href);
  if (!isLatest()) return;
  state.loaded = `${name} loaded in ${seconds(ms)}, ${threads} thread${threads > 1 ? 's' : ''}`;
  say(`${state.loaded}.`);
  const {task, mixers} = state.model, isScan = task.name === 'reconstruction';
  document.querySelectorAll('.mri').forEach((element) => (element.hidden = !isScan));
  document.querySelectorAll('.photo').forEach((element) => (element.hidden = isScan));
  $('mode').options[0].text = `enlarge × ${task.factor}`;
  $('plain-caption').textContent = isScan ? 'zero-filled' : 'bicubic';
  $('save-png').textContent = isScan ? 'Save this slice (PNG)' : 'Save the picture (PNG)';
  $('left').replaceChildren(new Option(isScan ? 'zero-filled' : 'bicubic', 'plain'), new Option('target', 'target'));
  views.left = 'plain';
  if (isScan) {
    const own = task.acceleration, all = [...new Set([2, 3, 4, 6, 8, 10, 12, own])].sort((a, b) => a - b);
    $('acceleration').replaceChildren(...all.map((a) => new Option(a === own ? `x${a} (trained)` : `x${a}`, a)));
    $('acceleration').value = own;
    $('kind').value = [...$('kind').options].some((o) => o.value === task.kind) ? task.kind : 'equispaced';
  }
  showCard();
  $('learned').hidden = !mixers.length;
  $('slot').replaceChildren(...mixers.map((mixer, i) => new Option(`${mixer.name}: ${mixer.channels} channels`, i)));
  resetBands();
  if (mixers.length) chooseSlot();
  if (state.scan) await reconstruct();
}

function showCard() {
  $('card').replaceChildren(...renderCard(state.model.card));
}

function chooseSlot() {
  const mixer = state.model.mixers[$('slot').value];
  const names = {ch: 'height', cw: 'width'}, before = $('axis').value;
  $('axis').replaceChildren(...Object.keys(mixer.axes).map((axis) => new Option(names[axis] ?? axis, axis)));
  if (mixer.axes[before]) $('axis').value = before;
  drawLearned();
}

function drawLearned() {
  const mixer = state.model?.mixers[$('slot').value];
  if (!mixer) return;
  const {gains, basis} = mixer.axes[$('axis').value];
  drawGains($('gains'), gains, state.bands);
  $('basis').closest('figure').hidden = !basis;
  if (basis) drawBasis($('basis'), basis);
}

/** Ask the chasm command that serves the page to read a file that the page cannot read. */
async function convert(files, error) {
  if (files.length > 1) throw error;
  say(`chasm reads ${files[0].name} ..`);
  const url = `convert?name=${encodeURIComponent(files[0].name)}`;
  const answer = await fetch(url, {method: 'POST', body: files[0]}).catch(() => {
    throw new FileError(`${error.message} The chasm command that serves this page does not answer: is it still running?`);
  });
  const buffer = await answer.arrayBuffer();
  if (!answer.ok) throw new FileError(new TextDecoder().decode(buffer));
  const length = new DataView(buffer).getUint32(0, true);
  const {count, height: H, width: W, complex, note, ...place} = JSON.parse(new TextDecoder().decode(buffer.slice(4, 4 + length)));
  const n = H * W, values = new Float32Array(buffer.slice(4 + length));
  const slice = (i) => {
    const at = i * n * (complex ? 2 : 1);
    const re = values.subarray(at, at + n), im = complex ? values.subarray(at + n, at + 2 * n) : null;
    return {channels: [{re, im}]};
  };
  return {name: files[0].name.replace(/\..*$/, ''), H, W, count, slice, note, ...place};
}

async function open(files) {
  say('Reading ..');
  use(await readScan([...files], state.site.convert ? convert : null));
  $('volume').hidden = true;
  await reconstruct();
}

/** Show the slices of a scan from its middle on. */
function use(scan) {
  state.scan = scan;
  views.setPlace(scan);
  state.result = null;
  $('numbers').replaceChildren();
  const planes = scan.count > 1 ? scan.planes ?? [] : [];
  $('plane-label').hidden = !planes.length;
  $('plane').replaceChildren(...planes.map((plane) => new Option(plane)));
  $('plane').value = scan.plane;
  state.index = Math.floor(scan.count / 2);
  $('slice').max = scan.count - 1;
  $('slice').value = state.index;
  document.querySelectorAll('.many').forEach((element) => (element.hidden = scan.count < 2));
  $('work').hidden = false;
  $('drop').classList.add('compact');
}

/** Cut a NIfTI volume along another plane. */
async function choosePlane() {
  const {scan} = state;
  use({...scan, ...scan.cut($('plane').value), planes: scan.planes});
  await reconstruct();
}

/** Run the network on a slice. onPrepared gets its input, and returns whether the result is wanted. */
async function infer(index, bands, onPrepared = () => true) {
  const {scan, model} = state, isEnlarged = $('mode').value === 'enlarge';
  const sampling = {kind: $('kind').value, acceleration: Number($('acceleration').value), isEnlarged};
  const {task} = model, most = task.name !== 'superres' ? Infinity : Math.floor(MAX_ENLARGED_SIDE / (isEnlarged ? task.factor : 1));
  const {slice, H: h, W: w} = middle(scan.slice(index), scan.H, scan.W, most);
  if (task.name === 'reconstruction' && slice.channels.length > 1) slice.channels = [grey(slice.channels)];
  const [rows, columns] = scan.full ?? [scan.H, scan.W], isCut = h < rows || w < columns;
  const cut = isCut ? `the middle ${h} x ${w} of ${rows} x ${columns} pixels` : '';
  const prepared = {...prepare(slice, h, w, task, sampling), cut}, {input, channels, H, W, mask} = prepared;
  if (!await onPrepared(prepared)) return null;
  const run = async (factors) => {
    const {output, ms} = await network.run({input, channels, H, W, mask, bands: factors});
    return {output, ms, shown: shown(output, model.task)};
  };
  const result = await run(bands);
  const unchanged = bands.some((b) => b !== 1) ? (await run(bands.map(() => 1))).shown : null;
  return {...prepared, ...result, unchanged};
}

const grey = ([r, g, b]) => ({re: r.re.map((v, i) => 0.299 * v + 0.587 * g.re[i] + 0.114 * b.re[i]), im: null});

async function reconstruct() {
  const turn = ++state.turn;
  $('slice-number').textContent = `${state.index + 1} of ${state.scan.count}`;
  say('Reconstructing ..', true);
  if (settings() !== state.drawn) $('volume').hidden = true;  // it was made with other settings
  let showInput = () => {};
  const result = await infer(state.index, state.bands, async ({H, W, mask, target, plain}) => {
    showInput = () => views.show({target, plain}, H, W);
    $('kind').disabled = $('acceleration').disabled = Boolean(mask && !target);  // the scan has its own lines
    if (!state.result) showInput();  // before the first result there is nothing else to show
    await network.free();
    return turn === state.turn;
  }).catch((error) => {
    if (turn === state.turn) {  // the last result is of another slice or mask
      state.result = null;
      $('numbers').replaceChildren();
      $('unlike').hidden = true;
      showInput();
    }
    throw error;
  });
  if (turn !== state.turn) return;  // another slice or mask was chosen meanwhile
  state.result = result;
  const note = [state.scan.note, result.cut].filter(Boolean).join(', '), {H, W, target, plain, shown: output, unchanged} = result;
  views.show({target, plain, output, unchanged}, H, W);
  $('residual-caption').textContent = `what the network added × ${views.factors.residual}`;
  $('changed-caption').textContent = `what the sliders change × ${views.factors.changed}`;
  showNumbers(output, plain, target);
  showUnlike(result.mask);
  const kept = result.mask ? `${result.mask.reduce((a, b) => a + b, 0)} of ${W} columns of k-space · ` : '';
  say(`${state.scan.name} · ${H} x ${W} · ${kept}network ${seconds(result.ms)}${note ? ` · ${note}` : ''} · ${state.loaded}`);
  $('work').dataset.ready = turn;
}

/** Scores of reconstruction and input against the target, or why there are none. */
function showNumbers(output, plain, target) {
  const line = (tag, text) => Object.assign(document.createElement(tag), {textContent: text});
  if (!target) {
    const isPicture = state.model.task.name === 'superres';
    const why = isPicture ? 'the picture itself was enlarged' : 'the scanner measured only a part of k-space';
    $('numbers').replaceChildren(line('span', `No target to compare with: ${why}.`));
    return;
  }
  const [ours, theirs] = [output, plain].map((image) => scores(image, target)), better = ours.psnr - theirs.psnr;
  $('numbers').replaceChildren(
    line('span', 'PSNR, higher is better'), line('b', `${ours.psnr.toFixed(2)} dB`),
    line('span', `${$('plain-caption').textContent} ${theirs.psnr.toFixed(2)} dB (${better < 0 ? '−' : '+'}${Math.abs(better).toFixed(2)})`),
    line('span', `NMSE, lower is better: ${ours.nmse.toFixed(4)}, ${$('plain-caption').textContent} ${theirs.nmse.toFixed(4)}`),
  );
}

/** Say how the lines differ from those that the model was trained on. */
function showUnlike(mask) {
  const found = mask ? unlikeLines(mask, state.model.task) : [];
  $('unlike').hidden = !found.length;
  $('unlike').textContent = `Unlike the training of ${state.model.name}, so expect a worse result: ${found.join(', ')}.`;
}

/** The settings that the pictures of a scan depend on, as text. */
const settings = () => JSON.stringify([$('model').value, $('kind').value, $('acceleration').value, $('plane').value, state.bands]);

/** All slices in the units of the file. */
async function allSlices() {
  const {scan} = state, {count} = scan, slices = [], before = settings(), started = performance.now();
  const starters = [$('save-nifti'), $('volume-button')];
  starters.forEach((button) => (button.disabled = true));
  try {
    for (let i = 0; i < count; i++) {
      const left = i ? `, ${duration((performance.now() - started) / i * (count - i))} left` : '';
      say(`Slice ${i + 1} of ${count}${left} ..`, true);
      const {shown: output, low, scale} = await infer(i, state.bands);
      slices.push(output.map((v) => v * scale + low));
      if (state.scan !== scan || settings() !== before) {
        throw new FileError(`Stopped after ${i + 1} of ${count} slices, because the file or a setting was changed.`);
      }
    }
  } finally {
    starters.forEach((button) => (button.disabled = false));
  }
  say(`${count} slice${count > 1 ? 's' : ''} reconstructed.`);
  return slices;
}

async function volumeFile() {
  const {scan} = state;
  return nifti(await allSlices(), scan.H, scan.W, scan);
}

async function showVolume() {
  if (state.model.task.name !== 'reconstruction') throw new FileError('Only scans have a volume: choose a model for scans.');
  const {scan} = state, drawn = settings(), blob = await volumeFile();
  say('Drawing the volume ..');
  await volumeView.show(blob, `${scan.name}.nii`);
  state.drawn = drawn;
  say(`${scan.count} slices reconstructed.`);
}

// --- events -------------------------------------------------------------------------------------------------------

let timer = 0;
function soon(work, wait = 150) {
  clearTimeout(timer);
  timer = setTimeout(() => act(work), wait);
}

function chooseSlice(index) {
  if (!state.scan) return;
  state.index = Math.min(state.scan.count - 1, Math.max(0, index));
  $('slice').value = state.index;
  soon(reconstruct);
}

$('model').onchange = () => act(chooseModel);
$('kind').onchange = $('acceleration').onchange = $('mode').onchange = () => state.scan && act(reconstruct);
$('plane').onchange = () => act(choosePlane);
$('slice').oninput = () => chooseSlice(Number($('slice').value));
$('level').oninput = () => { views.level = 1 - $('level').value; views.make(); };
$('window').oninput = () => { views.window = 2.05 - $('window').value; views.make(); };
$('wipe').oninput = () => { views.wipe = Number($('wipe').value); views.draw(); };
$('left').onchange = () => { views.left = $('left').value; views.draw(); };
$('smaller').onclick = () => views.setZoom(views.zoom / 1.3);
$('larger').onclick = () => views.setZoom(views.zoom * 1.3);
$('reset').onclick = () => views.reset();
$('slot').onchange = chooseSlot;
$('axis').onchange = drawLearned;
$('stop').onclick = () => network.stop();
$('save-png').onclick = () => act(async () => {
  if (!state.result) throw new FileError('There is no reconstruction of this slice yet.');
  save(await views.png(), `${state.scan.name}-${state.index + 1}.png`);
});
$('save-nifti').onclick = () => act(async () => save(await volumeFile(), `${state.scan.name}-reconstructed.nii`));
$('volume-button').onclick = () => act(showVolume);
$('restart').onclick = () => act(async () => { network.start(); await chooseModel(); });
$('choose').onclick = (event) => { event.stopPropagation(); $('files').click(); };
$('drop').onclick = () => $('files').click();
$('files').onchange = () => { const files = [...$('files').files]; $('files').value = ''; if (files.length) act(() => open(files)); };
$('example').onclick = (event) => {
  event.stopPropagation();
  act(async () => {
    const name = state.model.example, answer = await fetchFile(`models/${encodeURIComponent(state.model.name)}/${name}`);
    await open([new File([await answer.blob()], name)]);
  });
};
$('card-button').onclick = () => {
  $('card').hidden = !$('card').hidden;
  $('card-button').setAttribute('aria-expanded', String(!$('card').hidden));
};
$('keys-button').onclick = () => $('keys').showModal();
$('theme').onclick = () => {
  const root = document.documentElement.dataset, dark = matchMedia('(prefers-color-scheme: dark)').matches;
  root.theme = (root.theme ?? (dark ? 'dark' : 'light')) === 'dark' ? 'light' : 'dark';
  localStorage.setItem('chasm-theme', root.theme);
  drawLearned();
};

for (const [i, name] of BANDS.entries()) {
  const label = document.createElement('label'), input = document.createElement('input'), output = document.createElement('output');
  Object.assign(input, {type: 'range', min: 0, max: 2, step: 0.05, value: 1});
  input.dataset.band = i;
  output.textContent = '× 1';
  label.append(name, input, output);
  input.oninput = () => {
    state.bands[i] = Number(input.value);
    output.textContent = `× ${input.value}`;
    drawLearned();
    if (state.scan) soon(reconstruct, 250);
  };
  $('bands').append(label);
}
const neutral = Object.assign(document.createElement('button'), {type: 'button', textContent: 'Reset the gains'});
neutral.onclick = () => { resetBands(); drawLearned(); if (state.scan) soon(reconstruct); };
$('bands').append(neutral);

function resetBands() {
  state.bands.fill(1);
  for (const input of $('bands').querySelectorAll('input')) {
    input.value = 1;
    input.nextElementSibling.textContent = '× 1';
  }
}

for (const type of ['dragenter', 'dragover']) addEventListener(type, (event) => { event.preventDefault(); $('drop').classList.add('over'); });
addEventListener('dragleave', (event) => { if (!event.relatedTarget) $('drop').classList.remove('over'); });
addEventListener('drop', (event) => {
  event.preventDefault();
  $('drop').classList.remove('over');
  act(async () => open(await dropped(event.dataTransfer)));
});

/** The files that were dropped, those of a folder too. */
async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean), plain = [...transfer.files];
  const files = [];
  for (const entry of entries) {
    if (entry.isFile) continue;
    const reader = entry.createReader();
    for (let batch; (batch = await new Promise((done, fail) => reader.readEntries(done, fail))).length;) {
      for (const inner of batch) if (inner.isFile) files.push(await new Promise((done, fail) => inner.file(done, fail)));
    }
  }
  return files.length ? files : plain;
}

addEventListener('keydown', (event) => {
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey || $('keys').open) return;
  const wipe = (by) => { views.wipe = Math.min(1, Math.max(0, views.wipe + by)); $('wipe').value = views.wipe; views.draw(); };
  const keys = {
    ArrowLeft: () => chooseSlice(state.index - 1), ArrowRight: () => chooseSlice(state.index + 1),
    '+': () => views.setZoom(views.zoom * 1.3), '=': () => views.setZoom(views.zoom * 1.3), '-': () => views.setZoom(views.zoom / 1.3),
    0: () => views.reset(), '[': () => wipe(-0.05), ']': () => wipe(0.05), o: () => $('files').click(), s: () => state.scan && $('save-png').click(),
  };
  if (keys[event.key]) {
    event.preventDefault();
    keys[event.key]();
  }
});
addEventListener('resize', drawLearned);
addEventListener('unhandledrejection', ({reason}) => complain(reason));

// Tests in a browser read the numbers behind the pictures from here.
globalThis.chasm = {state, network, views, volumeView, createMask, MAX_BYTES};

act(begin);
