// Runs under each other on one time axis: rollout above each axis, learner below it; hatched where they idle.
function drawSchedules() {
  const runs = DATA.schedules;
  if (!runs.length) { document.getElementById('schedules').remove(); return; }
  const node = sectionHead('schedules', 'Schedules under each other',
    `The first ${plural(runs[0].steps.length, 'update')} of each run on one time axis. Above each line: open engine requests, of the most that were open at once. Below it: learner lanes at work. Hatched: idle. Dashed: optimizer steps. Time between updates (evaluation, interruption) is left out.`);
  const names = legend([{name: 'rollout busy', color: color('engine')}, {name: 'learner busy', color: color('source')}, {name: 'idle', mark: 'hatch-swatch'}]);
  const longest = Math.max(...runs.map(r => r.end));
  const box = responsive(width => {
    const left = 46, right = width - 10, half = 46, head = 26, gap = 14;
    const x = v => left + v / longest * (right - left);
    const height = runs.length * (head + 2 * half + gap) + 28;
    const svg = s('svg', {viewBox: `0 0 ${width} ${height}`, height, role: 'img', 'aria-label': 'timelines of runs under each other'},
      s('defs', {}, s('pattern', {id: 'hatch-idle', width: 6, height: 6, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)'},
        s('rect', {width: 6, height: 6, class: 'hatch-back'}), s('line', {x1: 0, y1: 0, x2: 0, y2: 6, class: 'hatch-line'}))));
    runs.forEach((run, n) => {
      const middle = n * (head + 2 * half + gap) + head + half, end = x(run.end);
      // Steps from the middle line: one vertical and one horizontal move a bin.
      const area = (busy, sign) => `M${left},${middle}` + busy.map((v, k) =>
        `V${(middle - sign * v / 100 * half).toFixed(1)}H${Math.min(end, x((k + 1) * run.bin)).toFixed(1)}`).join('') + `V${middle}Z`;
      svg.append(s('text', {class: 'row-name', x: left, y: middle - half - 9}, run.name),
        s('text', {x: right, y: middle - half - 9, 'text-anchor': 'end'}, `${plural(run.steps.length, 'step')} in ${seconds(run.end)}; idle: rollout ${percent(run.idle[0])}, learner ${percent(run.idle[1])}`));
      svg.append(s('rect', {x: left, y: middle - half, width: end - left, height: 2 * half, fill: 'url(#hatch-idle)'}),
        s('path', {d: area(run.rollout, 1), fill: color('engine')}), s('path', {d: area(run.learner, -1), fill: color('source')}),
        s('line', {class: 'axis', x1: left, x2: end, y1: middle, y2: middle}),
        run.steps.map(at => s('line', {class: 'ref', x1: x(at), x2: x(at), y1: middle - half, y2: middle + half})));
      for (const [at, text] of [[middle - half + 8, '100\u2009%'], [middle + 4, '0'], [middle + half, '100\u2009%']]) svg.append(s('text', {x: left - 6, y: at, 'text-anchor': 'end'}, text));
      const over = s('rect', {x: left, y: middle - half, width: end - left, height: 2 * half, fill: 'transparent'});
      over.addEventListener('pointermove', event => {
        const at = (event.clientX - svg.getBoundingClientRect().left - left) / (right - left) * longest;
        const bin = Math.max(0, Math.min(run.rollout.length - 1, Math.floor(at / run.bin)));
        tip.show(event, h('b', {}, run.name), tipTable([['at', seconds(bin * run.bin)], ['update', String(Math.min(run.steps.length - 1, run.steps.filter(v => v <= at).length))],
          ['rollout busy', percent(run.rollout[bin] / 100), color('engine')], ['learner busy', percent(run.learner[bin] / 100), color('source')]]));
      });
      over.addEventListener('pointerleave', () => tip.hide());
      svg.append(over);
    });
    const bottom = height - 24;
    svg.append(s('line', {class: 'axis', x1: left, x2: right, y1: bottom, y2: bottom}));
    for (const tick of niceTicks(0, longest, width / 100)) svg.append(s('text', {x: x(tick), y: bottom + 17, 'text-anchor': 'middle'}, `${tick}\u2009s`));
    return svg;
  });
  node.append(h('div', {class: 'card'}, h('div', {class: 'bar'}, h('span', {class: 'grow'}), names), box));
}
