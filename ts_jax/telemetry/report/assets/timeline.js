// The timeline of one update: engine slots, tools, teacher, verifier, learner lanes, publication; learner gaps hatched.
const KIND = Object.fromEntries(DATA.kinds.map((k, n) => [k, n]));
const LEARNER_KINDS = ['forward', 'turn', 'source', 'prompt', 'fold', 'compile'], BARRIER_KINDS = ['reduce', 'optimizer'];
const KIND_NAMES = {engine: 'engine request', tool: 'tool call', teacher: 'teacher score', reference: 'reference score', verify: 'verifier', forward: 'turn forward', turn: 'turn gradient', source: 'source gradient', prompt: 'prompt (shared)', fold: 'fold', reduce: 'reduction',
  optimizer: 'optimizer step', publish: 'publication', compile: 'compilation'};

function readSpans(update) {
  const stored = DATA.timelines[update];
  return stored ? stored.spans.map(([kind, start, length, group, index, turn, lane, tokens, ready]) =>
    ({kind: DATA.kinds[kind], start, end: start + length, group, index, turn, lane, tokens, ready})) : [];
}

// Packs intervals into the fewest rows: each goes to the row that has been free the longest.
function pack(spans) {
  const ends = [];
  for (const span of spans.slice().sort((a, b) => a.start - b.start)) {
    let row = ends.findIndex(e => e <= span.start + 0.01);
    if (row < 0) { row = ends.length; ends.push(0); }
    ends[row] = span.end;
    span.row = row;
  }
  return Math.max(1, ends.length);
}

// Parts of [low, high] that no span covers.
function gaps(spans, low, high) {
  const found = [];
  let at = low;
  for (const span of spans.slice().sort((a, b) => a.start - b.start)) {
    if (span.start > at) found.push([at, Math.min(span.start, high)]);
    at = Math.max(at, span.end);
  }
  if (at < high) found.push([at, high]);
  return found.filter(([a, b]) => b > a);
}

function analyse(update) {
  const spans = readSpans(update);
  const of = (...kinds) => spans.filter(v => kinds.includes(v.kind));
  const end = Math.max(...spans.map(v => v.end));
  const publish = of('publish');
  const learnerEnd = Math.max(0, ...spans.filter(v => v.kind !== 'publish').map(v => v.end));
  const lanes = [...new Set(of(...LEARNER_KINDS, ...BARRIER_KINDS).map(v => v.lane).filter(v => v >= 0))].sort((a, b) => a - b);
  if (!lanes.length) lanes.push(0);
  const rows = [];
  const engine = of('engine'), tool = of('tool'), teacher = of('teacher'), reference = of('reference'), verify = of('verify');
  if (engine.length) rows.push({name: 'Engine', note: n => plural(n, 'slot'), spans: engine, packed: pack(engine)});
  if (tool.length) rows.push({name: 'Tools', note: n => `up to ${n} at once`, spans: tool, packed: pack(tool)});
  if (teacher.length) rows.push({name: 'Teacher', note: n => `up to ${n} at once`, spans: teacher, packed: pack(teacher)});
  if (reference.length) rows.push({name: 'Reference', note: n => `up to ${n} at once`, spans: reference, packed: pack(reference)});
  if (verify.length) rows.push({name: 'Verifier', note: n => `up to ${n} at once`, spans: verify, packed: pack(verify)});
  let idle = 0;
  for (const lane of lanes) {
    // Work of the barrier that names no lane holds up all of them.
    const mine = of(...LEARNER_KINDS, ...BARRIER_KINDS).filter(v => v.lane === lane || (v.lane < 0 && BARRIER_KINDS.includes(v.kind)) || (v.lane < 0 && lanes.length === 1));
    const free = gaps(mine, 0, learnerEnd);
    const idleHere = free.reduce((sum, [a, b]) => sum + b - a, 0);
    idle += idleHere / lanes.length;
    rows.push({name: lanes.length > 1 ? `Learner ${lane}` : 'Learner', note: () => `${percent(idleHere / (learnerEnd || 1))} idle`, spans: mine.map(v => ({...v, row: 0})), packed: 1, gaps: free, tall: true});
  }
  if (publish.length) rows.push({name: 'Publication', note: () => '', spans: publish, packed: pack(publish)});
  const busy = engine.reduce((sum, v) => sum + v.end - v.start, 0);
  const slots = engine.length ? rows[0].packed : 0;
  const lastReward = Math.max(0, ...verify.map(v => v.end));
  return {spans, rows, end, idle, learnerEnd, lastReward, engineBusy: slots && lastReward ? busy / (slots * lastReward) : null, publish: publish.reduce((sum, v) => sum + v.end - v.start, 0)};
}

