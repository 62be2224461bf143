"""The four schedules side by side on the shell tasks: updates of 64 trajectories, which sample in at least two waves.

    python -m experiments.speedup --config=configs/speedup.py --objectives=grpo,opd
    python -m experiments.speedup --config=configs/speedup.py:runs/quickstart-42/final,runs/quickstart-42/final --objectives=grpo,opd

The argument is the student and, behind a comma, the teacher of `opd`; by default SmolLM2-135M-Instruct and what `make quickstart`
leaves.  Sync does not work on groups whose rewards are all equal, while streaming may have by the time it knows: a student that
solves tasks now and then shows what schedules do, an untrained one how much is computed in vain.
"""

from configs import quickstart


def get_config(arg: str = ''):
  """Returns the config.

  Args:
    arg: student[,teacher].
  """
  student, _, teacher = arg.partition(',')
  config = quickstart.get_config()
  config.model.source = student or config.model.source
  config.teacher.source = teacher or 'runs/quickstart-42/final'  # read by objective 'opd' only
  config.batch.prompts = 8
  config.agent.concurrency = 24
  config.rollout.slots = 32
  return config
