// Draws what changes: the failure score over time, and numbers against their limits.

const SECONDS = 60;

/** The failure score of the last minute against its threshold. `points`: [time in seconds, score, threshold]; `detector`: its name. */
export function drawScore(canvas, points, now, detector) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width) return;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const ink = canvas.getContext("2d");
  ink.setTransform(ratio, 0, 0, ratio, 0, 0);
  ink.clearRect(0, 0, width, height);
  ink.font = "12px system-ui, sans-serif";
  ink.textBaseline = "middle";
  const shown = points.filter((p) => now - p[0] <= SECONDS);
  const bottom = height - 16, right = width - 44;
  ink.fillStyle = "#66737f";
  ink.textAlign = "center";
  for (const ago of [60, 45, 30, 15, 0]) {
    ink.textAlign = ago === 60 ? "left" : ago === 0 ? "right" : "center";
    ink.fillText(ago ? `${ago} s ago` : "now", right * (1 - ago / SECONDS), height - 7);
  }
  if (!shown.length) {
    ink.textAlign = "center";
    ink.fillText(detector ? `${detector}: no score in the last minute` : "no failure detector is running", right / 2, bottom / 2);
    return;
  }
  const values = shown.flatMap((p) => [p[1], p[2]]);
  const low = Math.min(0, ...values), high = Math.max(...values) * 1.1 || 1;
  const x = (time) => right * (1 - (now - time) / SECONDS);
  const y = (value) => 4 + (bottom - 8) * (1 - (value - low) / (high - low || 1));
  const line = (index, color, dashes, thickness) => {
    ink.beginPath();
    ink.setLineDash(dashes);
    ink.strokeStyle = color;
    ink.lineWidth = thickness;
    shown.forEach((p, i) => {
      const gap = i && p[0] - shown[i - 1][0] > 2;
      if (i && !gap) ink.lineTo(x(p[0]), y(p[index]));
      else ink.moveTo(x(p[0]), y(p[index]));
    });
    ink.stroke();
    ink.setLineDash([]);
  };
  const last = shown[shown.length - 1];
  const alarm = last[1] > last[2];
  line(2, "#ef5350", [5, 4], 1.5);
  line(1, alarm ? "#ef5350" : "#5aa9ff", [], 2);
  ink.textAlign = "left";
  ink.fillStyle = "#ef5350";
  ink.fillText(short(last[2]), right + 6, y(last[2]));
  if (Math.abs(y(last[1]) - y(last[2])) > 12) {
    ink.fillStyle = alarm ? "#ef5350" : "#5aa9ff";
    ink.fillText(short(last[1]), right + 6, y(last[1]));
  }
}

/** At most four signs of a number. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return value.toFixed(0);
  if (size >= 100) return value.toFixed(1);
  return size >= 10 ? value.toFixed(2) : value.toFixed(3);
}

/** Rows of name, bar and number. `facts`: [{name, low, high}], low and high may be null. */
export function buildBars(box, facts) {
  box.replaceChildren();
  return facts.map((fact) => {
    const label = element("span", "label", fact.name);
    const track = element("span", "track");
    const fill = element("span", "fill");
    const zero = element("span", "zero");
    const asked = element("span", "asked");
    asked.hidden = true;
    const limited = fact.low !== null && fact.high !== null;
    fill.classList.toggle("point", fact.kind !== "velocity"); // A speed grows from zero; a position is a place.
    if (limited) {
      track.append(fill, zero, asked);
      track.title = `${fact.name}: ${fact.low} to ${fact.high}`;
      zero.style.left = `${100 * share(Math.max(fact.low, Math.min(0, fact.high)), fact)}%`;
    } else {
      track.style.visibility = "hidden";
    }
    const value = element("span", "value", "–");
    box.append(label, track, value);
    return { fact, limited, track, fill, asked, value };
  });
}

const share = (value, fact) => Math.max(0, Math.min(1, (value - fact.low) / (fact.high - fact.low || 1)));

/** `values`: one number for each row; `asked`: the same, what was asked for, or empty. */
export function setBars(rows, values, asked = []) {
  rows.forEach((row, i) => {
    const value = values[i];
    row.value.textContent = short(value);
    if (!row.limited || value === undefined || value === null) return;
    const from = share(Math.max(row.fact.low, Math.min(0, row.fact.high)), row.fact), to = share(value, row.fact);
    const isSpeed = row.fact.kind === "velocity";
    row.fill.style.left = isSpeed ? `${100 * Math.min(from, to)}%` : `calc((100% - 10px) * ${to})`;
    row.fill.style.width = isSpeed ? `${100 * Math.abs(to - from)}%` : "10px";
    row.track.classList.toggle("at-limit", row.fact.kind !== "position" && (to < 0.02 || to > 0.98));
    const want = asked[i];
    row.asked.hidden = want === undefined || want === null;
    if (!row.asked.hidden) row.asked.style.left = `calc(${100 * share(want, row.fact)}% - 1px)`;
  });
}

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
