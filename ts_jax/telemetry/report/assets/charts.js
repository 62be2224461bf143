// Small charts in SVG: lines with bands and points, and stacked bars.
function niceTicks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(v => v >= raw * 0.999) || raw;
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(+(k * step).toPrecision(12));
  return ticks;
}
const wholeTicks = (low, high, wanted) => niceTicks(low, high, Math.min(wanted, Math.max(1, high - low))).filter(Number.isInteger);

function legend(entries) {
  return h('div', {class: 'legend'}, entries.map(e =>
    h('span', {}, h('i', {class: 'swatch ' + (e.mark || ''), style: e.mark === 'hatch-swatch' ? null : `background:${e.color}`}), e.name)));
}

function card(title, aside, ...content) {
  return h('div', {class: 'card'}, h('div', {class: 'head'}, h('h3', {}, title), aside && h('span', {class: 'aside'}, aside)), ...content);
}

function axes(svg, frame, x, y, options) {
  const {left, right, top, bottom} = frame;
  for (const tick of options.yTicks) {
    svg.append(s('line', {class: 'gridline', x1: left, x2: right, y1: y(tick), y2: y(tick)}));
    svg.append(s('text', {x: left - 8, y: y(tick) + 4, 'text-anchor': 'end'}, options.yFormat(tick)));
  }
  svg.append(s('line', {class: 'axis', x1: left, x2: right, y1: bottom, y2: bottom}));
  for (const tick of options.xTicks) svg.append(s('text', {x: x(tick), y: bottom + 17, 'text-anchor': 'middle'}, String(tick)));
  if (options.xLabel) svg.append(s('text', {x: right, y: bottom + 33, 'text-anchor': 'end'}, options.xLabel));
  if (options.yLabel) svg.append(s('text', {x: left, y: top - 10, 'text-anchor': 'start'}, options.yLabel));
}

// Polyline pieces: a missing value leaves a gap instead of a bridge.
function pieces(points) {
  const runs = [[]];
  for (const p of points) {
    if (isNumber(p[1])) runs[runs.length - 1].push(p);
    else if (runs[runs.length - 1].length) runs.push([]);
  }
  return runs.filter(r => r.length);
}

// options: series [{name, color, points [[x, y]], mark 'line'|'dot'|'diamond', band [[x, low, high]]}], yFormat, yTicks, yLabel, yMin, yMax, refs, height
function lineChart(options) {
  const all = options.series.flatMap(v => v.points.map(p => p[1]).concat((v.band || []).flatMap(b => [b[1], b[2]]))).filter(isNumber);
  const xs = [...new Set(options.series.flatMap(v => v.points.map(p => p[0])))].sort((a, b) => a - b);
  if (!all.length) return h('p', {class: 'empty'}, 'No values recorded.');
  return responsive(width => {
    const height = options.height || 250;
    const frame = {left: 46, right: width - 10, top: options.yLabel ? 22 : 8, bottom: height - (options.xLabel ? 38 : 22)};
    let low = Math.min(options.yMin ?? Infinity, ...all), high = Math.max(options.yMax ?? -Infinity, ...all);
    if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
    const pad = options.yMax === undefined ? (high - low) * 0.05 : 0;
    high += pad;
    const first = xs[0], last = Math.max(xs[xs.length - 1], first + 1);
    const x = v => frame.left + 6 + (v - first) / (last - first) * (frame.right - frame.left - 12);
    const y = v => frame.bottom - (v - low) / (high - low) * (frame.bottom - frame.top);
    const svg = s('svg', {viewBox: `0 0 ${width} ${height}`, height, role: 'img', 'aria-label': options.label});
    axes(svg, frame, x, y, {...options, yTicks: options.yTicks || niceTicks(low, high, Math.max(3, height / 50)), xTicks: wholeTicks(first, last, width / 80)});
    for (const ref of options.refs || []) {
      svg.append(s('line', {class: 'ref', x1: frame.left, x2: frame.right, y1: y(ref.y), y2: y(ref.y)}));
      svg.append(s('text', {x: frame.right, y: y(ref.y) - 5, 'text-anchor': 'end'}, ref.label));
    }
    for (const v of options.series) {
      if (v.band) {
        const ok = v.band.filter(b => isNumber(b[1]));
        const path = ok.map(b => `${x(b[0])},${y(b[2])}`).concat(ok.slice().reverse().map(b => `${x(b[0])},${y(b[1])}`)).join(' ');
        svg.append(s('polygon', {points: path, fill: v.color, opacity: 0.11}));
      }
      if (v.mark === 'line') {
        for (const run of pieces(v.points)) {
          if (run.length > 1) svg.append(s('polyline', {points: run.map(p => `${x(p[0])},${y(p[1])}`).join(' '), fill: 'none', stroke: v.color, 'stroke-width': 2, 'stroke-linejoin': 'round'}));
          if (run.length === 1 || xs.length <= 40) for (const p of run) svg.append(s('circle', {cx: x(p[0]), cy: y(p[1]), r: 2.4, fill: v.color}));
        }
        continue;
      }
      const ok = v.points.filter(p => isNumber(p[1]));
      svg.append(s('polyline', {points: ok.map(p => `${x(p[0])},${y(p[1])}`).join(' '), fill: 'none', stroke: v.color, 'stroke-width': 1.3, 'stroke-dasharray': '2 3.5', opacity: 0.8}));
      for (const p of ok) {
        svg.append(v.mark === 'diamond' ?
          s('rect', {x: x(p[0]) - 4, y: y(p[1]) - 4, width: 8, height: 8, transform: `rotate(45 ${x(p[0])} ${y(p[1])})`, fill: v.color, stroke: color('card'), 'stroke-width': 1.2}) :
          s('circle', {cx: x(p[0]), cy: y(p[1]), r: 4.6, fill: v.color, stroke: color('card'), 'stroke-width': 1.2}));
      }
    }
    const cross = s('line', {class: 'cross', y1: frame.top, y2: frame.bottom, visibility: 'hidden'});
    svg.append(cross);
    const nearest = event => {
      const at = (event.clientX - svg.getBoundingClientRect().left) * width / svg.getBoundingClientRect().width;
      return xs.reduce((best, v) => Math.abs(x(v) - at) < Math.abs(x(best) - at) ? v : best, xs[0]);
    };
    svg.addEventListener('pointermove', event => {
      const at = nearest(event);
      cross.setAttribute('x1', x(at)); cross.setAttribute('x2', x(at)); cross.setAttribute('visibility', 'visible');
      const rows = options.series.map(v => [v, v.points.find(p => p[0] === at)]).filter(([, p]) => p && isNumber(p[1]))
        .map(([v, p]) => [v.name, options.yFormat(p[1], true), v.color]);
      tip.show(event, h('b', {}, (options.xName || 'update') + ' ' + at), tipTable(rows));
    });
    svg.addEventListener('pointerleave', () => { cross.setAttribute('visibility', 'hidden'); tip.hide(); });
    return svg;
  });
}

