// The trajectory browser: filters, list, conversation.
const ITEMS = DATA.trajectories.items;
const PAGE = 200;

function tokenTint(logProb) {
  // Probability 1 is plain; the tint saturates at exp(-6).
  return `background:rgba(var(--heat),${(0.62 * Math.min(1, Math.sqrt(Math.min(6, -logProb) / 6))).toFixed(3)})`;
}

function sampledTokens(turn) {
  const off = new Set(turn.unscored || []);
  return h('pre', {class: 'block sampled'}, turn.ids.map((id, n) => {
    const known = turn.pieces ? turn.pieces[n] : DATA.tokens[id];
    const text = known === undefined ? `${id} ` : known;
    const lp = Math.min(0, turn.lp[n]);
    const control = /^<\|.*\|>$/.test(text);
    const node = h('span', {class: 't' + (off.has(n) ? ' off' : '') + (control ? ' ctl' : ''), style: off.has(n) ? null : tokenTint(lp)}, text);
    node.addEventListener('pointermove', e => tip.show(e, h('b', {class: 'mono'}, JSON.stringify(text)),
      tipTable([['log-prob', fixed(turn.lp[n], 3)], ['probability', percent(Math.exp(lp), lp < -4.6 ? 2 : 1)], ['id', String(id)], ['scored', off.has(n) ? 'no' : 'yes']])));
    node.addEventListener('pointerleave', () => tip.hide());
    return node;
  }));
}

function turnView(turn, n) {
  const sum = turn.lp.reduce((a, b) => a + b, 0), scored = turn.ids.length - (turn.unscored || []).length;
  return h('div', {class: 'turn'},
    h('div', {class: 'turn-head'}, h('b', {}, `Turn ${n}`), h('span', {}, `${plural(scored, 'scored token')}`),
      h('span', {}, `mean log-prob ${fixed(turn.ids.length ? sum / turn.ids.length : null)}`), h('span', {}, `stopped by ${turn.finish}`),
      h('span', {}, `engine ${seconds(turn.seconds[0])}`), turn.seconds[1] > 0 && h('span', {}, `tool ${seconds(turn.seconds[1])}`)),
    turn.context[0] > 0 && h('details', {}, h('summary', {}, `Context appended ${turn.keeps === undefined ? 'before it' : `to the first ${plural(turn.keeps, 'token')}, the rest being rewritten`}: ${plural(turn.context[0], 'token')}, never scored`), h('pre', {class: 'block unscored'}, turn.context[1])),
    sampledTokens(turn),
    h('div', {class: 'caption'}, turn.action === null ? 'No readable action' : 'Action'), turn.action !== null && h('pre', {class: 'block'}, turn.action || '(empty)'),
    h('div', {class: 'caption'}, 'Observation'), h('pre', {class: 'block unscored'}, turn.seen || '(nothing)'));
}

function conversation(t) {
  const prompt = DATA.trajectories.prompts[t.prompt];
  return [
    h('h3', {}, t.task),
    h('ul', {class: 'chips'}, [
      h('li', {class: t.success ? 'pass' : ''}, `reward ${fixed(t.reward)}`), h('li', {}, words(t.end)), h('li', {}, `update ${t.u}, group ${t.g}, attempt ${t.i}`), h('li', {}, `policy version ${t.version}`),
      h('li', {}, `${seconds(t.seconds[0])} to act`), h('li', {}, `${seconds(t.seconds[1])} to verify`)]),
    t.tests.length > 0 && h('ul', {class: 'chips', 'aria-label': 'tests'}, t.tests.map(v => {
      const cut = v.lastIndexOf('='), passed = v.slice(cut + 1) === '1';
      return h('li', {class: passed ? 'pass' : 'fail'}, (passed ? '\u2713 ' : '\u2717 ') + v.slice(0, cut));
    })),
    h('details', {}, h('summary', {}, `Prompt shared by the group: ${plural(prompt.tokens, 'token')}, never scored`), h('pre', {class: 'block unscored'}, prompt.text)),
    t.turns.map(turnView),
  ].flat().filter(Boolean);
}

