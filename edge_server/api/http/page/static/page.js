// What the device sends is drawn as it comes: pictures with the lanes of the same frame, its state
// once a second, events as they happen. The state says what is new of the recordings, the history and
// the log; only then they are asked for.
import { drawRoad } from "./birds_eye.js";
import { $, duration, element, replaced, say, svg, tone } from "./elements.js";
import { showLists } from "./lists.js";

const STALE_MS = 2000;
const HISTORY_MS = 60_000;
const FIRST_DELAY_S = 1;
const LONGEST_DELAY_S = 10;
const KEPT_EVENTS = 50;
const MOST_CAMERAS = 64; // at which a page may look
const MOST_ZOOM = 8;
const WHOLE = { by: 1, x: 0, y: 0 };
const LOW_DISK_BYTES = 256e6;
const NEAR_THROTTLE_C = 5;
const UNLOADED = "unloaded"; // on request, or with its directory
const STAGES = [
  ["age", "Age"], ["queue", "Queue"], ["preprocess", "Preprocess"], ["infer", "Model"], ["postprocess", "Decode"],
];
const KINDS = {
  lane_departure: "Lane departure", lane_change: "Lane change", camera: "State", model: "Change", degraded: "Degraded",
};

const decoder = new TextDecoder();
const cameras = new Map(); // by name: { state, frame, bitmap, at, history, canvas, button, label, rates }
const events = []; // the newest first
const NO_CAMERA = { state: null, frame: null, bitmap: null, at: 0, lanesAt: -Infinity, rates: { frames: null, lanes: null } };
let device = null; // the last state, and when it came
let stateAt = 0;
let chosen = "";
let socket = null;
let paused = false;
let delayS = FIRST_DELAY_S;
let offlineWhy = "";
let colours = {};
let looked = "";
let zoom = WHOLE;

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["road", "edge", "text", "quiet", "lane", "other", "paint"];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// The connection

function connect() {
  const url = new URL("page/live", location.href);
  url.protocol = url.protocol.replace("http", "ws");
  socket = new WebSocket(url);
  socket.binaryType = "arraybuffer";
  let opened = false;
  // They come again; those of a daemon without a file are other ones after its restart.
  socket.onopen = () => { opened = true; events.length = 0; };
  socket.onmessage = ({ data }) => {
    if (typeof data !== "string") return takePicture(data);
    const message = JSON.parse(data);
    if (message.type === "state") takeState(message);
    else if (message.type === "events") takeEvents(message.events);
  };
  socket.onclose = async ({ code, reason }) => {
    looked = "";
    const refused = opened ? { status: code === 4401 ? 401 : 0 } : await refusal();
    if (refused.status === 401) return $("login").open || $("login").showModal();
    const waitS = delayS * (0.8 + 0.4 * Math.random());
    delayS = Math.min(2 * delayS, LONGEST_DELAY_S);
    offlineWhy = reason || refused.error || "The device does not respond";
    setTimeout(connect, 1000 * waitS);
    refresh();
  };
}

// No browser tells its page why a socket was refused.
async function refusal() {
  try {
    const response = await fetch("page/token", { signal: AbortSignal.timeout(3000) });
    return { status: response.status, error: response.ok ? "" : (await response.json()).error };
  } catch {
    return { status: 0 };
  }
}

// Pictures are made only for what is seen.
function look() {
  const visible = !paused && document.visibilityState === "visible";
  const names = visible ? [...cameras.keys()].slice(0, MOST_CAMERAS) : [];
  const close = document.fullscreenElement || zoom.by > 1 ? "full" : "large";
  // Not by assignment: a camera may be called __proto__.
  const wanted = Object.fromEntries(names.map((name) => [name, name === chosen ? close : "small"]));
  const text = JSON.stringify({ look_at: wanted });
  if (text === looked || socket?.readyState !== WebSocket.OPEN) return;
  looked = text;
  socket.send(text);
}

// Pictures

async function takePicture(buffer) {
  const from = socket;
  const length = new DataView(buffer).getUint32(0);
  const frame = JSON.parse(decoder.decode(new Uint8Array(buffer, 4, length)));
  try {
    const bitmap = await createImageBitmap(new Blob([new Uint8Array(buffer, 4 + length)], { type: "image/jpeg" }));
    const camera = cameras.get(frame.camera);
    if (camera && !paused) show(camera, frame, bitmap);
    else bitmap.close();
  } finally {
    // Only now may the next one come.
    if (from.readyState === WebSocket.OPEN) from.send(new Uint8Array(1));
  }
}

