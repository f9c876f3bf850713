// A browser starts no worker from a folder (file:), and the search box needs one. There a hidden frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.queue = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      this.frame.answer = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.frame.onload = () => {
        this.ready = true;
        this.queue.splice(0).forEach(data => this.postMessage(data));
      };
      this.frame.srcdoc = `<script>window.postMessage = data => frameElement.answer(data)<\/script><script src="${url}"><\/script>`;
      document.body.append(this.frame);
    }

    postMessage(data) {
      if (!this.ready) this.queue.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
