// Making elements, and changing them only where something differs.

export const $ = (id) => document.getElementById(id);

export function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function svg(name, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// Sets a text only where it differs: a screen reader speaks what is set.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function tone(node, value) {
  if (node.dataset.tone !== value) node.dataset.tone = value;
}

// Replaces children only where something differs, so that nobody loses a selection or the focus.
const shown = new Map();
export function replaced(list, rows) {
  const made = rows.map((row) => row.outerHTML).join("");
  if (shown.get(list) === made) return;
  shown.set(list, made);
  list.replaceChildren(...rows);
}

export function duration(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86_400)} days`;
}