function show(camera, frame, bitmap) {
  camera.bitmap?.close();
  Object.assign(camera, { frame, bitmap, at: performance.now() });
  if (frame.status !== "FRAME_STATUS_INVALID") camera.lanesAt = camera.at - frame.time.age_us / 1000;
  const sample = { at: camera.at, age: frame.time.age_us / 1000 };
  for (const stage of ["queue", "preprocess", "infer", "postprocess"]) sample[stage] = (frame.latency_us[stage] ?? 0) / 1000;
  camera.history.push(sample);
  while (camera.at - camera.history[0].at > HISTORY_MS) camera.history.shift();
  drawPicture(camera.canvas, camera, false);
  if (frame.camera === chosen) drawChosen(camera);
}

function drawChosen(camera) {
  drawPicture($("picture"), camera, true);
  showRoad(camera);
  showFigures(camera);
  freshen();
}

function fitted(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * scale);
  const height = Math.round(canvas.clientHeight * scale);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  return scale;
}

function drawPicture(canvas, { frame, bitmap }, large) {
  const { width, height } = frame.image;
  if (width && height) canvas.style.aspectRatio = `${width} / ${height}`;
  if (large && width && height) $("stage").style.setProperty("--ratio", width / height);
  const { by, x, y } = large ? zoom : WHOLE;
  const scale = fitted(canvas) / by; // lines and words keep their size
  const context = canvas.getContext("2d");
  context.setTransform(by, 0, 0, by, -by * x * canvas.width, -by * y * canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const across = canvas.width / width;
  const down = canvas.height / height;
  const path = ({ image_points: { x, y } }) => x.map((value, place) => [(value + 0.5) * across, (y[place] + 0.5) * down]);
  const trace = (points) => {
    context.beginPath();
    points.forEach((point, place) => (place ? context.lineTo(...point) : context.moveTo(...point)));
  };
  const left = frame.lanes.find((lane) => lane.index === -1);
  const right = frame.lanes.find((lane) => lane.index === 1);
  if (left && right) {
    trace([...path(left), ...path(right).reverse()]);
    context.fillStyle = "rgb(94 234 212 / .2)";
    context.fill();
  }
  context.lineCap = context.lineJoin = "round";
  for (const lane of frame.lanes) {
    const points = path(lane);
    const ego = Math.abs(lane.index) === 1 || !lane.index;
    const broad = (large ? (ego ? 4.5 : 3) : 2) * scale;
    // As from above: dashes are paint, dots are a line that is continued from earlier frames.
    context.setLineDash(lane.predicted ? [0.1, 2.5 * broad] : lane.type === "MARKING_TYPE_DASHED" ? [6 * broad, 5 * broad] : []);
    trace(points);
    context.strokeStyle = "rgb(3 10 12 / .6)";
    context.lineWidth = broad + 2.5 * scale;
    context.stroke();
    context.strokeStyle = lane.color === "MARKING_COLOR_YELLOW" ? "#ffd166" : ego ? "#5eead4" : "#dce7ee";
    context.lineWidth = broad;
    context.stroke();
  }
  context.setLineDash([]);
  context.font = `${12 * scale}px sans-serif`;
  // What other networks have found: boxes, outlines of areas, words.
  for (const { points, text, rgb, filled } of frame.marks ?? []) {
    trace(points.map(([x, y]) => [x * across, y * down]));
    context.fillStyle = `rgb(${rgb.join(" ")} / .3)`;
    if (filled) context.fill();
    context.strokeStyle = context.fillStyle = `rgb(${rgb.join(" ")})`;
    context.lineWidth = 2 * scale;
    context.stroke();
    if (!large || !text) continue;
    const place = [points[0][0] * across + 2 * scale, points[0][1] * down - 5 * scale];
    context.strokeStyle = "rgb(3 10 12 / .8)";
    context.lineWidth = 3 * scale;
    context.strokeText(text, ...place);
    context.fillText(text, ...place);
  }
}

// Zoom of the large picture: how much, and its upper left corner as parts of the whole.

function zoomTo(by, x, y) {
  const within = Math.min(Math.max(by, 1), MOST_ZOOM);
  const inside = (place) => Math.min(Math.max(place, 0), 1 - 1 / within);
  zoom = { by: within, x: inside(x), y: inside(y) };
  $("picture").classList.toggle("zoomed", within > 1);
  say($("zoom-reset"), `${within.toFixed(within < 10 && within % 1 ? 1 : 0)}×`);
  const camera = cameras.get(chosen);
  if (camera?.bitmap) drawPicture($("picture"), camera, true);
  look();
}

// The place under (across, down), parts of what is seen, stays where it is.
function zoomBy(factor, across = 0.5, down = 0.5) {
  const by = Math.min(Math.max(zoom.by * factor, 1), MOST_ZOOM);
  zoomTo(by, zoom.x + across / zoom.by - across / by, zoom.y + down / zoom.by - down / by);
}

function pan(across, down) {
  zoomTo(zoom.by, zoom.x - across / zoom.by, zoom.y - down / zoom.by);
}

const pointers = new Map(); // by id: where each finger, or the mouse, is as parts of the picture

function placeOf({ clientX, clientY }) {
  const { left, top, width, height } = $("picture").getBoundingClientRect();
  return [(clientX - left) / width, (clientY - top) / height];
}

function onPointer(event) {
  const { type, pointerId } = event;
  if (type === "pointerdown") {
    pointers.set(pointerId, placeOf(event));
    $("picture").setPointerCapture(pointerId);
    return;
  }
  if (!pointers.has(pointerId)) return;
  if (type !== "pointermove") return pointers.delete(pointerId);
  const middle = () => { const all = [...pointers.values()]; return [0, 1].map((axis) => all.reduce((sum, each) => sum + each[axis], 0) / all.length); };
  const apart = () => { const [[a, b], [c, d]] = pointers.values(); return Math.hypot(a - c, b - d); };
  const two = pointers.size === 2;
  const before = [middle(), two ? apart() : 1];
  pointers.set(pointerId, placeOf(event));
  const now = middle();
  if (two) zoomBy(apart() / Math.max(before[1], 0.01), ...now);
  if (zoom.by > 1) pan(now[0] - before[0][0], now[1] - before[0][1]);
}

function onWheel(event) {
  // Ctrl, which a pinch on a touchpad sends too; a wheel alone scrolls the page.
  if (!event.ctrlKey && !document.fullscreenElement) return;
  event.preventDefault();
  zoomBy(Math.exp(-event.deltaY / 300), ...placeOf(event));
}

function showRoad({ frame, state }) {
  const canvas = $("road");
  const scale = fitted(canvas);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  const size = { width: canvas.clientWidth, height: canvas.clientHeight };
  const count = drawRoad(context, size, state?.calibrated ? frame : null, device?.vehicle_width_m ?? 1.9, colours);
  say($("road-note"), state?.calibrated ? "" : "This camera has no calibration, so nothing is known in metres: edge-server calibrate.");
  $("legend").hidden = !state?.calibrated;
  canvas.setAttribute("aria-label", state?.calibrated ? `${count} lane boundaries on the road` : "No calibration");
}

// How old the lanes are that the page shows of a camera, ms; Infinity before the first ones.
function shownAge(camera) {
  const now = performance.now();
  // A camera without a lane model has other networks alone.
  if (paused || camera.state?.model === "") return now - camera.at;
  const said = camera.state?.lanes_age_s ?? null;
  return Math.min(now - camera.lanesAt, said === null ? Infinity : 1000 * said + now - stateAt);
}

function areOld(camera) {
  return paused || !camera.frame || !arrives(camera) || (camera.state.model !== "" && shownAge(camera) > STALE_MS);
}

// Figures of the chosen camera

function sideways(metres) {
  if (metres === undefined) return ["–", ""];
  return [Math.abs(metres).toFixed(2), Math.abs(metres) < 0.005 ? "m" : `m ${metres > 0 ? "left" : "right"}`];
}

// What a bend's deviation does not tell from a straight road has no radius.
function curve(ego) {
  const curvature = ego?.curvature_1pm;
  if (curvature === undefined) return ["–", ""];
  const within = 2 * (ego.curvature_std_1pm ?? 0);
  if (Math.abs(curvature) < 1 / 2000 && within < 1 / 1000) return ["straight", ""];
  if (Math.abs(curvature) < Math.max(within, 1 / 2000)) return ["–", ""];
  return [String(Math.round(1 / Math.abs(curvature) / 10) * 10), `m ${curvature > 0 ? "left" : "right"}`];
}

function showFigures(camera) {
  const age = shownAge(camera);
  const old = areOld(camera);
  const ego = camera.frame?.ego;
  const wide = ego?.lane_width_m;
  const rows = [
    ["Lanes", camera.frame && camera.frame.status !== "FRAME_STATUS_INVALID" ? String(camera.frame.lanes.length) : "–", ""],
    ["Lane rate", camera.rates.lanes === null || offlineWhy ? "–" : camera.rates.lanes.toFixed(1), "Hz"],
    ["Age", ...(old ? [camera.frame ? duration(age / 1000) : "–", ""] : [(camera.frame.time.age_us / 1000).toFixed(0), "ms"])],
    ["Off the middle", ...sideways(ego?.lateral_offset_m)],
    ["Lane width", ...(wide === undefined ? ["–", ""] : [wide.toFixed(2), "m"])],
    ["Curve radius", ...curve(ego)],
    // A camera without a lane model has other networks alone.
  ].filter(([name]) => name === "Age" || camera.state?.model !== "").concat([
    // Other networks: how old the newest result is, or that there is none.
    ...(camera.state?.networks ?? []).map(({ name, failure, frames, age_ms }) => [name, failure || !frames ? "–" : String(age_ms), failure ? failure.split(":")[0] : "ms"]),
  ]);
  const list = $("figures");
  if (list.childElementCount !== rows.length) {
    list.replaceChildren(...rows.map(([name]) => {
      const row = element("div");
      const value = element("dd");
      value.append(element("span"), element("small"));
      row.append(element("dt", "", name), value);
      return row;
    }));
  }
  rows.forEach(([name, value, unit], place) => {
    say(list.children[place].firstElementChild, name);
    const [number, small] = list.children[place].lastElementChild.children;
    say(number, value);
    say(small, unit);
  });
}

// State

function takeState(state) {
  if (device && device.version !== state.version) return location.reload();
  const before = device;
  device = state;
  stateAt = performance.now();
  delayS = FIRST_DELAY_S;
  offlineWhy = "";
  const names = new Set(state.cameras.map((each) => each.name));
  for (const [name, camera] of cameras) {
    if (!names.has(name)) {
      camera.button.remove();
      camera.bitmap?.close();
      cameras.delete(name);
    }
  }
  for (const each of state.cameras) {
    const camera = cameras.get(each.name) ?? addCamera(each.name);
    const then = before?.cameras.find(({ name }) => name === each.name);
    const seconds = then ? (state.mono_ms - before.mono_ms) / 1000 : 0;
    // A daemon that has started again counts anew.
    if (seconds > 0 && each.captured >= then.captured) {
      const rate = (key, old) => (old === null ? 1 : 0.5) * (each[key] - then[key]) / seconds + (old === null ? 0 : 0.5 * old);
      camera.rates = { frames: rate("captured", camera.rates.frames), lanes: rate("with_lanes", camera.rates.lanes) };
    }
    camera.state = each;
  }
  if (!cameras.has(chosen)) choose(cameras.keys().next().value ?? "");
  say($("device"), state.device);
  say($("version"), state.version);
  document.title = `${state.device} · edge-server`;
  showModels();
  showDevice();
  listRecordings();
  showLists(device, chosen);
  refresh();
  look();
}

function addCamera(name) {
  const button = element("button");
  button.type = "button";
  button.addEventListener("click", () => choose(name));
  const canvas = element("canvas");
  const label = element("span", "label");
  label.append(element("b", "", name), element("span", "chip"));
  button.append(canvas, label);
  $("strip").append(button);
  const camera = { state: null, frame: null, bitmap: null, at: 0, lanesAt: -Infinity, history: [], canvas, button, label, rates: { frames: null, lanes: null } };
  cameras.set(name, camera);
  return camera;
}

function choose(name) {
  if (name !== chosen) zoomTo(1, 0, 0);
  chosen = name;
  for (const [each, { button }] of cameras) button.setAttribute("aria-pressed", String(each === name));
  const camera = cameras.get(name) ?? NO_CAMERA;
  if (camera.bitmap) drawChosen(camera);
  else { $("picture").width = 0; showRoad({ frame: null, state: camera.state }); }
  refresh();
  look();
}

// A camera's state: a tone, a word or two, and the whole text.
function judged(camera) {
  const { state, frame } = camera;
  const text = state.text || state.state;
  if (state.state === "ended") return ["", "ended", text];
  if (!["live", "degraded"].includes(state.state)) return [state.state === "starting" ? "wait" : "bad", state.state, text];
  if (!state.usable) return ["bad", state.reason || state.state, text];
  if (state.failure) return ["bad", "no lanes", state.failure];
  if (frame && state.model && shownAge(camera) > STALE_MS && !paused) return ["bad", "no lanes", "No lanes come"];
  if (state.state === "degraded") return ["wait", state.reason || "degraded", text];
  if (frame?.status === "FRAME_STATUS_STALE") return ["wait", "late", "Its lanes are older than max_age_ms"];
  return ["good", "live", text];
}

// The same as the page may say it now: of a page without a connection, and of a paused one, nothing is live.
function marked(camera) {
  if (offlineWhy) return ["bad", "no connection", offlineWhy];
  return paused ? ["wait", "paused", ""] : judged(camera);
}

// Whether its pictures are of the road as it is: the server says whether frames arrive. Pictures may come
// seldom on a busy device, and have their age then.
function arrives({ state }) {
  return !offlineWhy && ["live", "degraded"].includes(state.state);
}

function pictureAge(camera) {
  const age = performance.now() - camera.at;
  return camera.at && age > STALE_MS && !paused && !offlineWhy ? `picture ${duration(age / 1000)} old` : "";
}

// What needs a person: a tone, what it is, and why.
function alarms() {
  const { broker, recorder, settings, board, update, free_bytes, models } = device;
  const found = [];
  const words = (text) => text.replaceAll("_", " ");
  if (broker && !broker.connected) found.push(["bad", "MQTT broker", broker.state]);
  const reasons = board?.reasons.map((each) => each.split(": ")) ?? [];
  for (const [word, ...rest] of reasons) found.push(["bad", words(word), rest.join(": ")]);
  for (const { name, celsius, throttle } of board?.zones ?? []) {
    if (throttle && celsius > throttle - NEAR_THROTTLE_C) found.push(["wait", "Heat", `${name} throttles at ${throttle.toFixed(0)} °C`]);
  }
  for (const [directory, bytes] of Object.entries(free_bytes)) {
    if (bytes < LOW_DISK_BYTES) found.push(["bad", "Disk", `less than ${megabytes(LOW_DISK_BYTES)} free in ${directory}`]);
  }
  if (recorder?.failure && !reasons.some(([word]) => word === "not_recorded")) found.push(["bad", "Recorder", recorder.failure]);
  if (settings?.fault) found.push(["bad", "Settings", `not reloaded: ${settings.fault}`]);
  if (["pending", "failed", "rolled_back"].includes(update.state)) found.push(["wait", `Update ${words(update.state)}`, update.fault || update.result]);
  const alike = new Map(); // cameras with the same fault
  for (const [name, camera] of cameras) {
    const [level, word, text] = judged(camera);
    if (["good", ""].includes(level) || word === "starting") continue;
    const key = `${level} ${text}`;
    if (!alike.has(key)) alike.set(key, [level, [], text]);
    alike.get(key)[1].push(name);
  }
  for (const [level, names, text] of alike.values()) found.push([level, `Camera${names.length > 1 ? "s" : ""} ${names.join(", ")}`, text]);
  for (const [name, { state }] of cameras) {
    for (const { name: network, failure } of state.networks) if (failure) found.push(["wait", `Network ${network} of ${name}`, failure.split(":")[0]]);
  }
  const serving = new Set(models.filter(({ state }) => state === "READY").map(({ name }) => name));
  for (const { name, state, reason, degraded } of models) {
    if (state === "UNAVAILABLE" && reason !== UNLOADED) found.push([serving.has(name) ? "wait" : "bad", `Model ${name}`, reason]);
    // What serves on although a newer content was refused has the reason too.
    else if (degraded || (state === "READY" && reason)) found.push(["wait", `Model ${name}`, reason || "degraded"]);
  }
  return found.sort(([a], [b]) => a.localeCompare(b));
}

function refresh() {
  if (!device) return;
  const found = alarms();
  replaced($("alarms").firstElementChild, found.map(([level, what, text]) => {
    const row = element("li");
    tone(row, level);
    row.append(element("b", "", what), element("span", "", text));
    return row;
  }));
  $("alarms").hidden = !found.length || Boolean(offlineWhy);
  const faults = found.filter(([level]) => level === "bad").length;
  const [level, word] = offlineWhy ? ["bad", "reconnecting"] : paused ? ["wait", "paused"] : faults ? ["bad", `${faults} fault${faults === 1 ? "" : "s"}`] : ["good", "live"];
  tone($("link"), level);
  say($("link"), word);
  freshen();
}

// Greys out what is old, and says why.
function freshen() {
  if (!device) return;
  let good = 0;
  for (const camera of cameras.values()) {
    good += !areOld(camera);
    const [level, word] = marked(camera);
    const chip = camera.label.lastElementChild;
    tone(chip, level);
    say(chip, [word, level === "good" ? pictureAge(camera) : ""].filter(Boolean).join(", "));
    camera.button.classList.toggle("stale", Boolean(camera.bitmap) && !paused && !arrives(camera));
  }
  const count = cameras.size;
  const what = count && [...cameras.values()].every(({ state }) => state.model === "") ? "Pictures" : "Lanes";
  say($("summary"), offlineWhy ? `${offlineWhy}; what is shown is old` : paused ? "Paused: what is shown is old" : `${what} from ${good} of ${count} camera${count === 1 ? "" : "s"}`);
  const camera = cameras.get(chosen);
  const [level, word, text] = camera ? marked(camera) : ["wait", "no camera", "No camera is configured"];
  const stage = $("stage");
  const ended = camera?.state.state === "ended" && !offlineWhy;
  stage.dataset.state = !camera ? "empty" : paused ? "paused" : !arrives(camera) ? (ended ? "ended" : "stale") : camera.bitmap ? "live" : "empty";
  stage.classList.toggle("blank", !camera?.bitmap);
  say($("stage-name"), chosen);
  tone($("stage-state"), level);
  say($("stage-state"), word);
  say($("stage-rate"), [camera && pictureAge(camera), camera && camera.rates.frames !== null && arrives(camera) ? `${camera.rates.frames.toFixed(1)} fps` : ""].filter(Boolean).join(" · "));
  let why = "";
  if (!camera) why = text;
  else if (stage.dataset.state === "empty") why = "Waiting for a picture";
  else if (!paused && !arrives(camera)) why = offlineWhy ? `${offlineWhy}. Reconnecting …` : `${word[0].toUpperCase()}${word.slice(1)}: ${text}`;
  say($("stage-why"), why);
  const old = !camera || areOld(camera);
  for (const id of ["figures", "road-card", "timing-card"]) $(id).classList.toggle("old", old);
  $("history-card").classList.toggle("old", Boolean(offlineWhy));
  if (camera) showFigures(camera);
  say($("road-age"), old && camera?.frame ? `${duration(shownAge(camera) / 1000)} old` : "");
  const lanes = camera?.frame?.lanes.length ?? 0;
  const label = `Camera ${chosen}: ${word}${camera?.state.model === "" ? "" : `, ${lanes} lane boundaries`}`;
  if ($("picture").getAttribute("aria-label") !== label) $("picture").setAttribute("aria-label", label);
}

function modelTone(state, reason) {
  return reason === UNLOADED ? "wait" : { READY: "good", UNAVAILABLE: "bad" }[state] ?? "wait";
}

function showModels() {
  const rows = device.models.map(({ name, version, state, reason, configuration, degraded }) => {
    const row = element("li");
    const head = element("div", "head");
    const title = element("b", "", name);
    if (version) title.append(element("small", "empty", `  v${version}`));
    const chip = element("span", "chip", degraded ? "degraded" : (state || "not loaded").toLowerCase());
    tone(chip, degraded || (state === "READY" && reason) ? "wait" : modelTone(state, reason));
    head.append(title, chip);
    row.append(head);
    if (configuration && !degraded) row.append(element("p", "reason", configuration));
    if (reason) row.append(element("p", "reason", reason));
    return row;
  });
  for (const { name, networks } of device.cameras) {
    for (const { name: network, model, verdict, verdict_text } of networks.filter(({ shadow }) => shadow)) {
      const row = element("li");
      const head = element("div", "head");
      const chip = element("span", "chip", verdict || "no verdict yet");
      tone(chip, { good: "good", worse: "bad" }[verdict] ?? "wait");
      head.append(element("b", "", `${model} as shadow`), chip);
      row.append(head, element("p", "reason", `Camera ${name}, network ${network}${verdict_text ? `: ${verdict_text}` : ""}`));
      rows.push(row);
    }
  }
  replaced($("models"), rows.length ? rows : [element("li", "empty", "No model is loaded")]);
}

function megabytes(bytes) {
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : `${Math.round(bytes / 1e6)} MB`;
}

function deviceFacts() {
  const { broker, recorder, settings, repository, board, processors } = device;
  const facts = [];
  const add = (name, text, level = "") => facts.push([name, text, level]);
  add("MQTT", broker ? broker.state : "off", broker ? (broker.connected ? "good" : "bad") : "");
  if (broker?.waiting > 20) add("MQTT waiting", `${broker.waiting} messages`, "wait");
  add("Recorder", recorder ? recorder.failure || `on, ${megabytes(recorder.written_bytes)} written` : "off", recorder?.failure ? "bad" : recorder ? "good" : "");
  if (settings?.fault) add("Settings", `not reloaded: ${settings.fault}`, "bad");
  else if (settings?.restart_needed.length) add("Settings", `restart needed for ${settings.restart_needed.join(", ")}`, "wait");
  else add("Settings", "as in the file", "");
  if (repository) {
    const counted = Object.entries(repository.outcomes).filter(([name, count]) => count && name !== "unchanged").map(([name, count]) => `${count} ${name.replaceAll("_", " ")}`);
    add("Changes of models", counted.join(", ") || "none since the start");
  }
  if (!board) return facts;
  for (const reason of board.reasons) {
    const [word, ...rest] = reason.split(": ");
    add(word.replaceAll("_", " "), rest.join(": ") || "now", "bad");
  }
  add("Clock", board.clock, board.clock === "wrong" ? "bad" : board.clock === "unsynchronized" ? "wait" : "");
  if (board.power_mode) add("Power mode", board.power_mode);
  if (board.rails?.length) add("Power", board.rails.map(({ name, watts }) => `${name} ${watts.toFixed(1)} W`).join(", "));
  const hottest = board.zones?.reduce((a, b) => (b.celsius > (a?.celsius ?? -Infinity) ? b : a), null);
  if (hottest) add("Temperature", `${hottest.celsius.toFixed(0)} °C ${hottest.name.replace(/-thermal$/, "")}`, hottest.throttle && hottest.celsius > hottest.throttle - 5 ? "wait" : "");
  if (processors !== null) add("Processors", `${Math.round(100 * processors)} %`);
  for (const { name, load, hz } of board.engines ?? []) {
    if (load !== null) add(name.toUpperCase(), `${Math.round(100 * load)} %${hz ? ` at ${Math.round(hz / 1e6)} MHz` : ""}`);
  }
  if (board.memory_bytes && board.available_bytes !== null) {
    add("Memory", `${megabytes(board.memory_bytes - board.available_bytes)} of ${megabytes(board.memory_bytes)}`);
  }
  add("Running for", duration(device.uptime_s));
  return facts;
}

function showDevice() {
  replaced($("facts"), deviceFacts().map(([name, text, level]) => {
    const row = element("div");
    if (level) row.dataset.tone = level;
    row.append(element("dt", "", name), element("dd", "", text));
    return row;
  }));
}

// Events

function takeEvents(found) {
  for (const each of found) if (!events.some(({ id }) => id === each.id)) events.unshift(each);
  events.length = Math.min(events.length, KEPT_EVENTS);
  showEvents();
}

function showEvents() {
  const rows = events.map((each) => {
    const row = element("li");
    const at = new Date(each.epoch_ms);
    const time = element("time", "", at.toLocaleTimeString([], { hour12: false }));
    time.dateTime = at.toISOString();
    const text = element("div");
    const side = ["left", "right"].includes(each.cause);
    const what = `${KINDS[each.kind] ?? each.kind}${side ? ` to the ${each.cause}` : ""}`;
    const of = [each.camera && `camera ${each.camera}`];
    if (each.kind === "model" || !each.camera) of.unshift(each.model && `model ${each.model}`);
    if (each.phase === "end") of.push("over");
    const title = element("b", "", [what, ...of].filter(Boolean).join(" · "));
    tone(title, each.phase === "end" || each.phase === "instant" ? "good" : each.kind === "lane_change" ? "wait" : "bad");
    text.append(title, element("span", "", [side ? "" : each.cause.replaceAll("_", " "), each.text].filter(Boolean).join(": ")));
    const file = recordings?.find(({ name }) => name.endsWith(`-event-${each.kind}-${each.id}.mcap`));
    if (file) text.append(download(file.name, "Recording"));
    row.append(time, text);
    return row;
  });
  replaced($("events"), rows.length ? rows : [element("li", "empty", "Nothing has happened yet")]);
  showWarning();
}

// A departure that has begun and not ended, of the chosen camera: in this run of the daemon, as nobody
// ends one that lasted when the power failed.
function showWarning() {
  const ended = new Set(events.map(({ begin_id }) => begin_id));
  const open = device && events.find(({ kind, phase, camera, id }) => kind === "lane_departure" && phase === "begin" && camera === chosen && id > device.earlier_events && !ended.has(id));
  if (open) $("stage").dataset.departure = open.cause;
  else delete $("stage").dataset.departure;
  $("warning").hidden = !open;
  say($("warning"), open ? `Leaving the lane to the ${open.cause}` : "");
}

// Recordings

let recordings = null; // the newest first; null where the recorder is off
let recordedBytes = -1;

// Only where there may be new ones: a file was completed since.
async function listRecordings() {
  const { recorder } = device;
  $("recordings-card").hidden = !recorder;
  if (!recorder || recorder.written_bytes === recordedBytes) return;
  recordedBytes = recorder.written_bytes;
  try {
    const response = await fetch("page/recordings");
    if (response.ok) ({ recordings } = await response.json());
  } catch {
    recordedBytes = -1; // with the next state
  }
  showRecordings();
}

function download(name, text) {
  const link = element("a", "", text);
  link.href = `page/recordings/${encodeURIComponent(name)}`;
  link.download = name;
  return link;
}

function showRecordings() {
  const found = recordings ?? [];
  say($("recordings-count"), found.length ? `${found.length}, ${megabytes(found.reduce((sum, { bytes }) => sum + bytes, 0))}` : "");
  const rows = found.map(({ name, bytes }) => {
    const row = element("li");
    // Number, boot, time in UTC, cause.
    const [, , at, ...cause] = name.replace(/\.mcap$/, "").split("-");
    const began = new Date(at.replace(/^(....)(..)(..)T(..)(..)(..)Z$/, "$1-$2-$3T$4:$5:$6Z"));
    row.append(download(name, cause.join(" ").replaceAll("_", " ")), element("p", "reason", `${began.toLocaleString([], { hour12: false })}, ${megabytes(bytes)}`));
    return row;
  });
  replaced($("recordings"), rows.length ? rows : [element("li", "empty", "None yet")]);
  showEvents();
}

async function record() {
  say($("record-fault"), "");
  $("record").disabled = true;
  try {
    const response = await fetch("page/recordings", { method: "POST" });
    const { name, error } = await response.json();
    say($("record-fault"), error ?? `${name} is being written`);
  } catch {
    say($("record-fault"), "The device does not respond");
  }
  $("record").disabled = false;
}

// Sparklines of the last minute

function addTiming() {
  for (const [, name] of STAGES) {
    const row = element("li");
    const chart = svg("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" });
    chart.append(svg("path", { class: "area" }), svg("path"));
    row.append(element("span", "stage-name", name), chart, element("span", "value", "–"));
    $("timing").append(row);
  }
}

