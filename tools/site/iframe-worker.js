// Search of the site opened as a file: browsers start no worker from a file, so the worker's script runs in a hidden frame.
"use strict";
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #ready;

    constructor(url) {
      super();
      const target = new URL(url, location.href);
      if (target.protocol !== "file:") throw new Error(`${target}: only a script of this site can be a worker`);
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow, script = inside.document.createElement("script");
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
      inside.importScripts = (...urls) => Promise.all(urls.map(one => load(inside.document, one)));
      script.src = target;
      this.#ready = new Promise((resolve, reject) => { script.onload = resolve; script.onerror = reject; });
      inside.document.body.append(script);
    }

    async postMessage(data) {
      await this.#ready;
      const inside = this.#frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", {data}));
    }

    terminate() { this.#frame.remove(); }
  };
  const load = (page, url) => new Promise((resolve, reject) => {
    const script = page.createElement("script");
    Object.assign(script, {src: url, onload: resolve, onerror: reject});
    page.body.append(script);
  });
}
