"""A short run of the whole loop on real weights and real tools: three updates of three groups of four.

    python -m experiments.train --config=configs/smoke.py --workdir=runs/smoke

The untrained student solves little: expect most groups uniform.  `experiments.equivalence` and
`experiments.speedup` take their sizes from here too.
"""

from configs import quickstart


def get_config():
  """Returns the config."""
  config = quickstart.get_config()
  config.updates = 3
  config.batch.prompts = 3
  config.batch.group_size = 4
  config.evaluation.dev_tasks = 4
  config.evaluation.held_out_tasks = 2
  config.schedule.pack_rows = (4, 1)
  config.checkpoint.export = False
  return config