// options: xs, stacks [{name, color, values, hatch}], yFormat, share, xLabel, yLabel, height, onPick(x), extra(index) -> rows
function barChart(options) {
  const totals = options.xs.map((_, n) => options.stacks.reduce((sum, v) => sum + (v.values[n] || 0), 0));
  if (!options.xs.length || !Math.max(...totals)) return h('p', {class: 'empty'}, 'No values recorded.');
  return responsive(width => {
    const height = options.height || 250;
    const frame = {left: 46, right: width - 4, top: options.yLabel ? 22 : 8, bottom: height - 38};
    const high = options.share ? 1 : Math.max(...totals) * 1.04;
    const slot = (frame.right - frame.left) / options.xs.length;
    const bar = Math.min(44, Math.max(1, slot - (slot > 8 ? 4 : slot > 3 ? 1 : 0)));
    const y = v => frame.bottom - v / high * (frame.bottom - frame.top);
    const center = n => frame.left + slot * (n + 0.5);
    const every = Math.max(1, Math.ceil(options.xs.length / Math.max(1, Math.floor(width / 46))));
    const svg = s('svg', {viewBox: `0 0 ${width} ${height}`, height, role: 'img', 'aria-label': options.label});
    axes(svg, frame, v => center(options.xs.indexOf(v)), y,
      {...options, yTicks: niceTicks(0, high, Math.max(2, height / 55)), xTicks: options.xs.filter((_, n) => n % every === 0)});
    options.xs.forEach((at, n) => {
      let sum = 0;
      const scale = options.share ? 1 / (totals[n] || 1) : 1;
      const column = s('g', {style: options.onPick && 'cursor:pointer', onclick: options.onPick && (() => options.onPick(at))},
        s('rect', {x: center(n) - slot / 2, y: frame.top, width: slot, height: frame.bottom - frame.top, fill: 'transparent'}));
      for (const v of options.stacks) {
        const value = (v.values[n] || 0) * scale;
        if (value <= 0) continue;
        const box = {x: center(n) - bar / 2, y: y(sum + value), width: bar, height: Math.max(0, y(sum) - y(sum + value) - (y(sum) - y(sum + value) > 3 ? 0.8 : 0))};
        column.append(s('rect', {...box, fill: v.color}));
        sum += value;
      }
      column.addEventListener('pointermove', event => tip.show(event, h('b', {}, 'update ' + at), tipTable(
        options.stacks.slice().reverse().filter(v => v.values[n]).map(v =>
          [v.name, options.yFormat(v.values[n], true) + (totals[n] ? `  (${percent(v.values[n] / totals[n])})` : ''), v.color])
          .concat(options.extra ? options.extra(n) : []))));
      column.addEventListener('pointerleave', () => tip.hide());
      svg.append(column);
    });
    return svg;
  });
}