function spanTip(update, span) {
  const rows = [];
  if (span.group >= 0) rows.push(['trajectory', span.index >= 0 ? `group ${span.group}, attempt ${span.index}` : `group ${span.group}`]);
  if (span.turn >= 0) rows.push(['turn', String(span.turn)]);
  if (span.lane >= 0) rows.push(['lane', String(span.lane)]);
  rows.push(['from', seconds(span.start / 1000)], ['took', seconds((span.end - span.start) / 1000)]);
  if (span.tokens) rows.push(['tokens', count(span.tokens)], ['rate', `${count(span.tokens / Math.max(0.001, (span.end - span.start) / 1000))} tokens/s`]);
  if (isNumber(span.ready)) rows.push(['waited since ready', seconds(Math.max(0, span.start - span.ready) / 1000)]);
  return [h('b', {}, KIND_NAMES[span.kind]), tipTable(rows)];
}

function drawLanes(view, onZoom, onOpen) {
  return responsive(width => {
    const {update, info} = view;
    const left = 118, right = width - 6, top = 16;
    const height_of = row => row.tall ? 26 : Math.max(3, Math.min(11, 190 / row.packed));
    const [low, high] = view.range || [0, info.end];
    const x = v => left + (v - low) / (high - low) * (right - left);
    const svg = s('svg', {class: 'lanes', role: 'img', 'aria-label': `timeline of update ${update}`});
    const marks = new Map();
    const pattern = s('pattern', {id: 'hatch', width: 6, height: 6, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)'},
      s('rect', {width: 6, height: 6, class: 'hatch-back'}), s('line', {x1: 0, y1: 0, x2: 0, y2: 6, class: 'hatch-line'}));
    const clip = s('clipPath', {id: 'inside'}, s('rect', {x: left, y: 0, width: right - left, height: 4000}));
    const body = s('g', {'clip-path': 'url(#inside)'});
    svg.append(s('defs', {}, pattern, clip), body);
    let y = top;
    for (const row of info.rows) {
      const step = height_of(row), inner = step > 5 ? step - 1.5 : step > 3.4 ? step - 0.8 : step, tall = row.packed * step;
      const named = Math.max(tall, 28);
      svg.append(s('text', {class: 'row-name', x: 0, y: y + 12}, row.name), s('text', {x: 0, y: y + 26}, row.note(row.packed)));
      body.append(s('rect', {class: 'track', x: left, y: y - 1, width: right - left, height: tall + 1, rx: 3}));
      for (const [a, b] of row.gaps || []) {
        if (b < low || a > high) continue;
        const gap = s('rect', {x: x(a), y, width: Math.max(0.5, x(b) - x(a)), height: tall - 1, fill: 'url(#hatch)'});
        gap.addEventListener('pointermove', e => tip.show(e, h('b', {}, 'learner idle'), tipTable([['from', seconds(a / 1000)], ['for', seconds((b - a) / 1000)]])));
        gap.addEventListener('pointerleave', () => tip.hide());
        body.append(gap);
      }
      for (const span of row.spans) {
        if (span.end < low || span.start > high) continue;
        // A hair of space between neighbours, so that back-to-back work does not look like one piece.
        const w = x(span.end) - x(span.start);
        const node = s('rect', {class: 'span', x: x(span.start), y: y + span.row * step, width: Math.max(0.8, w - (w > 4 ? 0.7 : 0)), height: inner, rx: w > 5 && inner > 5 ? 1.5 : 0,
          fill: color(span.kind)});
        const key = span.group >= 0 && span.index >= 0 ? `${span.group}.${span.index}` : null;
        if (key) marks.set(key, [...(marks.get(key) || []), node]);
        node.addEventListener('pointermove', e => { if (!drag) tip.show(e, ...spanTip(update, span)); });
        node.addEventListener('pointerenter', () => { if (key && !drag) { svg.classList.add('dim'); marks.get(key).forEach(n => n.classList.add('hot')); } });
        node.addEventListener('pointerleave', () => { svg.classList.remove('dim'); if (key) marks.get(key).forEach(n => n.classList.remove('hot')); tip.hide(); });
        node.addEventListener('click', () => { if (key && !moved) onOpen(span.group, span.index); });
        body.append(node);
      }
      y += named + 10;
    }
    const bottom = y - 4;
    if (info.lastReward >= low && info.lastReward <= high) {
      const at = x(info.lastReward), flip = at > right - 90;
      body.append(s('line', {class: 'ref', x1: at, x2: at, y1: top - 4, y2: bottom}));
      svg.append(s('text', {x: flip ? at - 5 : at + 5, y: top - 5, 'text-anchor': flip ? 'end' : 'start'}, 'last reward'));
    }
    const unit = (high - low) / 1000;
    svg.append(s('line', {class: 'axis', x1: left, x2: right, y1: bottom, y2: bottom}));
    for (const tick of niceTicks(low / 1000, high / 1000, width / 100)) {
      svg.append(s('line', {class: 'axis', x1: x(tick * 1000), x2: x(tick * 1000), y1: bottom, y2: bottom + 4}),
        s('text', {x: x(tick * 1000), y: bottom + 18, 'text-anchor': 'middle'}, unit < 0.5 ? `${+(tick * 1000).toPrecision(6)} ms` : `${tick} s`));
    }
    svg.setAttribute('viewBox', `0 0 ${width} ${bottom + 26}`);
    svg.setAttribute('height', bottom + 26);

    let drag = null, moved = false;
    const brush = s('rect', {class: 'brush', y: top, height: bottom - top, width: 0});
    const time = event => {
      const box = svg.getBoundingClientRect();
      const at = Math.min(right, Math.max(left, (event.clientX - box.left) * width / box.width));
      return low + (at - left) / (right - left) * (high - low);
    };
    svg.append(brush);
    svg.addEventListener('pointerdown', event => { drag = {from: time(event)}; moved = false; });
    svg.addEventListener('pointermove', event => {
      if (!drag) return;
      const [a, b] = [drag.from, time(event)].sort((p, q) => p - q);
      moved = moved || x(b) - x(a) > 4;
      if (moved) { tip.hide(); brush.setAttribute('x', x(a)); brush.setAttribute('width', x(b) - x(a)); }
    });
    const finish = event => {
      if (!drag) return;
      const [a, b] = [drag.from, time(event)].sort((p, q) => p - q);
      drag = null;
      brush.setAttribute('width', 0);
      if (moved && b - a > 1) onZoom([a, b]);
    };
    svg.addEventListener('pointerup', finish);
    svg.addEventListener('pointerleave', finish);
    svg.addEventListener('dblclick', () => onZoom(null));
    return svg;
  });
}

