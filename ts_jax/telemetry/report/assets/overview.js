// Headline figures, reward curves, step-time breakdown, setup tables.
const UPDATES = DATA.updates;
const evalsOf = split => DATA.evals.filter(e => e.split === split);
const rewardTicks = niceTicks(0, DATA.full_reward, 3);
const column = key => UPDATES.map(u => [u.update, u[key]]);

function lookup(object, ...paths) {
  for (const path of paths) {
    const value = path.split('.').reduce((o, k) => o && o[k], object);
    if (value !== undefined && value !== null) return value;
  }
  return null;
}

function figure(label, before, after, note) {
  const both = isNumber(before) && isNumber(after);
  const delta = both ? after - before : null;
  return h('div', {class: 'card figure'}, h('div', {class: 'label'}, label),
    h('div', {class: 'value'}, isNumber(before) || isNumber(after) ? [fixed(before), h('span', {class: 'arrow'}, '\u2192'), fixed(after)] : unknown),
    h('div', {class: 'delta'}, both && h('span', {class: delta > 0 ? 'up' : delta < 0 ? 'down' : ''}, (delta > 0 ? '+' : '') + fixed(delta)), both && ', ', note));
}

function drawOverview() {
  const {config, manifest, outcome} = DATA;
  const model = lookup(manifest, 'model', 'model_spec') || lookup(config, 'model.spec', 'model.path', 'model') || 'unknown model';
  const name = typeof model === 'string' ? model : JSON.stringify(model);
  document.title = `${name} \u2013 ts_jax run report`;
  const total = UPDATES.reduce((sum, u) => sum + (u.step_s || 0), 0);
  const busy = UPDATES.reduce((sum, u) => sum + (u.learner_busy_s || 0), 0);
  const lane = busy + UPDATES.reduce((sum, u) => sum + (u.learner_idle_s || 0), 0);
  const planned = lookup(config, 'updates', 'train.updates');
  const facts = [
    ['schedule', lookup(config, 'schedule.name')],
    ['seed', lookup(config, 'seed') ?? lookup(manifest, 'seed')],
    ['updates', isNumber(planned) && planned !== UPDATES.length ? `${UPDATES.length} of ${planned}` : UPDATES.length],
    ['trajectories', count(UPDATES.reduce((sum, u) => sum + (u.trajectories || 0), 0))],
    ['scored tokens', count(UPDATES.reduce((sum, u) => sum + (u.scored_tokens || 0), 0))],
    ['time in updates', seconds(total)],
    ['tasks', DATA.tasks || null],
    ['sandbox', lookup(manifest, 'sandbox', 'sandbox_backend')],
    ['started', lookup(manifest, 'started')?.replace('T', ' ').replace('+00:00', ' UTC')],
  ].filter(([, v]) => v !== null && v !== undefined);
  const quarter = Math.max(1, Math.floor(UPDATES.length / 4));
  const cards = [
    figure('Training reward, first to last quarter', outcome.first_quarter, outcome.last_quarter, `${plural(quarter, 'update')} each, of ${fixed(DATA.full_reward, 1)}`),
    figure('Dev reward, before to after', outcome.dev_before, outcome.dev_after, 'unseen tasks of the training families'),
    (isNumber(outcome.held_out_before)) && figure('Held-out family, before to after', outcome.held_out_before, outcome.held_out_after, 'a family never trained on'),
    h('div', {class: 'card figure'}, h('div', {class: 'label'}, 'Learner busy'), h('div', {class: 'value'}, lane ? percent(busy / lane) : unknown),
      h('div', {class: 'delta'}, lane ? `idle ${percent(1 - busy / lane)} of ${seconds(lane)} in updates` : 'not recorded')),
  ];
  document.getElementById('overview').replaceChildren(
    h('h1', {}, name),
    h('div', {class: 'figures'}, cards),
    h('dl', {class: 'facts'}, facts.map(([k, v]) => h('div', {}, h('dt', {}, k), h('dd', {}, String(v))))),
    ...DATA.notes.map(n => h('p', {class: 'note'}, n)));
}

