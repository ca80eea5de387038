// Drives the page in a headless Chromium. Usage: node page.mjs ADDRESS FOLDER SCENARIO.json; prints JSON.
// A step is {drop: [files]}, {upload: file}, {set: [selector, value]}, {click: selector}, {press: key}, {kill: "at work" or "idle"},
// {save: selector} (a click that downloads), {reopen: true} (the tab is closed at once, and another one opened), {theme: "dark"},
// {wait: ms}, {size: [w, h]}, {touch: true}, {shot: name}, {read: expression}. After a drop or a change the page is waited for.
import {createRequire} from 'node:module';
import {existsSync, readFileSync} from 'node:fs';

const require = createRequire(new URL('../../web/package.json', import.meta.url));
const puppeteer = (await import(require.resolve('puppeteer-core'))).default;
const [address, folder, scenario] = process.argv.slice(2);

const browser = await puppeteer.launch({
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
  args: ['--no-sandbox', '--disable-dev-shm-usage', '--enable-unsafe-swiftshader', '--use-angle=swiftshader'],
  protocolTimeout: 300000,
});
const report = {read: {}, thrown: [], logged: [], requests: []};
try {
  let page;
  const open = async () => {
    page = await browser.newPage();
    page.on('pageerror', (error) => report.thrown.push(String(error)));
    page.on('console', (message) => message.type() === 'error' && report.logged.push(message.text()));
    page.on('request', (request) => report.requests.push(`${request.method()} ${request.url()}`));
    const session = await page.createCDPSession();
    await session.send('Browser.setDownloadBehavior', {behavior: 'allow', downloadPath: folder});
    await page.setViewport({width: 1280, height: 900});
    await page.goto(address);
  };
  await open();
  // Settled: nothing is being read or computed, and either a picture or a message is there.
  const settled = () => page.waitForFunction(
    () => !/\.\.$/.test(document.getElementById('status').textContent) && document.getElementById('model').value, {timeout: 240000, polling: 100});
  await settled();
  for (const step of JSON.parse(readFileSync(scenario))) {
    if (step.drop) {
      const files = step.drop.map((file) => ({name: file.split('/').at(-1), data: readFileSync(file).toString('base64')}));
      await page.evaluate((files) => {
        const transfer = new DataTransfer();
        for (const {name, data} of files) transfer.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name));
        document.getElementById('drop').dispatchEvent(new DragEvent('drop', {dataTransfer: transfer, bubbles: true, cancelable: true}));
      }, files);
    }
    if (step.upload) await (await page.$('#files')).uploadFile(step.upload);  // from the disk: it may be large
    if (step.set) {
      await page.$eval(step.set[0], (element, value) => {
        element.value = value;
        element.dispatchEvent(new Event('input', {bubbles: true}));
        element.dispatchEvent(new Event('change', {bubbles: true}));
      }, step.set[1]);
    }
    if (step.click) await page.$eval(step.click, (element) => element.click());
    if (step.press) await page.keyboard.press(step.press);
    if (step.save) {
      await page.$eval(step.save, (element) => element.click());
      for (let i = 0; i < 600 && !existsSync(`${folder}/${step.as}`); i++) await new Promise((done) => setTimeout(done, 100));
    }
    if (step.reopen) {
      await page.close();
      await open();
    }
    if (step.theme) await page.emulateMediaFeatures([{name: 'prefers-color-scheme', value: step.theme}]);
    if (step.kill) {  // as a browser that lacks memory does
      await page.evaluate((when) => {
        if (when === 'at work') document.getElementById('kind').dispatchEvent(new Event('change'));
        chasm.network.worker.terminate();
        chasm.network.worker.onerror({message: 'killed by the test'});
      }, step.kill);
    }
    if (step.size) await page.setViewport({width: step.size[0], height: step.size[1], hasTouch: Boolean(step.touch), isMobile: Boolean(step.touch)});
    await new Promise((done) => setTimeout(done, step.wait ?? 500));
    if (!step.hanging) await settled();
    if (step.shot) await page.screenshot({path: `${folder}/${step.shot}.png`, fullPage: true});
    if (step.read) report.read[step.as ?? step.read] = await page.evaluate(step.read);
  }
} finally {
  await browser.close();
}
console.log(JSON.stringify(report));
