"""Live progress: what the lines say and when they are written."""

import io

import pytest

from ts_jax.telemetry import progress


class Clock:
  now = 100.0

  def __call__(self):
    return self.now


class Terminal(io.StringIO):

  def isatty(self):
    return True


@pytest.mark.parametrize('seconds, text', [(None, '--'), (-1, '--'), (float('nan'), '--'), (0, '0.0s'), (9.94, '9.9s'), (9.96, '10s'), (59.4, '59s'), (59.6, '1m00s'),
                                           (185, '3m05s'), (3599.7, '1h00m'), (7620, '2h07m'), (100 * 3600, '100h00m')])
def test_durations(seconds, text):
  assert progress.format_duration(seconds) == text


def test_status_shows_everything_that_is_known():
  status = progress.TrainStatus(3, 20, 12, 8, 48, 0.4567, 123.4, 0.618, 75.0, 600.0, 'rollout')
  assert progress.format_status(status) == ('update 3 (4/20) rollout | traj 12 done 8 running /48 | reward 0.46 | 123 tok/s | learner 62% busy 38% idle | '
                                            '1m15s ETA 10m00s')


def test_status_does_not_invent_what_is_not_known():
  assert progress.format_status(progress.TrainStatus(0, 2)) == 'update 0 (1/2) | reward -- | -- tok/s | 0.0s ETA --'


def test_lasting_lines(finished_run):
  records = finished_run.read_metrics()
  update = next(r for r in records if r['kind'] == 'update')
  line = progress.format_update(update, 5)
  assert line.startswith(f'update 0 (1/5)  reward {update["reward_mean"]:.3f}  success') and len(line) < 125
  assert all(part in line for part in ('mixed groups', f'{update["scored_tokens"]} tok', 'step ', 'rollout ', 'tail ', '% busy'))
  unmeasured = {**update, 'reward_mean': None, 'success_rate': None, 'learner_busy_s': 0.0, 'learner_idle_s': 0.0}
  assert 'reward --' in progress.format_update(unmeasured, 5) and 'learner -- busy' in progress.format_update(unmeasured, 5)
  assert progress.format_evaluation({'split': 'held_out', 'update': 4, 'reward_mean': 0.5, 'success_rate': 0.25, 'attempts': 8}) == (
      'held-out after 4 updates: reward 0.500  success 25%  (8 attempts)')


def test_eta():
  assert progress.remaining_s([], 5.0, 0.0, 10) is None
  assert progress.remaining_s([], 5.0, 0.5, 10) == pytest.approx(95.0)  # ten steps of 10 s, 5 s of them gone
  assert progress.remaining_s([60.0, 10.0, 10.0], 4.0, 0.1, 3) == pytest.approx(26.0)  # the slow first update is not typical
  assert progress.remaining_s([10.0], 14.0, 0.9, 1) == 0.0
  assert progress.remaining_s([10.0], 0.0, 0.0, 0) == 0.0


def test_a_terminal_line_is_rewritten_and_fully_covered():
  clock, stream = Clock(), Terminal()
  line = progress.StatusLine(stream, clock)
  line.show('a long status')
  line.show('too soon')
  clock.now += 1
  line.show('short')
  line.lasting('done')
  line.close()
  assert stream.getvalue() == '\ra long status' + '\rshort' + ' ' * 8 + '\rdone ' + '\nshort' + '\n'


def test_a_terminal_status_never_wraps(monkeypatch):
  monkeypatch.setenv('COLUMNS', '20')
  stream = Terminal()
  progress.StatusLine(stream, Clock()).show('x' * 100)
  assert stream.getvalue() == '\r' + 'x' * 19


def test_elsewhere_a_plain_line_every_ten_seconds():
  clock, stream = Clock(), io.StringIO()
  line = progress.StatusLine(stream, clock)
  for second in range(25):
    clock.now = 100.0 + second
    line.show(f's{second}')
  line.lasting('update')
  line.close()
  assert stream.getvalue() == 's0\ns10\ns20\nupdate\n'


def test_a_closed_stream_does_not_end_a_run():
  stream = io.StringIO()
  stream.close()
  line = progress.StatusLine(stream, Clock())
  line.show('x')
  line.lasting('y')


def test_training_progress_estimates_from_finished_updates(finished_run):
  clock, stream = Clock(), io.StringIO()
  bar = progress.TrainProgress(5, line=progress.StatusLine(stream, clock, interval_s=0.0), clock=clock)
  bar.begin_update(0, 12)
  clock.now += 10
  status = bar.set(done=6, running=6, reward_mean=0.5, learner_busy=0.25)
  assert status.elapsed_s == 10 and status.eta_s == pytest.approx(90.0)
  clock.now += 10
  bar.finish_update(next(r for r in finished_run.read_metrics() if r['kind'] == 'update'))
  bar.begin_update(1, 12)
  assert bar.set(done=0).eta_s == pytest.approx(80.0)
  assert bar.set(phase='learner').reward_mean is None  # of the new update, not of the old one
  text = stream.getvalue()
  assert 'update 0 (1/5) rollout | traj 6 done 6 running /12 | reward 0.50' in text and 'learner 25% busy 75% idle' in text
  assert any(l.startswith('update 0 (1/5)  reward') for l in text.splitlines())


def test_progress_of_other_work():
  clock, stream = Clock(), io.StringIO()
  with progress.Progress(40, 'validating tasks', 'tasks', progress.StatusLine(stream, clock), clock) as bar:
    clock.now += 5
    bar.advance(10)
    clock.now += 15
    bar.advance(30)
  lines = stream.getvalue().splitlines()
  assert lines[0] == 'validating tasks: 10/40 tasks (25%) | 5.0s ETA 15s'
  assert lines[-1] == 'validating tasks: 40/40 tasks (100%) | 20s ETA 0.0s'
  assert progress.format_work('reading', 3, None, 2.0, 'files') == 'reading: 3 files | 2.0s'