function drawTiming() {
  const history = cameras.get(chosen)?.history ?? [];
  const now = performance.now();
  STAGES.forEach(([key], place) => {
    const [, chart, value] = $("timing").children[place].children;
    const points = history.filter(({ at }) => now - at < HISTORY_MS);
    if (!points.length) {
      say(value, "–");
      for (const path of chart.children) path.setAttribute("d", "");
      return;
    }
    // One that is much higher than the others would flatten them all; it is cut off.
    const sorted = points.map((each) => each[key]).sort((a, b) => a - b);
    const top = Math.max(0.5, Math.min(sorted.at(-1), 2 * sorted[Math.floor(0.95 * (sorted.length - 1))]));
    const line = points.map((each) => `${(100 - (100 * (now - each.at)) / HISTORY_MS).toFixed(2)} ${(29 - (26 * Math.min(each[key], top)) / top).toFixed(1)}`);
    chart.lastElementChild.setAttribute("d", `M${line.join("L")}`);
    chart.firstElementChild.setAttribute("d", `M${line[0].split(" ")[0]} 30L${line.join("L")}L${line.at(-1).split(" ")[0]} 30Z`);
    const last = points.slice(-15).map((each) => each[key]).sort((a, b) => a - b);
    const typical = last[Math.floor(last.length / 2)];
    say(value, typical < 10 ? typical.toFixed(1) : typical.toFixed(0));
  });
}

