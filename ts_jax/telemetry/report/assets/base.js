'use strict';
// Everything on the page is built with createElement and textContent: tool output is data, never markup.
const DATA = JSON.parse(document.getElementById('data').textContent);

function build(make, tag, attributes, children) {
  const node = make(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? '' : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}
const h = (tag, attributes, ...children) => build(t => document.createElement(t), tag, attributes, children);
const s = (tag, attributes, ...children) => build(t => document.createElementNS('http://www.w3.org/2000/svg', t), tag, attributes, children);

const isNumber = v => typeof v === 'number' && Number.isFinite(v);
const unknown = '\u2013';
const fixed = (v, digits = 2) => isNumber(v) ? v.toFixed(digits).replace('-', '\u2212') : unknown;
const percent = (v, digits = 0) => isNumber(v) ? (100 * v).toFixed(digits) + '\u2009%' : unknown;
const count = v => isNumber(v) ? Math.round(v).toLocaleString('en') : unknown;
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? '' : 's'}`;
function compact(v) {
  if (!isNumber(v)) return unknown;
  if (v === 0) return '0';
  const size = Math.abs(v);
  return size < 1e-3 || size >= 1e6 ? v.toExponential(1).replace('e-', 'e\u2212').replace('e+', 'e') : size >= 100 ? count(v) : String(+v.toPrecision(3));
}
function seconds(v) {
  if (!isNumber(v)) return unknown;
  if (v === 0) return '0\u2009s';
  if (v < 0.9995) return Math.round(v * 1000) + '\u2009ms';
  if (v < 60) return v.toFixed(v < 9.95 ? 2 : 1) + '\u2009s';
  const whole = Math.round(v);
  if (whole < 3600) return `${Math.floor(whole / 60)}m\u2009${String(whole % 60).padStart(2, '0')}s`;
  return `${Math.floor(whole / 3600)}h\u2009${String(Math.floor(whole % 3600 / 60)).padStart(2, '0')}m`;
}
const color = name => `var(--${name})`;
const words = name => name.replaceAll('_', ' ');

// --- tooltip
const tip = {
  node: document.getElementById('tip'),
  show(event, ...content) {
    this.node.replaceChildren(...content);
    this.node.hidden = false;
    const box = this.node.getBoundingClientRect();
    const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
    const top = Math.min(event.clientY + 14, innerHeight - box.height - 8);
    this.node.style.left = Math.max(4, left) + 'px';
    this.node.style.top = Math.max(4, top) + 'px';
  },
  hide() { this.node.hidden = true; },
};
addEventListener('scroll', () => tip.hide(), {passive: true});
const tipTable = rows => h('table', {}, rows.map(([name, value, swatch]) =>
  h('tr', {}, h('td', {}, swatch && h('span', {class: 'swatch', style: `background:${swatch}`}), name), h('td', {}, value))));

// --- theme
const root = document.documentElement;
const systemDark = matchMedia('(prefers-color-scheme: dark)');
let chosen = null;
const applyTheme = () => { root.dataset.theme = chosen || (systemDark.matches ? 'dark' : 'light'); };
systemDark.addEventListener('change', applyTheme);
applyTheme();
document.getElementById('theme').addEventListener('click', () => {
  chosen = root.dataset.theme === 'dark' ? 'light' : 'dark';
  applyTheme();
});

// Draws into a box again whenever its width changes.
function responsive(draw) {
  const box = h('div');
  let width = 0;
  new ResizeObserver(entries => {
    const now = Math.floor(entries[0].contentRect.width);
    if (now && now !== width) { width = now; requestAnimationFrame(() => box.replaceChildren(draw(width))); }
  }).observe(box);
  // At once, in the same place: a box that is empty for a frame makes the page jump.
  box.redraw = () => { if (width) box.replaceChildren(draw(width)); };
  return box;
}

function sectionHead(id, title, lede) {
  const node = document.getElementById(id);
  node.replaceChildren(h('h2', {}, title), lede && h('p', {class: 'lede'}, lede));
  return node;
}
