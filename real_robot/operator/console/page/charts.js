// Draws what changes: the failure score over time, and numbers against their limits.

const SECONDS = 60, GAP = 2; // shown; without a score for so long, the line is broken
const EDGE = { left: 46, right: 10, top: 16, bottom: 34 }; // pixels around the axes: names and numbers

/**
 * The failure score of the last minute against its threshold, with both axes named. Who sees no colors tells the score
 * (a line with a dot at its end) from the threshold (dashed) by shape, and reads each one's name and value beside it.
 * `points`: [time in seconds, score, threshold].
 */
export function drawScore(svg, points, now) {
  const width = svg.clientWidth, height = svg.clientHeight;
  const shown = points.filter((p) => now - p[0] <= SECONDS);
  svg.replaceChildren();
  if (!width) return;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const { left, top } = EDGE, right = width - EDGE.right, bottom = height - EDGE.bottom;
  const ticks = niceTicks(shown.flatMap((p) => [p[1], p[2]]));
  const low = ticks[0], high = ticks[ticks.length - 1];
  const x = (time) => right - (right - left) * (now - time) / SECONDS;
  const y = (value) => bottom - (bottom - top) * (value - low) / (high - low);
  const put = (tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    svg.append(made);
  };
  for (const value of ticks) {
    put("path", { class: "grid", d: `M${left} ${y(value)}H${right}` });
    put("text", { class: "tick", x: left - 6, y: y(value), "text-anchor": "end", dy: "0.35em" }, String(value));
  }
  for (const ago of [60, 45, 30, 15, 0]) {
    put("path", { class: "grid", d: `M${x(now - ago)} ${bottom}v4` });
    put("text", { class: "tick", x: x(now - ago), y: bottom + 15, "text-anchor": ago ? "middle" : "end" }, ago ? String(ago) : "now");
  }
  put("path", { class: "axis", d: `M${left} ${top}V${bottom}H${right}` });
  put("text", { class: "axis-name", x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, "seconds ago");
  put("text", { class: "axis-name", transform: `translate(11 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, "score");
  if (!shown.length) {
    put("text", { class: "axis-name", x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle" }, "no score in the last minute");
    return;
  }
  const line = (index) => shown.map((p, i) => `${i && p[0] - shown[i - 1][0] <= GAP ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[index]).toFixed(1)}`).join("");
  const [time, score, limit] = shown[shown.length - 1];
  const alarm = score > limit ? " alarm" : "";
  put("path", { class: "threshold", d: line(2) });
  put("path", { class: `score${alarm}`, d: line(1) });
  put("circle", { class: `score${alarm}`, cx: x(time), cy: y(score), r: 4 });
  put("text", { class: "threshold", x: left + 6, y: y(limit) - 5 }, `alarm above ${short(limit)}`);
  put("text", { class: `score${alarm}`, x: right, y: 11, "text-anchor": "end" }, `${alarm ? "alarm: " : ""}score \u25CF ${short(score)}`);
}

/** Three to six round numbers from at most the smallest value (and 0) to at least the largest. */
function niceTicks(values) {
  const low = Math.min(0, ...values), high = Math.max(low + 1e-6, ...(values.length ? values.map((v) => 1.1 * v) : [1]));
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(6)));
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