// Keyboard, pause, token

function pause() {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  say($("pause"), paused ? "Resume" : "Pause");
  look();
  refresh();
}

function step(by) {
  const names = [...cameras.keys()];
  choose(names[(names.indexOf(chosen) + by + names.length) % names.length]);
  if ($("strip").contains(document.activeElement)) cameras.get(chosen).button.focus();
}

function fullScreen() {
  if (document.fullscreenElement) document.exitFullscreen();
  else $("stage").requestFullscreen();
}

const PANS = { ArrowLeft: [0.2, 0], ArrowRight: [-0.2, 0], ArrowUp: [0, 0.2], ArrowDown: [0, -0.2] };

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, dialog")) return;
  if (/^[1-9]$/.test(event.key)) {
    const name = [...cameras.keys()][Number(event.key) - 1];
    if (name) choose(name);
  } else if (event.shiftKey && event.key in PANS) pan(...PANS[event.key]);
  else if (event.key === "ArrowRight" && cameras.size > 1) step(1);
  else if (event.key === "ArrowLeft" && cameras.size > 1) step(-1);
  else if (event.key === "+" || event.key === "=") zoomBy(1.5);
  else if (event.key === "-") zoomBy(1 / 1.5);
  else if (event.key === "0") zoomTo(1, 0, 0);
  else if (event.key.toLowerCase() === "p") pause();
  else if (event.key.toLowerCase() === "f") fullScreen();
  else return;
  event.preventDefault();
}

