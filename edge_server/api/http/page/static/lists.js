// History, log and settings: asked for where they are seen and something is new of them.
import { $, duration, element, replaced, say, svg, tone } from "./elements.js";

async function ask(path) {
  try {
    const response = await fetch(path, { signal: AbortSignal.timeout(5000) });
    const answer = await response.json();
    return response.ok ? answer : { error: answer.error ?? response.statusText };
  } catch {
    return { error: "The device does not respond" };
  }
}

// Returns what asks for `path`, one request at a time, where `key` is another one than that of the last
// good answer; else it gives null.
function asking(path) {
  let known, pending = false;
  return async (key, query = "") => {
    if (pending || known === key) return null;
    pending = true;
    const answer = await ask(path + query);
    pending = false;
    known = answer.error ? undefined : key;
    return answer;
  };
}

let device = null; // the last state
let runs = 0; // of the daemon that this page has seen

export function showLists(state, camera) {
  if (device && state.uptime_s < device.uptime_s) {
    runs += 1;
    lines = [];
  }
  device = state;
  if (document.visibilityState !== "visible") return;
  showHistory(camera);
  showLog();
  showSettings();
}

// History

// A name; the unit; how the device's value becomes that of the unit; which series; from where to where
// the chart goes, where that does not depend on the values.
const CHARTS = [
  ["Age of lanes", "ms", 1, (name, camera) => name === `age_ms/${camera}`, 0],
  ["Lane rate", "Hz", 1, (name, camera) => name === `lanes_hz/${camera}`, 0],
  ["Temperature", "°C", 1, (name) => name.startsWith("celsius/")],
  ["Processors", "%", 100, (name) => name === "processors", 0, 100],
  ["Engines", "%", 100, (name) => name.startsWith("load/"), 0, 100],
  ["Memory", "%", 100, (name) => name === "memory", 0, 100],
  ["Power", "W", 1, (name) => name.startsWith("watts/"), 0],
];
const SPANS = { hour: 3600, day: 86_400 };
const askHistory = { hour: asking("page/history/hour"), day: asking("page/history/day") };
let span = "hour";
let histories = {}; // by span, as the device sends them
let at = null; // the place of the pointer, 0..1 of the time span
let camera = "";

async function showHistory(chosen) {
  if (camera !== chosen) { camera = chosen; drawHistory(); }
  const wanted = span;
  const answer = await askHistory[wanted](`${runs} ${device.samples}`);
  if (!answer || answer.error) return;
  histories[wanted] = answer;
  drawHistory();
}

function shortName(name) {
  return name.replace(/^[^/]*\/?/, "").replace(/-thermal$/, "");
}

function numbered(value) {
  return value.toFixed(Math.abs(value) < 10 ? 1 : 0);
}

// Times and values of a series of which something is known, newest last.
function known({ ages_s }, series, factor) {
  return series.flatMap((value, place) => (value === null ? [] : [{ age: ages_s[place], value: factor * value }]));
}

function chartRow(history, [name, unit, factor, which, low, high]) {
  const found = Object.entries(history.series).filter(([each]) => which(each, camera))
    .map(([each, series]) => [shortName(each), known(history, series, factor)]).filter(([, points]) => points.length);
  if (!found.length) return null;
  found.sort(([, a], [, b]) => a.at(-1).value - b.at(-1).value); // the highest is drawn last
  const all = found.flatMap(([, points]) => points.map(({ value }) => value));
  const [least, most] = [Math.min(...all), Math.max(...all)];
  // A range of less than this would make noise look like a change.
  const bottom = low ?? Math.floor(least - Math.max(0, 5 - (most - least) / 2));
  const top = high ?? Math.max(most, bottom + (low === 0 ? 1e-9 : 10));
  const seconds = SPANS[span];
  const across = (age) => 100 * (1 - age / seconds);
  const chart = svg("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img" });
  chart.setAttribute("aria-label", `${name}, ${numbered(least)} to ${numbered(most)} ${unit}`);
  for (const [, points] of found) {
    // Where the device gave no value for a while, the line has a gap.
    const path = points.map(({ age, value }, place) => {
      const gap = !place || points[place - 1].age - age > 2.5 * history.period_s;
      return `${gap ? "M" : "L"}${across(age).toFixed(2)} ${(39 - (37 * (Math.min(value, top) - bottom)) / (top - bottom)).toFixed(1)}`;
    });
    if (path.length === 1) path.push("h.01");
    chart.append(svg("path", { d: path.join("") }));
  }
  if (at !== null) chart.append(svg("line", { x1: 100 * at, x2: 100 * at, y1: 0, y2: 40 }));
  const age = at === null ? 0 : (1 - at) * seconds;
  const nearest = found.map(([each, points]) => [each, points.reduce((a, b) => (Math.abs(b.age - age) < Math.abs(a.age - age) ? b : a))])
    .filter(([, point]) => at === null || Math.abs(point.age - age) < 1.5 * history.period_s).sort(([, a], [, b]) => b.value - a.value);
  const row = element("li");
  const label = element("span", "name", name);
  label.append(element("small", "", `${numbered(least)} to ${numbered(most)} ${unit}`));
  const value = element("span", "value", nearest.length ? `${numbered(nearest[0][1].value)} ${unit}` : "–");
  const others = found.length > 1 ? nearest.slice(0, 3).map(([each, point], place) => (place ? `${each} ${numbered(point.value)}` : each)) : [];
  if (others.length) value.append(element("small", "", others.join(", ")));
  row.append(label, chart, value);
  return row;
}

