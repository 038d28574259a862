// The hub's page: all robots with who asks for help, in the order in which they are helped, and the one that is looked at.

import { ask } from "./dialog.js";
import { element, short } from "./charts.js";
import { ALIVE_EVERY, listenToKeys, RETRY_AFTER, STALE_AFTER, Tile } from "./tile.js";

const $ = (id) => document.getElementById(id);
const STATES = { lost: "No connection", stopped: "Stopped", asks: "Asks for help", helped: "You are here", running: "Running", ready: "Ready" };

/** A robot's tile whose messages come and go over the hub's socket. */
class HubTile extends Tile {
  connect() {} // The hub has the line to the robot.

  get name() { return this.address.name; }

  send(message) {
    if (["alive", "seen"].includes(message.type)) return true; // The hub page says these for all.
    return this.address.hub.send({ ...message, robot: this.name });
  }

  sayAlive() {
    if (this.isLost()) this.paint();
  }

  async stop() {
    this.hands.releaseAll();
    if (!this.send({ type: "stop" }) || this.isLost()) this.address.hub.stopAll();
  }

  control() {
    this.address.hub.visit(this.name);
  }

  refuse(text) { // of the hub's line to the robot: no person here can mend it
    this.log(text, "refused");
  }

  paint() {
    super.paint();
    const { hub } = this.address, control = this.part(".control"), here = hub.helping === this.name;
    control.disabled = !hub.inControl;
    control.textContent = here ? "Hand back" : "Go to this robot";
    control.classList.toggle("primary", hub.inControl && !here);
    if (hub.holds(this.name) && !this.isLost())
      for (const name of ["start", "hold"]) this.buttons.get(name).disabled = !this.status.can.includes(name);
  }

  close() {
    this.socket = { close() {} };
    super.close();
  }
}

class HubPage {
  constructor() {
    this.tiles = [];
    this.selected = null;
    this.overview = null;
    this.heard = this.hubs = this.numPictures = 0;
    this.list = element("div", "panel hub-list");
    this.log = element("ol");
    this.controlButton = element("button", "primary", "Take control");
    this.nextButton = element("button", "", "Next");
    this.build();
    this.connect();
    setInterval(() => this.sayAlive(), ALIVE_EVERY);
  }

  build() {
    document.title = "Robots";
    document.querySelector("h1").textContent = "Robots";
    $("add").hidden = true;
    $("stop-all").hidden = false;
    $("stop-all").onclick = () => this.stopAll();
    this.controlButton.id = "hub-control";
    this.nextButton.id = "hub-next";
    for (const button of [this.controlButton, this.nextButton]) button.type = "button";
    this.controlButton.onclick = () => this.control();
    this.nextButton.onclick = () => this.next();
    const log = element("div", "panel log");
    log.append(element("h3", "", "Log"), this.log);
    const aside = element("aside", "hub");
    const row = element("div", "row");
    row.append(this.controlButton, this.nextButton);
    aside.append(row, this.list, log);
    $("tiles").before(aside);
    document.body.classList.add("with-hub");
  }

  get inControl() { return Boolean(this.overview && this.overview.in_control); }

  get helping() { return this.overview ? this.overview.helping : null; }

  /** The hub has control of that robot, and this page of the hub. */
  holds(name) { return this.inControl && this.overview.robots.some((robot) => robot.name === name && robot.ours); }

  isLost() { return !this.overview || performance.now() - this.heard > STALE_AFTER; }

  // --- the socket ---

  connect() {
    const url = new URL("/socket", location.origin);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(url);
    socket.binaryType = "arraybuffer";
    this.hubs = this.numPictures = 0;
    this.greeted = null; // the robot whose hello came last: what follows is of it
    socket.onopen = () => {
      if (this.selected) this.send({ type: "watch", robot: this.selected.name });
    };
    socket.onmessage = (event) => {
      this.heard = performance.now();
      if (typeof event.data === "string") this.take(JSON.parse(event.data));
      else this.picture(new Uint8Array(event.data));
    };
    socket.onclose = (event) => {
      this.overview = null;
      if (event.code === 1008 || event.code === 1013) this.say(`The hub closed the connection: ${event.reason}`);
      if (this.selected) this.selected.hands.releaseAll();
      this.paint();
      setTimeout(() => this.connect(), RETRY_AFTER);
    };
    this.socket = socket;
  }

