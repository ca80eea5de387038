// The network, away from the page: onnxruntime-web in a worker. Messages: {id, load: url} and {id, run: {...}}.
import * as ort from './vendor/ort.wasm.min.mjs';

ort.env.wasm.wasmPaths = new URL('./vendor/', import.meta.url).href;
ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency || 1) : 1;
let session = null;

async function load(url) {
  const started = performance.now();
  await session?.release();
  session = null;
  const [graph, weights] = await Promise.all(['model.onnx', 'model.bin'].map((name) => fetchBytes(new URL(name, url))));
  const externalData = [{path: 'model.bin', data: weights}];
  session = await ort.InferenceSession.create(graph, {executionProviders: ['wasm'], externalData});
  return {ms: performance.now() - started, threads: ort.env.wasm.numThreads};
}

async function fetchBytes(url) {
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`the model cannot be fetched (${answer.status})`);
  return new Uint8Array(await answer.arrayBuffer());
}

async function run({input, channels, H, W, mask, bands}) {
  const tensor = (values, shape) => new ort.Tensor('float32', values, shape);
  const every = {
    x: () => tensor(input, [1, channels, H, W]),
    mask: () => tensor(Float32Array.from(mask), [1, 1, 1, W]),
    bands: () => tensor(Float32Array.from(bands), [bands.length]),
  };
  const started = performance.now();
  const results = await session.run(Object.fromEntries(session.inputNames.map((name) => [name, every[name]()])));
  const output = results[session.outputNames[0]];
  return {output: output.data, ms: performance.now() - started};
}

let queue = Promise.resolve();
addEventListener('message', ({data}) => {
  queue = queue.then(async () => {
    try {
      const result = data.load ? await load(data.load) : await run(data.run);
      postMessage({id: data.id, result}, result.output ? [result.output.buffer] : []);
    } catch (error) {
      postMessage({id: data.id, error: String(error.message ?? error)});
    }
  });
});