function drawRewards() {
  const node = sectionHead('rewards', 'Rewards',
    'Only the tests of a task give reward: the fraction of tests passed, plus 0.5 when all pass. The horizontal axis counts the updates the policy has had; training points are the trajectories sampled from it.');
  const dev = evalsOf('dev'), held = evalsOf('held_out');
  const splits = (train, key) => [
    {name: 'training', color: color('train'), mark: 'line', points: column(train), band: key === 'reward_mean' ?
      UPDATES.map(u => [u.update, isNumber(u.reward_mean) ? Math.max(0, u.reward_mean - u.reward_std) : null, Math.min(DATA.full_reward, u.reward_mean + u.reward_std)]) : null},
    dev.length && {name: 'dev', color: color('dev'), mark: 'dot', points: dev.map(e => [e.update, e[key]])},
    held.length && {name: 'held-out family', color: color('held'), mark: 'diamond', points: held.map(e => [e.update, e[key]])},
  ].filter(Boolean);
  const reward = splits('reward_mean', 'reward_mean'), success = splits('success_rate', 'success_rate');
  const format = v => fixed(v, 2);
  node.append(h('div', {class: 'grid two'},
    card('Mean reward', 'band: one standard deviation over trajectories', legend(reward), lineChart({series: reward, label: 'mean reward by update', yMin: 0, yMax: DATA.full_reward + 0.05, yTicks: rewardTicks,
      yFormat: format, xLabel: 'updates the policy has had', xName: 'policy after updates:'})),
    card('Success rate', 'share of attempts that pass every test', legend(success), lineChart({series: success, label: 'success rate by update', yMin: 0, yMax: 1, yTicks: [0, 0.25, 0.5, 0.75, 1],
      yFormat: v => percent(v), xLabel: 'updates the policy has had', xName: 'policy after updates:'}))));
  const families = [...new Set(UPDATES.concat(DATA.evals).flatMap(u => Object.keys(u.reward_by_family || {})))].sort();
  if (!families.length) return;
  const of = (records, f) => records.map(r => [r.update, (r.reward_by_family || {})[f] ?? null]);
  node.append(h('div', {class: 'grid small'}, families.map(f => {
    const series = [
      {name: 'training', color: color('train'), mark: 'line', points: of(UPDATES, f)},
      {name: 'dev', color: color('dev'), mark: 'dot', points: of(dev, f).filter(p => isNumber(p[1]))},
      {name: 'held out', color: color('held'), mark: 'diamond', points: of(held, f).filter(p => isNumber(p[1]))},
    ].filter(v => v.points.some(p => isNumber(p[1])));
    const values = (series[0] || {points: []}).points.map(p => p[1]).filter(isNumber);
    return card(words(f), values.length ? `${fixed(values[0])} \u2192 ${fixed(values[values.length - 1])}` : null,
      lineChart({series, label: `reward of ${f}`, height: 130, yMin: 0, yMax: DATA.full_reward + 0.05, yTicks: rewardTicks, yFormat: format, xName: 'policy after updates:'}));
  })));
}