function drawTimeline(onOpen) {
  const node = sectionHead('timeline', 'Timeline of an update',
    'Engine requests are packed into slots. Hatched stretches are time in which the learner had nothing to do before the update\u2019s last step. Drag to zoom, double-click to see all; select a span to read its trajectory.');
  const updates = Object.keys(DATA.timelines).map(Number).sort((a, b) => a - b);
  if (!updates.length) { node.append(h('p', {class: 'empty card'}, 'This run has no trace.')); return () => {}; }
  const view = {update: updates[updates.length - 1], range: null};
  const select = h('select', {'aria-label': 'update', onchange: () => go(+select.value)}, updates.map(u => h('option', {value: u}, `update ${u}`)));
  const previous = h('button', {type: 'button', onclick: () => move(-1)}, '\u2190 Previous'), next = h('button', {type: 'button', onclick: () => move(1)}, 'Next \u2192');
  const reset = h('button', {type: 'button', onclick: () => { view.range = null; draw(); }}, 'Whole update');
  const figures = h('div', {class: 'kpis'}), names = h('div');
  const box = drawLanes(view, range => { view.range = range; draw(); }, (g, i) => onOpen(view.update, g, i));
  node.append(h('div', {class: 'card'}, h('div', {class: 'bar'}, previous, select, next, reset, h('span', {class: 'grow'}), names), figures, box));
  const move = by => { const at = updates.indexOf(view.update) + by; if (at >= 0 && at < updates.length) go(updates[at]); };
  function go(update) { view.update = update; view.range = null; draw(); }
  function draw() {
    const info = view.info = analyse(view.update);
    select.value = view.update;
    previous.disabled = view.update === updates[0];
    next.disabled = view.update === updates[updates.length - 1];
    reset.disabled = !view.range;
    const figure = (value, text) => h('span', {}, h('b', {}, value), text);
    figures.replaceChildren(
      figure(seconds(info.end / 1000), 'whole update'),
      figure(percent(info.idle / (info.learnerEnd || 1)), `learner idle (${seconds(info.idle / 1000)})`),
      ...[isNumber(info.engineBusy) && figure(percent(info.engineBusy), 'of slot time generating, up to the last reward'),
        info.lastReward > 0 && figure(seconds((info.learnerEnd - info.lastReward) / 1000), 'from last reward to new weights'),
        info.publish > 0 && figure(seconds(info.publish / 1000), 'publication')].filter(Boolean));
    const kinds = DATA.kinds.filter(k => info.spans.some(v => v.kind === k));
    names.replaceChildren(legend(kinds.map(k => ({name: KIND_NAMES[k], color: color(k)})).concat([{name: 'learner idle', mark: 'hatch-swatch'}])));
    box.redraw();
  }
  draw();
  return update => { if (updates.includes(update)) { go(update); node.scrollIntoView(); } };
}
