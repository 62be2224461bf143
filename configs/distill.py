"""On-policy distillation on a laptop: SmolLM2-135M-Instruct learns the shell tasks from a teacher that has learned them.

    make quickstart
    python -m experiments.train --config=configs/distill.py:runs/quickstart-42/final --workdir=runs/distill

The argument is the teacher: a folder, hub id or package.  The teacher scores every turn while its command runs; rewards are
recorded and do not enter.  The same tasks, prompts and limits as `configs/quickstart.py`.
"""

from configs import quickstart


def get_config(teacher: str = 'runs/quickstart-42/final'):
  """Returns the config.

  Args:
    teacher: the model that scores.
  """
  config = quickstart.get_config()
  config.objective.name = 'opd'
  config.teacher.source = teacher
  return config
