"""The engines of a quickstart run as servers of their own: vLLM replicas, and a teacher where one is named.

    python -m experiments.serve --config=configs/serve.py
    python -m experiments.serve --config=configs/serve.py:runs/quickstart-42/final --config.rollout.replicas=2

The argument is a teacher (folder, hub id or package).  Expect a server in about 30 s on a CPU, then the URLs and the flags that
give them to a training run in another terminal or on another host.  Any training config serves too: its engines are started,
its learner is not.
"""

from configs import quickstart


def get_config(teacher: str = ''):
  """Returns the config.

  Args:
    teacher: the model that scores; empty: none is served.
  """
  config = quickstart.get_config()
  config.rollout.engine = config.teacher.engine = config.reference.engine = 'vllm'
  if teacher:
    config.objective.name = 'opd'
    config.teacher.source = teacher
  return config
