// The console's page: a tile for each robot, this one's first.

import { ask } from "./dialog.js";
import { listenToKeys, Tile } from "./tile.js";

const $ = (id) => document.getElementById(id);

$("keys").onclick = () => $("key-list").show();
$("key-list-ok").onclick = () => $("key-list").close();

// --- tiles ---

const page = { tiles: [], selected: null, select, remove };

function select(tile) {
  if (page.selected && page.selected !== tile) page.selected.hands.releaseAll();
  page.selected = tile;
  for (const other of page.tiles) other.root.classList.toggle("selected", other === tile);
}

function addTile(address) {
  const tile = new Tile(address, page);
  page.tiles.push(tile);
  $("tiles").append(tile.root);
  arrange();
  if (!page.selected) select(tile);
}

function remove(tile) {
  tile.close();
  page.tiles.splice(page.tiles.indexOf(tile), 1);
  if (page.selected === tile) page.selected = null;
  if (page.tiles.length) select(page.tiles[0]);
  arrange();
}

function arrange() {
  $("tiles").classList.toggle("many", page.tiles.length > 1);
  $("stop-all").hidden = page.tiles.length < 2;
  $("top-hint").textContent = page.tiles.length > 1 ? "Keys and gamepad go to the robot with the thick frame; click another to change." : "";
  page.tiles.forEach((tile, i) => { tile.part(".remove").hidden = i === 0; });
  localStorage.setItem("console-robots", JSON.stringify(page.tiles.slice(1).map((t) => t.address)));
}

$("add").onclick = async () => {
  const answer = await ask({
    title: "Add a robot", text: "The address of its console. It must allow this page: see --console-origin.", ok: "Add", url: true,
  });
  if (!answer) return;
  try {
    const url = new URL(answer.url.includes("://") ? answer.url : `http://${answer.url}`);
    if (["http:", "https:"].includes(url.protocol)) addTile(url.origin);
  } catch {
    if (page.selected) page.selected.log(`${answer.url} is not an address`, "refused");
  }
};
$("stop-all").onclick = () => page.tiles.forEach((tile) => tile.stop());

/** The robots that were added before, from this browser's memory. */
function knownRobots() {
  try {
    const known = JSON.parse(localStorage.getItem("console-robots") || "[]");
    return known.filter((address) => new URL(address).origin !== location.origin);
  } catch {
    return [];
  }
}

listenToKeys(page);
const known = knownRobots();
addTile(location.origin);
known.forEach(addTile);
