"""Confinement, one-shot commands, work folders, and what remains of a run that ends badly."""

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from ts_jax import types
from ts_jax.agents import backends
from ts_jax.agents import sandbox as sandbox_lib


def run_once(sandbox, *argv, workspace=None, **kwargs):
  workspace = workspace or sandbox.new_workspace()
  return asyncio.run(sandbox.run_once(list(argv), workspace.workdir, **kwargs))


@pytest.fixture(params=['bubblewrap', 'unshare'])
def confined(request, tmp_path):
  with sandbox_lib.Sandbox(sandbox_lib.Sandbox.probe(request.param), folder=tmp_path) as s:
    yield s


def test_network_is_out_of_reach(confined):
  result = run_once(confined, 'bash', '-c', 'exec 3<>/dev/tcp/1.1.1.1/80')
  assert result.exit_code != 0 and 'unreachable' in result.output


def test_local_services_of_the_machine_are_out_of_reach(confined):
  import socket
  with socket.create_server(('127.0.0.1', 0)) as server:
    result = run_once(confined, 'bash', '-c', f'exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}')
  assert result.exit_code != 0


@pytest.mark.parametrize('path', ['/usr/written', '/written', '/etc/passwd', '/opt/agent/bin/submit', '/bin/written'])
def test_writing_outside_the_work_folder_is_refused(confined, path):
  result = run_once(confined, 'bash', '-c', f'echo x > {path}')
  assert result.exit_code != 0
  assert not os.path.exists('/usr/written') and not os.path.exists('/written')


def test_files_and_processes_of_the_machine_are_hidden(confined):
  secret = os.path.abspath(__file__)
  result = run_once(confined, 'bash', '-c', f'cat {secret} /etc/shadow; ls /proc | grep -c "^[0-9]"; kill -9 {os.getpid()}; env')
  assert 'test_files_and_processes' not in result.output and 'root:' not in result.output
  assert int(next(line for line in result.output.splitlines() if line.isdigit())) < 10
  assert not any(name in result.output for name in ('VIRTUAL_ENV', 'PYTEST'))


def test_privileges_are_gone(confined):
  result = run_once(confined, 'bash', '-c', 'grep CapEff /proc/self/status; mount -t tmpfs x /tmp; chroot / true')
  assert 'CapEff:\t0000000000000000' in result.output and result.exit_code != 0


def test_usual_programs_work(confined):
  script = ('whoami; echo x > /tmp/a && cat /tmp/a; echo y > ~/b; cat ~/b; python3 -c "import tempfile; '
            'print(tempfile.TemporaryFile().write(b\'abc\'))"; touch made; ls')
  assert run_once(confined, 'bash', '-c', script).output.split()[1:] == ['x', 'y', '3', 'made']


def test_submit_and_timeout_work_in_each_backend(confined, processes_with):
  mark = f'6{secrets.randbelow(10**6)}.{secrets.randbelow(10**6)}'

  async def main():
    shell = confined.open_shell(confined.new_workspace())
    results = [await shell.run('false\nsubmit', 5), await shell.run(f'setsid sleep {mark} & sleep {mark}', 0.3)]
    await shell.close()
    return results
  submitted, late = asyncio.run(main())
  assert submitted.submitted and late.timed_out and not processes_with(mark)


def test_run_once_sees_the_work_folder_and_read_only_binds(sandbox, tmp_path):
  (tmp_path / 'tests').mkdir()
  (tmp_path / 'tests' / 'check.sh').write_text('cat /testbed/made; echo "$EXTRA"; touch /tests/x; exit 3')
  workspace = sandbox.new_workspace()
  (workspace.workdir / 'made').write_text('content\n')
  result = run_once(sandbox, 'bash', '/tests/check.sh', workspace=workspace, ro_binds={str(tmp_path / 'tests'): '/tests'},
                    env={'EXTRA': 'variable'})
  assert result.exit_code == 3 and result.output.startswith('content\nvariable\n')
  assert not (tmp_path / 'tests' / 'x').exists()


def test_a_bind_below_a_private_folder_is_readable(sandbox, tmp_path):
  """A virtual environment may lie under /tmp, which the sandbox replaces by its own."""
  (tmp_path / 'deep').mkdir()
  (tmp_path / 'deep' / 'file').write_text('seen')
  inside = '/tmp/some/where/deep'
  result = run_once(sandbox, 'cat', f'{inside}/file', ro_binds={str(tmp_path / 'deep'): inside})
  assert (result.exit_code, result.output) == (0, 'seen')


