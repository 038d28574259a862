// One robot as a page shows it: what is seen of it, what a person asks of it. Its own process has the last word on both.

import { ask } from "./dialog.js";
import { buildBars, drawScore, element, setBars } from "./charts.js";
import { TeleopDevices } from "./teleop_devices.js";

const BUTTONS = [
  ["start", "Start", "Enter"], ["hold", "Hold", "H"], ["resume", "Resume", "Enter"], ["take_over", "Take over", "T"],
  ["rewind", "Rewind", "B"], ["recovery_done", "Recovery done", "1"], ["correction_done", "Correction done", "2"],
  ["success", "Success", "Y"], ["failure", "Failure", "N"], ["demonstrate", "Demonstrate", "G"], ["new_scene", "New scene", "X"],
  ["better", "Better", "3"], ["worse", "Worse", "4"], ["reset", "Reset", "R"],
];
const KEYS = {
  KeyH: ["hold"], KeyT: ["take_over"], KeyB: ["rewind"], Digit1: ["recovery_done"], Digit2: ["correction_done"],
  KeyG: ["demonstrate"], KeyY: ["success"], KeyN: ["failure"], Enter: ["start", "resume"], KeyR: ["reset"],
  KeyX: ["new_scene"], Digit3: ["better"], Digit4: ["worse"],
};
const NEXT = { // the button that usually comes next
  idle: "start", autonomous: "take_over", paused: "take_over", rewinding: "take_over", recovery: "recovery_done",
  correction: "correction_done", demo: "success", ended: "start",
};
const GUIDE = {
  idle: "Ready. Start lets the policy drive.",
  autonomous: "The policy drives. Take over when it is about to fail.",
  paused: "The robot holds. Take over, rewind, or let the policy resume.",
  rewinding: "The robot drives back along its path. Hold ends that.",
  recovery: "You drive. Bring the robot back to where the policy knows its way, then press Recovery done.",
  correction: "You drive. Complete this part of the task, then press Correction done: the episode ends.",
  demo: "You drive a whole episode by hand. Then press Success or Failure.",
  ended: "The episode has ended.",
};
export const ALIVE_EVERY = 200, RETRY_AFTER = 1000, STALE_AFTER = 1500;
const $ = (id) => document.getElementById(id);

export class Tile {
  /** `page`: what the tile stands in, `{ tiles, select, remove }`. */
  constructor(address, page) {
    this.address = address;
    this.page = page;
    this.root = $("tile").content.firstElementChild.cloneNode(true);
    this.part = (selector) => this.root.querySelector(selector);
    this.hands = new TeleopDevices();
    this.status = null;
    this.hello = null;
    this.scores = [];
    this.pictures = new Map();
    this.heard = 0;
    this.buildButtons();
    this.part(".estop").addEventListener("click", () => this.stop());
    this.part(".control").addEventListener("click", () => this.control());
    this.part(".remove").addEventListener("click", () => page.remove(this));
    this.root.addEventListener("pointerdown", () => page.select(this), true);
    const speed = this.part(".speed input");
    speed.addEventListener("input", () => { this.part(".speed output").textContent = `${speed.value} %`; });
    const sizes = new ResizeObserver(() => { // of what sticks to the top: the cameras below the head
      for (const name of ["head", "cameras"]) this.root.style.setProperty(`--${name}`, `${this.part(`.${name}`).offsetHeight}px`);
    });
    for (const name of [".head", ".cameras"]) sizes.observe(this.part(name));
    this.connect();
    this.alive = setInterval(() => this.sayAlive(), ALIVE_EVERY);
  }

  buildButtons() {
    this.buttons = new Map();
    for (const [name, label, key] of BUTTONS) {
      const button = element("button", "", label);
      button.type = "button";
      button.dataset.button = name;
      button.disabled = true;
      button.append(element("kbd", "", key));
      button.addEventListener("click", () => this.press(name));
      this.buttons.set(name, button);
      this.part(".buttons").append(button);
    }
  }

  // --- the socket ---

