// The site's search runs in a worker, which browsers refuse to a page opened from a disk: there an iframe does its work.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => {
        const told = new MessageEvent("message", { data });
        this.dispatchEvent(told);
        this.onmessage?.(told);
      };
      const script = inner.document.createElement("script");
      const ready = new Promise((done) => { script.onload = done; });
      script.src = url;
      inner.document.body.append(script);
      this.postMessage = (data) => ready.then(() => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
