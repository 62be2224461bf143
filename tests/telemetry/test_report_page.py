"""The report: one self-contained page, safe against whatever a tool printed, complete and bounded in size."""

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import synthetic
from ts_jax import types
from ts_jax.telemetry import report
from ts_jax.telemetry import rundir
from ts_jax.telemetry.report import collect
from ts_jax.telemetry.report import page


class Page(html.parser.HTMLParser):
  """Scripts by type, ids and attributes of a page."""

  def __init__(self, text):
    super().__init__()
    self.scripts, self.ids, self.attributes, self.tags, self._script = [], set(), [], [], None
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += [(tag, k, v) for k, v in attrs]
    self.ids |= {v for k, v in attrs if k == 'id'}
    if tag == 'script':
      self._script = [dict(attrs).get('type', 'code'), '']

  def handle_data(self, data):
    if self._script:
      self._script[1] += data

  def handle_endtag(self, tag):
    if tag == 'script':
      self.scripts.append(tuple(self._script))
      self._script = None

  @property
  def data(self):
    return json.loads(dict(self.scripts)['application/json'])


@pytest.fixture(scope='module')
def text(finished_run, tmp_path_factory):
  return report.build_report(finished_run, tmp_path_factory.mktemp('out') / 'r.html').read_text('utf-8')


def test_the_page_is_complete_and_refers_to_nothing_outside(text):
  found = Page(text)
  assert {'overview', 'rewards', 'steps', 'timeline', 'trajectories', 'setup', 'data'} <= found.ids
  assert [kind for kind, _ in found.scripts] == ['application/json', 'code']
  assert 'link' not in found.tags and 'img' not in found.tags and 'iframe' not in found.tags
  assert not [a for a in found.attributes if a[1] in ('src', 'srcset') or (a[1] == 'href' and not a[2].startswith('#'))]
  assert not re.search(r'@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)', text.split('id="data"')[0] + dict(found.scripts)['code'])
  assert "default-src 'none'" in text


def test_hostile_tool_output_stays_data(finished_run, text):
  assert any(synthetic.HOSTILE == turn.observation for u in range(5) for t in finished_run.read_trajectories(u) for turn in t.turns)
  data = Page(text).data
  assert any(turn['seen'] == synthetic.HOSTILE for t in data['trajectories']['items'] for turn in t['turns'])
  assert text.count('</script>') == 2 and '<img' not in text and '<!--' not in text and 'alert("no")' not in text
  # The page never parses markup from data.
  code = dict(Page(text).scripts)['code']
  assert not re.search(r'innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function', code)


def test_embedding_keeps_every_value():
  value = {'</script>': ['<!--', '&lt;', '\u2028', '\ud800', 1.5, None, True]}
  assert json.loads(page.embed(value)) == value
  assert '<' not in page.embed(value)


def test_data_that_looks_like_a_place_holder_is_left_alone(finished_run):
  data = collect.collect(finished_run)
  data['notes'] = ['/*SCRIPT*/ /*DATA*/ /*STYLE*/']
  assert Page(page.render(data)).data['notes'] == data['notes']


def test_the_data_is_that_of_the_run(finished_run, text):
  data = Page(text).data
  assert [u['update'] for u in data['updates']] == [0, 1, 2, 3, 4]
  assert {e['split'] for e in data['evals']} == {'dev', 'held_out'}
  assert data['config']['schedule'] == {'name': 'thundersync'} and data['manifest']['sandbox'] == 'bubblewrap' and data['notes'] == []
  trace = finished_run.read_trace()
  for update in range(5):
    spans = [s for s in trace if s.update == update]
    timeline = data['timelines'][str(update)]
    assert len(timeline['spans']) == len(spans)
    assert {data['kinds'][row[0]] for row in timeline['spans']} == {s.kind for s in spans} >= {'engine', 'tool', 'verify', 'source', 'publish'}
    assert timeline['spans'][0][1] == 0.0
    assert max(row[1] + row[2] for row in timeline['spans']) / 1000 == pytest.approx(max(s.end_s for s in spans) - timeline['start'], abs=1e-3)