function drawSteps(pick) {
  const node = sectionHead('steps', 'Where the step time goes',
    'Rollout lasts from the first request to the last reward. The tail is learner work that was left then: streaming shortens it. Select a bar to see its timeline.');
  const xs = UPDATES.map(u => u.update);
  const get = key => UPDATES.map(u => u[key] || 0);
  const other = UPDATES.map(u => Math.max(0, (u.step_s || 0) - (u.rollout_s || 0) - (u.tail_s || 0) - (u.optimizer_s || 0) - (u.publish_s || 0)));
  const parts = [
    {name: 'rollout', color: color('engine'), values: get('rollout_s')}, {name: 'learner tail', color: color('source'), values: get('tail_s')},
    {name: 'optimizer', color: color('optimizer'), values: get('optimizer_s')}, {name: 'publication', color: color('publish'), values: get('publish_s')},
    other.some((v, n) => v > 0.01 * UPDATES[n].step_s) && {name: 'other', color: color('other'), values: other},
  ].filter(Boolean);
  const lane = [{name: 'busy', color: color('source'), values: get('learner_busy_s')}, {name: 'idle', color: color('other'), values: get('learner_idle_s')}];
  const reasons = [...new Set(UPDATES.flatMap(u => Object.keys(u.terminal || {})))].sort((a, b) => (a === 'done' ? -1 : b === 'done' ? 1 : a < b ? -1 : 1));
  const ends = reasons.map((r, n) => ({name: words(r), color: color('e' + n % 7), values: UPDATES.map(u => (u.terminal || {})[r] || 0)}));
  const common = {xs, xLabel: 'update', onPick: pick};
  const bar = (title, aside, stacks, options) => card(title, aside, legend(stacks), barChart({...common, stacks, label: title, ...options}));
  node.append(h('div', {class: 'grid two'},
    bar('Step time', 'seconds', parts, {yFormat: (v, long) => long ? seconds(v) : compact(v), extra: n => [['whole step', seconds(UPDATES[n].step_s)]]}),
    bar('Learner busy and idle', 'share of the step', lane, {share: true, yFormat: (v, long) => long ? seconds(v) : percent(v)}),
    bar('How trajectories ended', 'share of trajectories', ends, {share: true, yFormat: (v, long) => long ? count(v) : percent(v)}),
    bar('Groups', 'a group whose rewards are all equal moves nothing', [
      {name: 'with a reward difference', color: color('train'), values: UPDATES.map(u => u.groups - u.groups_uniform)},
      {name: 'uniform', color: color('other'), values: get('groups_uniform')}], {yFormat: v => compact(v),
      extra: n => [['sources skipped', count(UPDATES[n].skipped_sources)], ['sources computed in vain', count(UPDATES[n].wasted_sources)]]})));
  const small = (title, aside, series, format) => card(title, aside, lineChart({series, label: title, height: 130, yMin: 0, yFormat: format}));
  const one = (name, key, tone) => [{name, color: color(tone), mark: 'line', points: column(key)}];
  node.append(h('div', {class: 'grid small'},
    small('Generated tokens', 'tokens/s', one('tokens/s', 'tokens_per_s', 'engine'), compact),
    small('Turns', 'mean per trajectory', one('turns', 'turns_mean', 'tool'), compact),
    small('Gradient norm', 'before clipping', one('norm', 'grad_norm', 'source'), compact),
    small('Sampler gap', '|engine \u2212 learner| log-prob', [...one('largest', 'sampler_gap_max', 'optimizer'), ...one('mean', 'sampler_gap_mean', 'verify')], compact),
    small('Sampler KL', 'engine to learner, k3, nats per token', one('k3', 'sampler_kl_k3', 'optimizer'), compact),
    small('Effective sample size', 'of importance weights, share of tokens', one('share', 'sampler_ess', 'verify'), compact),
    UPDATES.some(u => u.lag_max) && small('Policy lag', 'of sampled tokens, in updates', [...one('largest', 'lag_max', 'optimizer'), ...one('mean', 'lag_mean', 'verify')], compact)));
}

function flat(object, prefix = '') {
  return Object.entries(object).flatMap(([k, v]) => v && typeof v === 'object' && !Array.isArray(v) && Object.keys(v).length ? flat(v, `${prefix}${k}.`) :
    [[prefix + k, typeof v === 'string' ? v : JSON.stringify(v)]]);
}

function drawSetup() {
  const node = sectionHead('setup', 'Setup', 'The resolved configuration and the environment of the run, as stored in its folder.');
  const table = object => h('table', {class: 'kv'}, h('tbody', {}, flat(object).map(([k, v]) => h('tr', {}, h('td', {}, k), h('td', {class: 'mono'}, v)))));
  node.append(h('div', {class: 'setup'}, card('Configuration', 'config.json', table(DATA.config)), card('Environment', 'manifest.json', table(DATA.manifest))));
}