def test_run_once_ends_what_it_started(sandbox, processes_with):
  mark = f'5{secrets.randbelow(10**6)}.{secrets.randbelow(10**6)}'
  assert run_once(sandbox, 'bash', '-c', f'setsid sleep {mark} & exit 4').exit_code == 4
  assert run_once(sandbox, 'sleep', mark, timeout_s=0.3).timed_out
  assert not processes_with(mark)


def test_run_once_reports_a_signal_as_128_plus_its_number(sandbox):
  assert run_once(sandbox, 'bash', '-c', 'kill -9 $$').exit_code == 137


def test_run_once_takes_a_folder_made_by_others(sandbox, tmp_path):
  (tmp_path / 'other').mkdir()
  result = asyncio.run(sandbox.run_once(['touch', 'made'], tmp_path / 'other'))
  assert result.exit_code == 0 and (tmp_path / 'other' / 'made').exists()


def test_run_once_names_a_missing_path(sandbox):
  with pytest.raises(types.InfrastructureError, match='/no/such/folder'):
    run_once(sandbox, 'true', ro_binds={'/no/such/folder': '/tests'})


def test_work_folder_is_a_private_copy(sandbox, task_folder):
  files = task_folder / 'environment' / 'files'
  (files / 'link').symlink_to('note.txt')
  first, second = (sandbox.new_workspace(files) for _ in range(2))
  run_once(sandbox, 'bash', '-c', 'echo changed > note.txt', workspace=first)
  assert (files / 'note.txt').read_text() == (second.workdir / 'note.txt').read_text() == 'the word is heron\n'
  assert (second.workdir / 'link').is_symlink()


def test_removing_a_work_folder_copes_with_what_agents_leave(sandbox):
  workspace = sandbox.new_workspace()
  run_once(sandbox, 'bash', '-c', 'mkfifo pipe; mkdir -p a/b; touch a/b/c; ln -s / out; chmod 000 a/b a', workspace=workspace)
  workspace.remove()
  assert not workspace.folder.exists()


def test_killed_run_leaves_no_process_and_its_folder_is_swept(backend, tmp_path, processes_with):
  mark = f'4{secrets.randbelow(10**6)}.{secrets.randbelow(10**6)}'
  script = textwrap.dedent(f'''
      import asyncio
      from ts_jax.agents import sandbox as s
      async def main():
        box = s.Sandbox(s.Sandbox.probe(), folder={str(tmp_path)!r})
        shell = box.open_shell(box.new_workspace())
        await shell.run('setsid sleep {mark} & disown', 5)
        print('ready', flush=True)
        await shell.run('sleep {mark}', 60)
      asyncio.run(main())''')
  run = subprocess.Popen([sys.executable, '-c', script], stdout=subprocess.PIPE)
  assert run.stdout.readline() == b'ready\n' and processes_with(f'sleep {mark}')
  run.send_signal(signal.SIGKILL)
  run.wait()
  run.stdout.close()
  deadline = time.time() + 5
  while processes_with(f'sleep {mark}') and time.time() < deadline:
    time.sleep(0.02)
  assert not processes_with(f'sleep {mark}')
  assert len(list(tmp_path.glob('ts_jax-sandbox-*'))) == 1
  with sandbox_lib.Sandbox(backend, folder=tmp_path):
    assert len(list(tmp_path.glob('ts_jax-sandbox-*'))) == 1  # its own: the dead run's is gone
    with sandbox_lib.Sandbox(backend, folder=tmp_path):
      assert len(list(tmp_path.glob('ts_jax-sandbox-*'))) == 2  # a living run's stays
  assert not list(tmp_path.glob('ts_jax-sandbox-*'))


def test_probe_names_backend_and_remedy_where_there_is_none(monkeypatch):
  assert 'bubblewrap' in sandbox_lib.Sandbox.probe().description
  monkeypatch.setattr(backends, '_OUTER_PATH', '/nonexistent')
  with pytest.raises(types.ConfigError, match='apt-get install bubblewrap') as e:
    sandbox_lib.Sandbox.probe()
  assert 'bwrap' in str(e.value) and 'make sandbox' in str(e.value)