def test_token_texts_join_to_what_the_engine_sampled(finished_run, model_folder, text):
  data = Page(text).data
  tokenizer = collect.tokenizer_lib.Tokenizer.load(model_folder)
  split = 0
  for t in data['trajectories']['items']:
    original = next(o for o in finished_run.read_trajectories(t['u']) if o.key == (t['u'], t['g'], t['i']))
    assert data['trajectories']['prompts'][t['prompt']]['text'] == tokenizer.decode(original.prompt_ids)
    assert t['tests'] == list(original.tests_passed) and t['reward'] == pytest.approx(original.reward)
    for turn, recorded in zip(t['turns'], original.turns, strict=True):
      texts = turn.get('pieces') or [data['tokens'][str(i)] for i in turn['ids']]
      split += 'pieces' in turn
      assert len(texts) == len(turn['ids']) == len(turn['lp'])
      assert ''.join(texts) == tokenizer.decode(recorded.sampled.token_ids)
      assert turn['context'] == [len(recorded.context_ids), tokenizer.decode(recorded.context_ids)] and turn.get('keeps') == recorded.keeps
  assert split  # some sampled characters took several tokens


def test_pieces_of_broken_bytes_end():
  decode = lambda ids: bytes(ids).decode('utf-8', 'replace')
  for data in ('é漢🙂'.encode(), b'\xff\xfe\xff\xfeab\xe6', b'\xf0\x9f', b''):
    assert ''.join(collect.pieces(list(data), decode)).replace('\ufffd', '') == data.decode('utf-8', 'ignore')
    assert len(collect.pieces(list(data), decode)) == len(data)


def test_without_the_model_folder_ids_are_shown_and_the_page_says_so(finished_run, tmp_path):
  run = copy_of(finished_run, tmp_path)
  manifest = run.read_manifest()
  run.manifest_path.write_text(json.dumps({**manifest, 'model_folder': '/nowhere/model'}))
  data = Page(report.build_report(run).read_text()).data
  assert data['tokens'] == {} and 'ids are shown' in data['notes'][0] and '/nowhere/model' in data['notes'][0]
  first = data['trajectories']['items'][0]
  assert data['trajectories']['prompts'][first['prompt']]['text'].split()[0].isdigit() and first['turns'][0]['ids']


def test_a_very_long_run_is_capped_in_whole_updates_and_the_page_says_so(finished_run):
  data = collect.collect(finished_run, collect.Caps(trajectories=30, spans=400))
  assert len(data['trajectories']['items']) == 24 and {t['u'] for t in data['trajectories']['items']} == {0, 4}
  assert sum(len(t['spans']) for t in data['timelines'].values()) <= 400 and '4' in data['timelines']
  assert any('24 of 60 trajectories' in n for n in data['notes']) and any('Timelines are shown for updates' in n for n in data['notes'])
  assert len(data['updates']) == 5  # curves keep every update


def test_long_texts_are_cut_and_say_so():
  text = collect.shorten('a' * 50_000)
  assert len(text) < 7000 and '44000 characters left out' in text


def test_a_run_that_has_only_started_has_a_report(tmp_path):
  with rundir.RunDirectory(tmp_path) as run:
    run.open({'updates': 3})
  data = Page(report.build_report(run).read_text()).data
  assert data['updates'] == [] and data['trajectories']['items'] == [] and data['timelines'] == {}


def test_family_falls_back_to_the_identifier():
  assert collect.family_of('copy-12', {}) == 'copy' and collect.family_of('a/b/3', {}) == 'a/b' and collect.family_of('solo', {}) == 'solo'
  assert collect.family_of('copy-12', {'task_families': {'copy-12': 'files'}}) == 'files'


def test_the_command_writes_the_page_and_refuses_a_folder_that_is_no_run(finished_run, tmp_path):
  run = copy_of(finished_run, tmp_path / 'run')

  def call(folder):
    return subprocess.run([sys.executable, '-m', 'experiments.report', f'--workdir={folder}'], capture_output=True, text=True,
                          env={**os.environ, 'PYTHONWARNINGS': 'ignore'})

  done = call(run.path)
  assert done.returncode == 0 and str(run.report) in done.stdout, done.stderr
  assert Page(run.report.read_text()).data['updates']
  refused = call(tmp_path)
  assert refused.returncode == 1 and 'config.json does not exist' in refused.stderr and 'Traceback' not in refused.stderr
  with pytest.raises(types.ConfigError, match='not a folder'):
    report.build_report(rundir.RunDirectory(tmp_path / 'absent'))


def copy_of(run, folder):
  shutil.copytree(run.path, folder, dirs_exist_ok=True)
  return rundir.RunDirectory(folder)
