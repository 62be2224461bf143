"""588 configurations as in Appendix F.5 of ThunderSyncRL: analytical, trace and wall-clock speedup of each.

    python -m experiments.study --config=configs/study.py --workdir=runs/study

The paper's axes at a sixteenth of its trajectories and a fifth of its turns: batch sizes from half a wave to sixteen waves, horizons,
seven ratios of rollout to learner time, two repetitions, GRPO and OPD.  Every configuration is executed: scheduler, lane and a
small random student do real work, and rollouts are replayed at drawn times.  GRPO is released by trajectory, OPD by turns run
forward.  Beside the results stand the paper's: analytical against trace 1.6 % in the mean and 10.6 % at most, wall clock 6.5 % below
the trace.
"""

from ml_collections import config_dict

from configs import defaults


def get_config():
  """Returns the config."""
  config = defaults.get_config()
  config.schedule.pack_rows = (1,)  # Sync and thundersync run the same pieces of work
  config.schedule.admission_cap = 64
  config.learner.buckets = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
  config.study = config_dict.create(
      granularities=config_dict.create(grpo='trajectory', opd='forward'),
      capacity=8,  # Q, trajectories that roll out at once; the paper's is 128
      group_size=4,  # m; the paper's is 8
      batches=(4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128), turns_of_batches=8,  # the paper's over 16, at 40 turns over 5
      turns=(2, 3, 4, 6, 8, 12, 20, 30, 40, 60), batch_of_turns=32,  # the paper's over 5, at 512 trajectories over 16
      ratios=(0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8),
      repetitions=2,
      executed_every=1,  # every so-many-th cell is executed (5 meets every ratio); the others replay workloads drawn from the calibrated model
      calibration_updates=4,  # of each objective and horizon, on traces of their own
      turn_tokens=32,  # mean tokens of a turn
      service_exponent=0.49,  # gamma: how turns lengthen with the time a trajectory takes
      prompt_tokens=32,
      layers=2, width=128, ffn_width=256, heads=4, kv_heads=2, vocab_size=512,  # the student
  )
  return config
