// The worker that runs the network. A worker that dies or does not answer is said, and can be started again.

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
    this.worker.onmessageerror = () => this.fail('The network answered with something unreadable.');
  }

  /** Nothing is expected of this worker any more; a new one must be started. */
  fail(text) {
    this.dead = text;
    for (const {reject} of [...this.waiting.values()]) reject(new DeadWorker(text));
  }

  ask(kind, value) {
    if (this.dead) return Promise.reject(new DeadWorker(this.dead));
    const id = this.next++;
    return new Promise((resolve, reject) => {
      const told = `The network has not answered for ${TIMEOUTS[kind] / 1000} seconds.`;
      const timer = setTimeout(() => this.fail(told), TIMEOUTS[kind]);
      const settle = (act) => (result) => {
        clearTimeout(timer);
        this.waiting.delete(id);
        act(result);
      };
      this.waiting.set(id, {resolve: settle(resolve), reject: settle(reject)});
      this.worker.postMessage({id, [kind]: value});
    });
  }

  load(url) {
    return this.ask('load', url);
  }

  run(values) {
    return this.ask('run', values);
  }
}

export class DeadWorker extends Error {}

function explain(error) {
  if (/memory|bad_alloc|allocat/i.test(error)) return 'Memory does not suffice for an image of this size in a browser.';
  return `The network failed: ${error}`;
}
