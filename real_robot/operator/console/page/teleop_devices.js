// What the person's hands hold: keys, pads on the screen, a gamepad. Nothing held means: the robot holds.

import { element } from "./charts.js";

const MOTION = {
  KeyW: ["x", 1], KeyS: ["x", -1], KeyA: ["y", 1], KeyD: ["y", -1], KeyE: ["z", 1], KeyQ: ["z", -1],
  KeyJ: ["turn_z", 1], KeyL: ["turn_z", -1], KeyI: ["turn_y", 1], KeyK: ["turn_y", -1],
  KeyU: ["turn_x", -1], KeyO: ["turn_x", 1],
};
const PADS = [
  { columns: 3, keys: [null, ["W", "forward"], null, ["A", "left"], ["S", "back"], ["D", "right"]] },
  { columns: 1, keys: [["E", "up"], ["Q", "down"]] },
  { columns: 3, keys: [["U", "roll −"], ["I", "pitch +"], ["O", "roll +"], ["J", "turn ↺"], ["K", "pitch −"], ["L", "turn ↻"]] },
];
const DEADBAND = 0.12;
const GRIPPER_HOLD = 500; // milliseconds for which a gripper key counts as held

export class TeleopDevices {
  constructor() {
    this.keys = new Set();
    this.gripper = null; // what it was told last, null: leave it
    this.gripperUntil = 0;
    this.releaseAll();
    window.addEventListener("blur", () => this.releaseAll());
    document.addEventListener("visibilitychange", () => document.hidden && this.releaseAll());
  }

  releaseAll() {
    this.keys.clear();
    this.gripperUntil = 0;
    this.paint();
  }

  /** Forget what the gripper was told: a new episode, another person. */
  forget() {
    this.releaseAll();
    this.gripper = null;
  }

  down(code) {
    if (code === "KeyF") this.grip(this.gripper === "close" ? "open" : "close");
    else if (code in MOTION) this.keys.add(code);
    else return false;
    this.paint();
    return true;
  }

  up(code) {
    this.keys.delete(code);
    this.paint();
  }

  grip(command) {
    this.gripper = command;
    this.gripperUntil = performance.now() + GRIPPER_HOLD;
  }

  /** {axes, gripper, held} now. `speed`: share of full deflection. `isSelected`: the gamepad is this robot's, as keys are. */
  read(speed, isSelected) {
    const axes = {};
    for (const code of this.keys) {
      const [axis, sign] = MOTION[code];
      axes[axis] = (axes[axis] || 0) + sign;
    }
    if (isSelected) this.readGamepad(axes);
    for (const axis of Object.keys(axes)) axes[axis] = Math.max(-1, Math.min(1, axes[axis])) * speed;
    const held = Object.values(axes).some((v) => v !== 0) || performance.now() < this.gripperUntil;
    return { axes, gripper: this.gripper, held };
  }

  readGamepad(axes) {
    const pads = navigator.getGamepads ? [...navigator.getGamepads()] : [];
    const pad = pads.find((p) => p && p.connected && p.mapping === "standard");
    if (!pad) return;
    const add = (axis, value) => {
      if (Math.abs(value) > DEADBAND) axes[axis] = (axes[axis] || 0) + value;
    };
    const button = (i) => (pad.buttons[i] ? pad.buttons[i].value : 0);
    add("y", -pad.axes[0]);
    add("x", -pad.axes[1]);
    add("turn_z", -pad.axes[2]);
    add("turn_y", -pad.axes[3]);
    add("z", button(7) - button(6));
    if (button(0) > 0.5) this.grip("close");
    if (button(1) > 0.5) this.grip("open");
  }

  /** Buttons on the screen that are held like keys. */
  build(box, moves) {
    this.buttons = [];
    const shown = PADS.filter((_, i) => (i < 2 ? moves.includes("x") : moves.includes("turn_x")));
    for (const pad of shown) {
      const grid = element("div", pad.columns === 1 ? "pad two" : "pad");
      for (const key of pad.keys) {
        if (key === null) grid.append(element("span"));
        else grid.append(this.padButton(`Key${key[0]}`, key[0], key[1]));
      }
      box.append(grid);
    }
    if (moves.includes("gripper")) {
      const grid = element("div", "pad two");
      for (const command of ["close", "open"]) {
        const button = element("button", "", command);
        button.type = "button";
        button.dataset.grip = command;
        if (command === "close") button.append(element("kbd", "", "F"));
        button.addEventListener("pointerdown", () => this.grip(command));
        grid.append(button);
      }
      box.append(grid);
    }
  }

  padButton(code, key, label) {
    const button = element("button", "", label);
    button.type = "button";
    button.tabIndex = -1;
    button.append(element("kbd", "", key));
    button.dataset.code = code;
    const release = () => this.up(code);
    button.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      button.setPointerCapture(event.pointerId);
      this.down(code);
    });
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) button.addEventListener(name, release);
    button.addEventListener("contextmenu", (event) => event.preventDefault());
    this.buttons.push(button);
    return button;
  }

  paint() {
    for (const button of this.buttons || []) button.classList.toggle("down", this.keys.has(button.dataset.code));
  }
}
