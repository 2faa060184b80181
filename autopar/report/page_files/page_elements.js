"use strict";
// What the charts share: the data, elements, numbers with units, colours, and the tooltip.
// Texts of the user are only ever set as text, never parsed as HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function setAll(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value; // the page's policy allows inline styles
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}
const el = (tag, attributes = {}, ...children) =>
  setAll(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  setAll(document.createElementNS(SVG, tag), attributes, children);

function withUnit(value, units) {
  if (!value) return `0 ${units.find(([scale]) => scale === 1)[1]}`;
  const [scale, unit] =
    units.find(([size]) => Math.abs(value) >= size) || units[units.length - 1];
  return `${Number((value / scale).toPrecision(4)).toLocaleString("en")} ${unit}`;
}
const seconds = (value) => withUnit(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]);
const bytes = (value) =>
  withUnit(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
const rate = (value, unit) =>
  withUnit(value, [[1e15, `P${unit}`], [1e12, `T${unit}`], [1e9, `G${unit}`], [1e6, `M${unit}`], [1, unit]]);
const count = (value) => value.toLocaleString("en");
const percent = (part) => `${(100 * part).toFixed(1)} %`;

// Colours by name of a CSS variable.
const PART_COLOURS = {
  forward: "blue", backward: "sky", recompute: "indigo", update: "green", unattributed: "teal",
  bubble: "grey", host: "wine", compute: "blue", communication: "orange", resharding: "red",
};
const AXIS_COLOURS = ["orange", "red", "pink", "yellow", "wine", "grey"];
const ROLE_COLOURS = {
  parameters: "blue", optimizer: "indigo", gradients: "green", activations: "orange",
  inputs: "sky", outputs: "teal", communication: "red", temporaries: "grey",
};
const axisNames = [
  ...new Set(DATA.plans.flatMap((plan) => (plan.prediction?.axes || []).map((row) => row.axis))),
];
const axisColour = (axis) => AXIS_COLOURS[Math.max(0, axisNames.indexOf(axis)) % AXIS_COLOURS.length];
const partColour = (name) =>
  name.startsWith("exposed ") ? axisColour(name.slice(8)) : PART_COLOURS[name] || "grey";
const LIGHT = new Set(["sky", "orange", "yellow", "pink", "teal", "green", "grey"]);
const inkOn = (shade) => (LIGHT.has(shade) ? "ink" : "page"); // the colour of text on a shade
const colour = (name) => `var(--${name})`;

// A canvas can't use CSS variables: this resolves one for the theme.
const probe = el("span", { hidden: true });
document.body.append(probe);
function resolved(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const tip = document.getElementById("tip");
function showTip(event, title, lines) {
  tip.replaceChildren(el("b", { text: title }), ...lines.map((line) => el("div", { text: line })));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const below = event.clientY + 18;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below + box.height > innerHeight ? event.clientY - box.height - 10 : below}px`;
}
const hideTip = () => (tip.hidden = true);
// An element that shows a tooltip under the pointer, and has it as its label.
function tipped(node, title, lines) {
  node.setAttribute("aria-label", [title, ...lines].join(", "));
  node.addEventListener("pointermove", (event) => showTip(event, title, lines));
  node.addEventListener("pointerleave", hideTip);
  return node;
}

const legend = (entries) =>
  el("ul", { class: "legend" }, ...entries.map(([name, shade, hatched]) =>
    el("li", {}, el("i", { class: hatched ? "hatched" : null, style: `background-color:${colour(shade)}` }), name)));

// A chart of a width that follows its element's: `draw(width)` returns an SVG.
function responsive(holder, draw) {
  const body = el("div");
  holder.append(body);
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.floor(holder.clientWidth);
    if (width === drawn || width < 40) return;
    drawn = width;
    body.replaceChildren(draw(width));
  }).observe(holder);
  return () => body.replaceChildren(draw(drawn || Math.floor(holder.clientWidth)));
}

// About `number` round values between two numbers.
function ticks(low, high, number) {
  const raw = (high - low) / number || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12) + 1e-300; i += 1) values.push(i * step);
  return values;
}
// The powers of ten between two numbers; and 2 and 5 times them if the range is short.
function powers(low, high) {
  const factors = high / low < 2000 ? [1, 2, 5] : [1];
  const values = [];
  for (let e = Math.floor(Math.log10(low)); 10 ** e <= high; e += 1) {
    values.push(...factors.map((factor) => factor * 10 ** e));
  }
  return values.filter((value) => value >= low * 0.9999 && value <= high * 1.0001);
}
const thinned = (values, room) => values.filter((_, i) => i % Math.ceil(values.length / room) === 0);
