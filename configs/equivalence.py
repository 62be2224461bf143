"""Update equivalence as in Appendix G of ThunderSyncRL: ten recorded batches under Sync and under every streamed granularity.

    python -m experiments.equivalence --config=configs/equivalence.py:grpo
    python -m experiments.equivalence --config=configs/equivalence.py:opd,runs/quickstart-42/final

The argument is the objective and, behind a comma, the teacher of `opd` (by default what `make quickstart` leaves).  Real
trajectories of SmolLM2-135M on the shell tasks are recorded once.  Needs 10 GB of free memory, and 6 GB of disk for a while.
The paper's figures on 27 B parameters, printed beside ours: relative error of the first float32 direction 5.1e-7 (OPD 1.1e-6),
parameter gap below 6e-5 after ten updates.  With exact sums every order and number of lanes gives equal bits.
"""

from ml_collections import config_dict

from configs import quickstart


def get_config(arg: str = 'grpo'):
  """Returns the config.

  Args:
    arg: objective[,teacher].
  """
  objective, _, teacher = arg.partition(',')
  config = quickstart.get_config()
  config.objective.name = objective
  config.teacher.source = teacher or 'runs/quickstart-42/final'  # read by objective 'opd' only
  config.updates = 10
  config.batch.prompts = 2
  config.batch.group_size = 4
  config.schedule.admission_cap = 2
  config.learner.kept_mb = 1200
  config.learner.matmul_precision = 'highest'
  config.equivalence = config_dict.create(
      orders=100,  # random arrival orders of a small random student
      student_orders=2,  # of the student itself
      student_updates=2,  # updates of each of these
      lanes=(1, 2, 4),  # numbers of learner lanes, each on a virtual device
      lane_orders=4,  # of the small student at each number beyond the first
      layers=2, width=16,  # sizes of the small student
  )
  return config