function drawHistory() {
  const history = histories[span];
  if (!history) return;
  const rows = CHARTS.map((chart) => chartRow(history, chart)).filter(Boolean);
  replaced($("charts"), rows.length ? rows : [element("li", "empty", `The first values come ${span === "day" ? "4 min" : "20 s"} after the start`)]);
  const ago = at === null ? 0 : (1 - at) * SPANS[span];
  say($("history-at"), at === null ? `last ${span}` : `${duration(ago)} ago, ${new Date(Date.now() - 1000 * ago).toLocaleTimeString([], { hour12: false })}`);
}

for (const button of document.querySelectorAll("[data-span]")) {
  button.addEventListener("click", () => {
    span = button.dataset.span;
    for (const each of document.querySelectorAll("[data-span]")) each.setAttribute("aria-pressed", String(each === button));
    drawHistory();
    if (device) showHistory(camera);
  });
}
$("charts").addEventListener("pointermove", (event) => {
  const chart = event.target.closest("li")?.querySelector("svg");
  if (!chart) return;
  const { left, width } = chart.getBoundingClientRect();
  at = Math.min(Math.max((event.clientX - left) / width, 0), 1);
  drawHistory();
});
$("charts").addEventListener("pointerleave", () => { at = null; drawHistory(); });

// Log

const KEPT_LINES = 300;
const TONES = { warning: "wait", error: "bad", critical: "bad" };
const askLog = asking("page/log");
let lines = []; // [id, epoch_ms, level, text], the newest first
let logFault = "";

async function showLog() {
  if (!$("log-card").open) return;
  const answer = await askLog(`${runs} ${device.log_id}`, `?after=${lines[0]?.[0] ?? 0}`);
  if (!answer) return;
  logFault = answer.error ?? "";
  lines = [...(answer.lines ?? []).reverse(), ...lines].slice(0, KEPT_LINES);
  drawLog();
}

function drawLog() {
  const only = $("log-faults").checked;
  const rows = lines.filter(([, , level]) => !only || level in TONES).map(([, epoch_ms, level, text]) => {
    const row = element("li");
    const time = element("time", "", new Date(epoch_ms).toLocaleTimeString([], { hour12: false }));
    time.dateTime = new Date(epoch_ms).toISOString();
    const word = element("b", "", level);
    if (level in TONES) tone(word, TONES[level]);
    row.append(time, word, element("span", "", text));
    return row;
  });
  if (logFault) rows.unshift(element("li", "fault", logFault));
  replaced($("log"), rows.length ? rows : [element("li", "empty", only ? "No warning and no error" : "No line yet")]);
}

$("log-faults").addEventListener("change", drawLog);
$("log-card").addEventListener("toggle", () => device && showLog());

// Settings

const askSettings = asking("page/settings");
let settings = { settings: [] };

async function showSettings() {
  if (!$("settings-card").open) return;
  // As often as the history: a reload counts nothing.
  const answer = await askSettings(`${runs} ${device.samples} ${device.settings?.restart_needed}`);
  if (answer) settings = answer;
  drawSettings();
}

function drawSettings() {
  const all = $("settings-all").checked;
  const restartNeeded = device?.settings?.restart_needed ?? [];
  const rows = (settings.settings ?? []).filter(([, , isDefault]) => all || !isDefault).map(([name, value, isDefault]) => {
    const row = element("div", isDefault ? "default" : "");
    const waits = restartNeeded.some((each) => name === each || name.startsWith(`${each}.`));
    if (waits) tone(row, "wait");
    row.append(element("dt", "", name), element("dd", "", waits ? `${value}, after a restart` : value));
    return row;
  });
  const empty = element("div", settings.error ? "fault" : "empty");
  empty.append(element("dt", "", settings.error ? "Refused" : "Every setting"), element("dd", "", settings.error ?? "has its default"));
  replaced($("settings"), rows.length ? rows : [empty]);
}

$("settings-all").addEventListener("change", drawSettings);
$("settings-card").addEventListener("toggle", () => device && showSettings());