function drawBrowser() {
  const node = sectionHead('trajectories', 'Trajectories', 'What the agent was told, what it sampled, what the shell answered. Tint shows how unlikely a sampled token was; text the loss never sees is grey.');
  if (!ITEMS.length) { node.append(h('p', {class: 'empty card'}, 'This run has no trajectories yet.')); return () => {}; }
  const distinct = get => [...new Set(ITEMS.map(get))];
  const choice = (name, options, value) => h('select', {'aria-label': name, onchange: () => refresh()}, options.map(([v, text]) => h('option', {value: v, selected: v === value}, text)));
  const updates = distinct(t => t.u).sort((a, b) => a - b);
  const update = choice('update', [['', 'All updates'], ...updates.map(u => [String(u), `Update ${u}`])], String(updates[updates.length - 1]));
  const family = choice('family', [['', 'All families'], ...distinct(t => t.family).sort().map(f => [f, words(f)])]);
  const reward = choice('reward', [['', 'Any reward'], ['full', 'All tests pass'], ['part', 'Some pass'], ['none', 'None pass'], ['unknown', 'No reward']]);
  const end = choice('terminal reason', [['', 'Any ending'], ...distinct(t => t.end).sort().map(r => [r, words(r)])]);
  const order = choice('order', [['', 'By group'], ['low', 'Lowest reward first'], ['high', 'Highest reward first'], ['long', 'Most turns first']]);
  const shown = h('span', {class: 'aside'}), list = h('div', {class: 'card list', 'aria-label': 'trajectories'}), talk = h('div', {class: 'card talk'});
  node.append(h('div', {class: 'bar'}, update, family, reward, end, order, shown, h('span', {class: 'grow'}),
    h('span', {class: 'scale'}, 'likely', h('i', {}), 'unlikely')), h('div', {class: 'browser'}, list, talk));
  const tier = t => !isNumber(t.reward) ? 'unknown' : t.success ? 'full' : t.reward > 0 ? 'part' : 'none';
  let found = [], limit = PAGE, current = null;

  function refresh(open) {
    found = ITEMS.filter(t => (!update.value || t.u === +update.value) && (!family.value || t.family === family.value) && (!reward.value || tier(t) === reward.value) &&
      (!end.value || t.end === end.value));
    if (order.value === 'long') found.sort((a, b) => b.turns.length - a.turns.length);
    else if (order.value) found.sort((a, b) => (order.value === 'low' ? 1 : -1) * ((a.reward ?? 0) - (b.reward ?? 0)));
    limit = PAGE;
    shown.textContent = plural(found.length, 'trajectory').replace('trajectorys', 'trajectories');
    fill();
    show(open || (found.includes(current) ? current : found[0]));
  }
  function fill() {
    list.replaceChildren(...found.slice(0, limit).map(t => {
      t.row = h('button', {type: 'button', 'aria-current': String(t === current), onclick: () => show(t)},
        h('span', {class: 'pill ' + tier(t)}, fixed(t.reward)), h('span', {class: 'task'}, t.task), h('span', {class: 'aside'}, ''),
        h('span', {class: 'meta'}, `update ${t.u}, attempt ${t.g}.${t.i}, ${plural(t.turns.length, 'turn')}${t.end === 'done' ? '' : ', ' + words(t.end)}`));
      return t.row;
    }));
    if (found.length > limit) list.append(h('button', {type: 'button', class: 'more', onclick: () => { limit += PAGE; fill(); }}, `Show ${Math.min(PAGE, found.length - limit)} more`));
    if (!found.length) list.append(h('p', {class: 'empty'}, 'Nothing matches these filters.'));
  }
  function show(t) {
    if (current && current.row) current.row.setAttribute('aria-current', 'false');
    current = t;
    if (!t) { talk.replaceChildren(h('p', {class: 'empty'}, 'No trajectory selected.')); return; }
    if (t.row) { t.row.setAttribute('aria-current', 'true'); }
    talk.replaceChildren(...conversation(t));
    talk.scrollTop = 0;
  }
  list.addEventListener('keydown', event => {
    const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
    const to = step && found[found.indexOf(current) + step];
    if (!to || !to.row) return;
    event.preventDefault();
    show(to);
    to.row.focus();
  });
  refresh();
  return (u, g, i) => {
    const t = ITEMS.find(v => v.u === u && v.g === g && v.i === i);
    if (!t) return;
    update.value = String(u); family.value = ''; reward.value = ''; end.value = '';
    refresh(t);
    node.scrollIntoView();
    if (t.row) list.scrollTop = t.row.offsetTop - list.offsetTop - 100;
  };
}