  connect() {
    if (this.closed) return;
    const url = new URL("/socket", this.address);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(url);
    socket.binaryType = "arraybuffer";
    socket.onmessage = (event) => {
      this.heard = performance.now();
      if (typeof event.data === "string") this.take(JSON.parse(event.data));
      else this.showPicture(new Uint8Array(event.data));
    };
    this.statuses = this.numPictures = 0;
    socket.onclose = (event) => {
      this.status = null;
      this.hands.releaseAll();
      if ([1008, 1013].includes(event.code)) this.log(`The robot closed the connection: ${event.reason}`, "refused");
      this.paint();
      if (!this.closed) setTimeout(() => this.connect(), RETRY_AFTER);
    };
    this.socket = socket;
  }

  send(message) {
    if (this.socket.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  sayAlive() {
    if (performance.now() - this.heard > STALE_AFTER) this.paint();
    if (!document.hidden) this.send({ type: "alive", sent: performance.now() / 1000 });
  }

  take(message) {
    if (message.type === "hello") this.begin(message);
    else if (message.type === "status") this.show(message);
  }

  begin(hello) {
    const isNew = !this.hello;
    this.hello = hello;
    this.scores = [];
    this.part(".name").textContent = hello.robot + (hello.dry_run ? " (dry run)" : "");
    document.title = this.page.tiles.length > 1 ? "Robot console" : `${hello.robot} – console`;
    this.commandBars = buildBars(this.part(".bars.command"), hello.command);
    this.stateBars = buildBars(this.part(".bars.state"), hello.state);
    if (isNew) this.hands.build(this.part(".pads"), hello.moves);
    clearInterval(this.driving);
    this.driving = setInterval(() => this.drive(), 1000 / hello.drive_rate);
    if (this.wanted) this.send(this.wanted); // Control comes back after a short loss, if it is still free.
  }

  // --- asking ---

  /** Over the socket; without one that answers (all places taken, a line that stands) by a request of its own too. */
  async stop() {
    this.hands.releaseAll();
    if (this.send({ type: "stop" }) && !this.isLost()) return;
    try {
      const answer = await fetch(new URL("/stop", this.address), { method: "POST", signal: AbortSignal.timeout(2000) });
      this.log(`E-stop: ${await answer.text()}`, answer.ok ? "" : "refused");
    } catch {
      this.log("No connection: use the robot's own emergency stop.", "refused");
    }
  }

  isLost() {
    return !this.status || performance.now() - this.heard > STALE_AFTER;
  }

  press(name) {
    if (name === "reset") return this.reset();
    this.hands.releaseAll();
    if (["start", "take_over", "demonstrate"].includes(name)) this.hands.forget();
    return this.send({ type: "press", button: name, sent: performance.now() / 1000 });
  }

  async reset() {
    const answer = await ask({
      title: "Reset after a stop",
      text: "The robot may move again. Look that nobody is near it. Your name goes into the log.",
      ok: "Reset",
    });
    if (answer) this.send({ type: "reset", name: answer.name, sent: performance.now() / 1000 });
  }

  /** `error`: why the last try was refused. */
  async control(error = "") {
    if (this.status && this.status.in_control) {
      this.wanted = null;
      this.send({ type: "release_control" });
      return;
    }
    const holder = this.status && this.status.controller;
    const answer = await ask({
      title: "Take control",
      text: holder ? `${holder} has control now.` : "One console at a time can control the robot.",
      ok: "Take control",
      token: this.hello && this.hello.token_needed,
      force: Boolean(holder) && this.hello.token_needed,
      error,
    });
    if (!answer) return;
    this.send({ type: "take_control", name: answer.name, token: answer.token, force: answer.force });
    this.wanted = { type: "take_control", name: answer.name, token: answer.token, force: false };
  }

  drives() {
    const status = this.status;
    return Boolean(status && status.in_control && ["recovery", "correction", "demo"].includes(status.phase));
  }

  drive() {
    if (!this.drives()) return;
    const { axes, gripper, held } = this.hands.read(
      Number(this.part(".speed input").value) / 100, this.page.selected === this,
    );
    const label = this.part(".drive-state");
    label.textContent = held ? "moving" : "holding: nothing is pressed";
    label.classList.toggle("live", held);
    if (held || this.wasHeld) this.send({ type: "drive", axes, gripper, held, sent: performance.now() / 1000 });
    this.wasHeld = held;
  }

  // --- showing ---

  show(status) {
    const now = performance.now() / 1000;
    this.status = status;
    this.statuses += 1;
    this.send({ type: "seen", statuses: this.statuses, pictures: this.numPictures });
    for (const [age, value, limit] of status.scores) this.scores.push([now - age, value, limit]);
    while (this.scores.length && now - this.scores[0][0] > 90) this.scores.shift();
    for (const [time, text] of status.notices) this.log(text, "", time);
    for (const text of status.refused) this.refuse(text);
    if (status.echo) this.roundTrip = performance.now() - 1000 * (status.echo[0] + status.echo[1]);
    if (!this.wanted && status.in_control === false) this.wasHeld = false;
    this.paint();
  }

  paint() {
    const status = this.status, lost = this.isLost();
    const mode = lost ? "no connection" : status.loop_alive ? status.mode : "loop stands";
    const pill = this.part(".mode");
    pill.textContent = { running: "Running", holding: "Holding", stopped: "Stopped" }[mode] || mode;
    pill.className = `pill mode ${mode === "loop stands" ? "stopped" : mode}`;
    this.part(".reason").textContent = lost ? "" : status.reason;
    const control = this.part(".control");
    control.disabled = lost;
    control.textContent = !lost && status.in_control ? "Release control" : "Take control";
    control.classList.toggle("primary", !lost && !status.in_control && !status.controller);
    this.part(".holder").textContent = lost ? "" : holderText(status);
    for (const li of this.root.querySelectorAll(".phases li"))
      li.classList.toggle("now", !lost && li.dataset.phase === status.phase);
    this.part(".task").textContent = lost || !status.instruction ? "" : `Task: ${status.instruction}`;
    this.paintGuide(lost);
    for (const [name, button] of this.buttons) {
      const possible = name === "reset" ? !lost && status.mode === "stopped" : !lost && status.can.includes(name);
      const isStopped = name === "resume" && !lost && status.mode === "stopped";
      button.disabled = !possible || !status.in_control || isStopped;
      if (name === "resume") button.title = isStopped ? `Stopped: ${status.reason}. Reset it first.` : "";
      const first = !lost && (status.mode === "stopped" ? "reset" : status.outcome ? "start" : NEXT[status.phase]);
      button.classList.toggle("primary", !button.disabled && name === first);
    }
    this.buttons.get("reset").hidden = lost || status.mode !== "stopped";
    this.buttons.get("new_scene").hidden = !(this.hello && this.hello.has_scene);
    for (const name of ["better", "worse"]) this.buttons.get(name).hidden = lost || !status.can.includes(name);
    this.buttons.get("resume").hidden = lost || !status.can.includes("resume");
    this.buttons.get("hold").hidden = !this.buttons.get("resume").hidden;
    this.showPads(!this.part(".drive").hidden);
    this.part(".cameras").querySelectorAll("figure").forEach((f) => f.classList.toggle("stale", lost || isOld(status)));
    if (!lost) this.paintNumbers(status);
  }

  /** While the person drives; in one column they come into sight below the cameras, wherever the page was scrolled to. */
  showPads(wereThere) {
    const pads = this.part(".drive");
    pads.hidden = !this.drives();
    if (!pads.hidden && !wereThere && getComputedStyle(this.part(".cameras")).position === "sticky") pads.scrollIntoView();
  }

  paintGuide(lost) {
    const guide = this.part(".guide"), status = this.status;
    guide.classList.toggle("bad", lost || status.mode === "stopped");
    if (lost) guide.textContent = "Not connected: the robot is gone, or too many watch. This page tries again; E-stop is tried all the same.";
    else if (status.mode === "stopped") guide.textContent = `Stopped: ${status.reason}. Reset it when it is safe.`;
    else if (status.phase === "ended") {
      const label = status.outcome ? `as a ${status.outcome}` : "without a label: press Success or Failure";
      const compare = status.can.includes("better") ? "Better or Worse compares it with the one before it. " : "";
      guide.textContent = `The episode has ended ${label}. ${compare}Start begins the next one.`;
    } else guide.textContent = GUIDE[status.phase] + (status.in_control ? "" : " This console only watches.");
  }

  paintNumbers(status) {
    setBars(this.commandBars, status.sent || [], status.requested || []);
    setBars(this.stateBars, status.state || []);
    const source = this.part(".source");
    source.textContent = `${status.source || "none"}${status.limited && status.limited.length ? ", limited: " + status.limited.join(", ") : ""}`;
    source.className = `source ${status.source}`;
    this.part(".scores").hidden = !this.scores.length && !(this.hello && this.hello.detector);
    drawScore(this.part(".chart"), this.scores, performance.now() / 1000);
    const rate = this.hello ? this.hello.rate : 0;
    const rows = [
      ["Loop", `${fixed(status.loop_hz)} of ${rate} Hz`, status.loop_hz < 0.7 * rate && status.phase !== "idle" && status.phase !== "ended"],
      ["Tick", `${fixed(status.latency_ms)} ms`],
      ["Late", `${fixed(status.late_ms)} ms`],
      ["Observation", status.observation_ms === null || status.observation_ms === undefined ? "none" : `${status.observation_ms} ms old`, isOld(status)],
      ["Link", this.roundTrip === undefined ? "–" : `${Math.round(this.roundTrip)} ms`, this.roundTrip > 300],
      ["Step", String(status.step ?? "–")],
      ["Interventions", String(status.interventions)],
      ["Recoveries", String(status.recoveries)],
      ["Alarms", String(status.alarms)],
    ];
    this.part(".stats").replaceChildren(...rows.map(([name, value, bad]) => {
      const row = element("div", bad ? "bad" : "");
      row.append(element("dt", "", name), element("dd", "", value));
      return row;
    }));
  }

  showPicture(data) {
    this.numPictures += 1;
    const length = data[0], name = new TextDecoder().decode(data.subarray(1, 1 + length));
    let picture = this.pictures.get(name);
    if (!picture) {
      const figure = element("figure");
      picture = { img: element("img"), url: "" };
      picture.img.alt = `camera ${name}`;
      figure.append(picture.img, element("figcaption", "", name));
      if (!this.pictures.size) this.part(".cameras").replaceChildren();
      this.part(".cameras").append(figure);
      this.pictures.set(name, picture);
    }
    const old = picture.url;
    picture.url = URL.createObjectURL(new Blob([data.subarray(1 + length)], { type: "image/jpeg" }));
    picture.img.src = picture.url;
    if (old) URL.revokeObjectURL(old);
  }

  refuse(text) {
    if (/token|has control/.test(text)) this.wanted = null;
    this.log(text, "refused");
    if (text.startsWith("wrong token")) this.control(text);
  }

  log(text, className = "", time = Date.now() / 1000) {
    const line = element("li", className);
    line.append(element("time", "", new Date(1000 * time).toLocaleTimeString()), text);
    const list = this.part(".log ol");
    list.prepend(line);
    while (list.children.length > 60) list.lastChild.remove();
  }

  close() {
    this.closed = true;
    clearInterval(this.alive);
    clearInterval(this.driving);
    this.socket.close();
    this.root.remove();
  }
}

const fixed = (value) => (value === undefined ? "–" : value.toFixed(1));
const isOld = (status) => !(status.observation_ms < 500);

function holderText(status) {
  const others = status.num_consoles - 1;
  const watchers = others > 0 ? `, ${others} other console${others > 1 ? "s" : ""}` : "";
  if (status.in_control) return `You have control${watchers}`;
  return `${status.controller ? status.controller + " has control" : "Nobody has control"}${watchers}`;
}

// --- keys ---

/** Keys go to the selected robot. */
export function listenToKeys(page) {
  document.addEventListener("keydown", (event) => {
    const { selected } = page;
    if (!selected || event.ctrlKey || event.metaKey || event.altKey) return;
    const isTyping = event.target instanceof HTMLInputElement && event.target.type !== "range";
    if (event.code === "Space" && !isTyping) {
      event.preventDefault(); // else it would also press the button that has the focus
      if (!event.repeat) selected.stop();
      return;
    }
    if (event.repeat || isTyping || document.querySelector("dialog[open]")) return;
    if (event.code === "Enter" && event.target instanceof HTMLButtonElement) event.target.blur();
    if (selected.drives() && selected.hands.down(event.code)) {
      event.preventDefault();
      return;
    }
    const name = (KEYS[event.code] || []).find((n) => !selected.buttons.get(n).disabled);
    if (name) {
      event.preventDefault();
      selected.press(name);
    }
  });
  document.addEventListener("keyup", (event) => {
    page.tiles.forEach((tile) => tile.hands.up(event.code));
    if (event.code === "Space" && event.target instanceof HTMLButtonElement) event.preventDefault();
  });
}