  send(message) {
    if (this.socket.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  sayAlive() {
    if (this.isLost()) this.paint();
    if (!document.hidden) this.send({ type: "alive", sent: performance.now() / 1000 });
  }

  take(message) {
    if (message.type === "hub") {
      this.hubs += 1;
      this.send({ type: "seen", statuses: this.hubs, pictures: this.numPictures });
      this.overview = message;
      if (message.echo && this.selected)
        this.selected.roundTrip = performance.now() - 1000 * (message.echo[0] + message.echo[1]);
      for (const text of message.refused) this.refuse(text);
      if (!this.selected && message.robots.length) this.look(message.robots[0].name);
      if (message.helping && message.in_control && this.selected.name !== message.helping) this.look(message.helping);
      if (this.wanted && !message.in_control && !message.person) this.send(this.wanted);
      this.paint();
    } else if (message.type === "hello") {
      this.greeted = message.robot;
      if (this.isOfSelected()) this.selected.begin(message);
    } else if (message.type === "status" && this.isOfSelected()) {
      this.selected.heard = performance.now();
      this.selected.show(message);
    }
  }

  picture(data) {
    this.numPictures += 1;
    if (this.isOfSelected()) this.selected.showPicture(data);
  }

  /** What comes now is of the robot that is looked at, and not of the one before: that may still be on its way. */
  isOfSelected() { return Boolean(this.selected) && this.greeted === this.selected.name; }

  // --- asking ---

  /** `error`: why the last try was refused. */
  async control(error = "") {
    if (this.inControl) {
      this.wanted = null;
      this.send({ type: "release_control" });
      return;
    }
    const { person, token_needed: token } = this.overview || {};
    const answer = await ask({
      title: "Take control", text: person ? `${person} has control now.` : "One person at a time stands by the robots.",
      ok: "Take control", token, force: Boolean(person) && token, error,
    });
    if (!answer) return;
    this.wanted = { type: "take_control", name: answer.name, token: answer.token, force: false };
    this.send({ ...this.wanted, force: answer.force });
  }

  visit(name) {
    if (this.helping) this.send({ type: "hand_back" });
    if (this.helping !== name) this.send({ type: "help", robot: name });
  }

  next() {
    if (this.helping) this.send({ type: "hand_back" });
    if (this.overview.queue.length) this.send({ type: "help" });
  }

  async stopAll() {
    if (this.selected) this.selected.hands.releaseAll();
    if (this.send({ type: "stop" }) && !this.isLost()) return;
    try {
      const answer = await fetch(new URL("/stop", location.origin), { method: "POST", signal: AbortSignal.timeout(2000) });
      this.say(`Stop all: ${await answer.text()}`);
    } catch {
      this.say("No connection to the hub: use the robots' own emergency stops.");
    }
  }

  // --- showing ---

  /** Show this robot in place of the one before. */
  look(name) {
    if (this.selected && this.selected.name === name) return;
    for (const tile of this.tiles.splice(0)) tile.close();
    this.selected = new HubTile({ hub: this, name }, this);
    this.tiles.push(this.selected);
    $("tiles").replaceChildren(this.selected.root);
    this.send({ type: "watch", robot: name });
  }

  select() {} // One robot at a time.

  remove() {}

  refuse(text) {
    if (/token|has control/.test(text)) this.wanted = null;
    this.say(text);
    if (text.startsWith("wrong token")) this.control(text);
  }

  say(text) {
    const line = element("li", "refused");
    line.append(element("time", "", new Date().toLocaleTimeString()), text);
    this.log.prepend(line);
    while (this.log.children.length > 40) this.log.lastChild.remove();
  }

  paint() {
    const lost = this.isLost(), { robots = [], queue = [], person = null } = this.overview || {};
    $("top-hint").textContent = lost ? "No connection to the hub. The robots hold." : person ? `${person} stands by` : "Nobody stands by: the robots hold.";
    this.controlButton.textContent = this.inControl ? "Release control" : "Take control";
    this.controlButton.classList.toggle("primary", !this.inControl);
    this.controlButton.disabled = lost;
    this.nextButton.textContent = this.helping ? (queue.length ? `Done, next (${queue.length})` : "Done, hand back") : `Next (${queue.length})`;
    this.nextButton.disabled = lost || !this.inControl || !(this.helping || queue.length);
    this.nextButton.classList.toggle("primary", !this.nextButton.disabled);
    const place = (robot) => (queue.includes(robot.name) ? queue.indexOf(robot.name) : queue.length);
    const rows = [...robots].sort((a, b) => place(a) - place(b)).map((robot) => this.row(robot, queue, lost));
    this.list.replaceChildren(...rows);
    if (this.selected) this.selected.paint();
  }

  row(robot, queue, lost) {
    const row = element("div", `robot ${robot.state}`);
    row.dataset.robot = robot.name;
    row.classList.toggle("selected", Boolean(this.selected) && this.selected.name === robot.name);
    const number = queue.indexOf(robot.name) + 1;
    const state = lost ? "No connection" : robot.state === "helped" && !this.inControl ? "Is being helped" : STATES[robot.state];
    row.append(element("strong", "", number ? `${number}. ${robot.name}` : robot.name), element("span", "pill", state));
    const facts = [robot.why || robot.task || "", robot.waited === null ? "" : `waits ${Math.round(robot.waited)} s`];
    if (robot.score) facts.push(`score ${short(robot.score[0])} of ${short(robot.score[1])}`);
    if (robot.trouble) facts.push(robot.trouble);
    else if (robot.controller && !robot.ours) facts.push(`${robot.controller} has control of it`);
    row.append(element("span", "facts", facts.filter(Boolean).join(" · ")));
    row.onclick = () => this.look(robot.name);
    return row;
  }
}

const page = new HubPage();
$("keys").onclick = () => $("key-list").show();
$("key-list-ok").onclick = () => $("key-list").close();
listenToKeys(page);