async function logIn(event) {
  event.preventDefault();
  const body = JSON.stringify({ token: $("token").value });
  try {
    const response = await fetch("page/token", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    if (!response.ok) return say($("login-fault"), (await response.json()).error ?? response.statusText);
  } catch {
    return say($("login-fault"), "The device does not respond");
  }
  if (!$("login").open) return; // it was pressed twice
  $("token").value = "";
  say($("login-fault"), "");
  $("login").close();
  connect();
}

readColours();
matchMedia("(prefers-color-scheme: light)").addEventListener("change", () => {
  readColours();
  if (cameras.get(chosen)) showRoad(cameras.get(chosen));
});
const resized = new ResizeObserver(() => {
  const camera = cameras.get(chosen);
  if (camera?.bitmap) drawChosen(camera);
});
resized.observe($("main"));
resized.observe($("stage"));
addTiming();
takeEvents([]);
document.addEventListener("keydown", onKey);
document.addEventListener("visibilitychange", look);
$("pause").addEventListener("click", pause);
$("full").addEventListener("click", fullScreen);
$("full").hidden = !document.fullscreenEnabled;
document.addEventListener("fullscreenchange", look);
for (const type of ["pointerdown", "pointermove", "pointerup", "pointercancel"]) $("picture").addEventListener(type, onPointer);
$("picture").addEventListener("wheel", onWheel, { passive: false });
$("picture").addEventListener("dblclick", (event) => (zoom.by > 1 ? zoomTo(1, 0, 0) : zoomBy(2.5, ...placeOf(event))));
$("zoom-in").addEventListener("click", () => zoomBy(1.5));
$("zoom-out").addEventListener("click", () => zoomBy(1 / 1.5));
$("zoom-reset").addEventListener("click", () => zoomTo(1, 0, 0));
$("record").addEventListener("click", record);
$("login-form").addEventListener("submit", logIn);
$("login").addEventListener("cancel", (event) => event.preventDefault());
setInterval(() => { freshen(); showWarning(); drawTiming(); }, 250);
connect();
