// The dialog that asks a person for name, token or address.

const $ = (id) => document.getElementById(id);

/** Asks name, and token, address or force where wanted; `error` is shown beneath. Gives null when canceled. */
export function ask({ title, text, ok, token = false, force = false, url = false, error = "" }) {
  const dialog = $("ask");
  dialog.querySelector("h3").textContent = title;
  dialog.querySelector("p").textContent = text;
  dialog.querySelector(".error").textContent = error;
  $("ask-ok").textContent = ok;
  $("ask-name").parentElement.hidden = url;
  $("ask-token-line").hidden = !token;
  $("ask-url-line").hidden = !url;
  $("ask-force-line").hidden = !force;
  $("ask-force").checked = false;
  $("ask-name").value = localStorage.getItem("console-name") || "";
  $("ask-token").value = "";
  dialog.show(); // Not modal: the emergency stop stays within reach.
  (url ? $("ask-url") : error ? $("ask-token") : $("ask-name")).focus();
  return new Promise((resolve) => {
    const finish = (answer) => {
      dialog.onclose = dialog.onkeydown = $("ask-ok").onclick = $("ask-cancel").onclick = null;
      if (dialog.open) dialog.close();
      resolve(answer);
    };
    const accept = () => {
      const name = $("ask-name").value.trim();
      if (!url && !name) {
        dialog.querySelector(".error").textContent = "Say who you are.";
        return;
      }
      if (!url) localStorage.setItem("console-name", name);
      finish({ name, token: $("ask-token").value.trim(), url: $("ask-url").value.trim(), force: $("ask-force").checked });
    };
    $("ask-ok").onclick = accept;
    $("ask-cancel").onclick = () => finish(null);
    dialog.onclose = () => finish(null);
    dialog.onkeydown = (event) => {
      if (event.key === "Escape") finish(null);
      if (event.key !== "Enter" || event.target.tagName === "BUTTON") return;
      event.preventDefault();
      accept();
    };
  });
}
