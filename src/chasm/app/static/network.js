// The worker that runs the network. It can be stopped and started again, and the page says so if it dies or does not answer.

const TIMEOUTS = {load: 120000, run: 300000};  // milliseconds: a phone may take a minute for a large slice

export class Network {
  constructor() {
    this.waiting = new Map();
    this.next = 1;
    this.start();
  }

  start() {
    this.worker?.terminate();
    this.dead = '';
    this.worker = new Worker(new URL('./worker.js', import.meta.url), {type: 'module'});
    this.worker.onmessage = ({data}) => {
      const {resolve, reject} = this.waiting.get(data.id) ?? {};
      if (!resolve) return;
      if (!data.error) resolve(data.result);
      else if (/abort|unreachable|memory|bad_alloc|allocat/i.test(data.error)) this.fail(explain(data.error));
      else reject(new Error(explain(data.error)));
    };
    this.worker.onerror = (event) => {
      event.preventDefault?.();
      this.fail(`The part of the page that runs the network stopped (${event.message || 'no reason given'}).`);
    };
    this.worker.onmessageerror = () => this.fail('The answer of the network cannot be read.');
  }

  /** Give up on this worker: reject everything that waits for it. The person must start a new one. */
  fail(text) {
    this.dead = text;
    for (const {reject} of [...this.waiting.values()]) reject(new DeadWorker(text));
  }

  /** Stop the computation. Only ending the worker stops it, so a new worker loads the network again. */
  stop() {
    for (const {reject} of [...this.waiting.values()]) reject(new Stopped('Stopped.'));
    this.start();
    this.load(this.url).catch(({message}) => this.fail(message));
  }

  /** Wait until all requests so far are answered. A stop ends the wait as well. */
  async free() {
    const {worker} = this;
    await Promise.allSettled([this.last]);
    if (worker !== this.worker) throw new Stopped('Stopped.');
  }

  ask(kind, value) {
    if (this.dead) return Promise.reject(new DeadWorker(this.dead));
    const id = this.next++;
    this.last = new Promise((resolve, reject) => {
      const silence = `The network has not answered for ${TIMEOUTS[kind] / 1000} seconds.`;
      const timer = setTimeout(() => this.fail(silence), TIMEOUTS[kind]);
      const settle = (act) => (result) => {
        clearTimeout(timer);
        this.waiting.delete(id);
        act(result);
      };
      this.waiting.set(id, {resolve: settle(resolve), reject: settle(reject)});
      this.worker.postMessage({id, [kind]: value});
    });
    return this.last;
  }

  load(url) {
    this.url = url;
    return this.ask('load', url);
  }

  run(values) {
    return this.ask('run', values);
  }
}

export class DeadWorker extends Error {}
export class Stopped extends Error {}

function explain(error) {
  if (/memory|bad_alloc|allocat/i.test(error)) return 'A browser does not have enough memory for an image of this size.';
  return `The network failed: ${error}`;
}