def test_probe_falls_back_explicitly(monkeypatch, tmp_path):
  for name in ('unshare', 'setpriv'):
    os.symlink(shutil.which(name, path=backends._OUTER_PATH), tmp_path / name)
  monkeypatch.setattr(backends, '_OUTER_PATH', f'{tmp_path}')
  failed = backends._try_backend(backends.Backend('bubblewrap', os.geteuid() == 0), backends.SandboxLimits())
  assert 'bwrap' in failed and 'not installed' in failed


def test_no_sandbox_is_used_only_when_allowed(monkeypatch):
  with pytest.raises(types.ConfigError, match='allow_unsandboxed'):
    sandbox_lib.Sandbox.probe('none')
  with pytest.raises(types.ConfigError, match='unknown'):
    sandbox_lib.Sandbox.probe('docker')
  monkeypatch.setattr(backends, '_try_backend', lambda *_: 'refused by the kernel')
  chosen = sandbox_lib.Sandbox.probe(allow_unsandboxed=True)
  assert chosen.tool == 'none' and 'files and network in reach' in chosen.description


def test_unsandboxed_shell_still_keeps_time_and_submits(tmp_path, processes_with):
  with sandbox_lib.Sandbox(sandbox_lib.Sandbox.probe('none', allow_unsandboxed=True), folder=tmp_path) as sandbox:
    mark = f'3{secrets.randbelow(10**6)}.{secrets.randbelow(10**6)}'

    async def main():
      shell = sandbox.open_shell(sandbox.new_workspace())
      results = [await shell.run('echo x > a; cat a; submit', 5), await shell.run(f'sleep {mark} & sleep {mark}', 0.3)]
      await shell.close()
      return results
    first, second = asyncio.run(main())
    assert first.output == 'x\n' and first.submitted and second.timed_out and not processes_with(mark)
    (tmp_path / 'tests').mkdir()
    done = run_once(sandbox, 'bash', '-c', 'echo made > b; ls /tests /testbed', ro_binds={str(tmp_path / 'tests'): '/tests'})
    assert done.exit_code == 0 and 'b' in done.output


def test_startup_is_quick(sandbox):
  async def main():
    times = []
    for _ in range(5):
      shell = sandbox.open_shell(sandbox.new_workspace())
      start = time.time()
      await shell.start()
      times.append(time.time() - start)
      await shell.close()
    return min(times)
  assert asyncio.run(main()) < 0.25


def test_bad_limit_is_named():
  with pytest.raises(types.ConfigError, match='processes=0'):
    backends.SandboxLimits(processes=0)


def test_unwritable_folder_is_a_clear_error(backend):
  with pytest.raises(types.ConfigError, match='TMPDIR'):
    sandbox_lib.Sandbox(backend, folder='/proc')


@pytest.mark.parametrize('tool', ['bubblewrap', 'unshare'])
def test_user_namespaces_confine_an_ordinary_user(tool):
  """What a run not started by root does, the limit on processes included."""
  with tempfile.TemporaryDirectory() as folder:  # outside pytest's own folders, which only this user may enter
    os.chmod(folder, 0o755)
    for name in ('work', 'mount'):
      os.mkdir(f'{folder}/{name}')
      if os.geteuid() == 0:
        os.chown(f'{folder}/{name}', 12345, 12345)
    script = 'touch made; grep CapEff /proc/self/status; f() { f | f & }; f 2>/dev/null; sleep 0.2; set -- /proc/[0-9]*; echo $#; echo x > /y'
    argv = backends.resolve_tool(backends.Backend(tool, False).argv(
        ['bash', '-c', script], binds=[backends.Bind(f'{folder}/work', '/testbed', True)], user_id=1,
        limits=backends.SandboxLimits(processes=24), mount_point=f'{folder}/mount'))
    if os.geteuid() == 0:
      argv = ['setpriv', '--reuid', '12345', '--regid', '12345', '--clear-groups', *argv]
    done = subprocess.run(argv, env=backends.inner_environment(), capture_output=True, text=True, timeout=20, check=False)
    lines = done.stdout.split('\n')
    assert lines[0] == 'CapEff:\t0000000000000000' and int(lines[1]) <= 26, done
    assert os.path.exists(f'{folder}/work/made') and 'Read-only' in done.stderr
